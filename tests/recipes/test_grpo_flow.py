"""What the GRPO recipe does around the numbers: sampling, scoring, updates, order, resume.

A fake backend stands in for the computing: its completions are scripted and every call is seen.
"""

import json
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from recipes import grpo
from tests.fakes import Done, FakeBackend, FakeSession
from tunebook.compose import compose
from tunebook.errors import ConfigError, StaleGenerator
from tunebook.launch import start_run
from tunebook.models import load_tokenizer
from tunebook.runs import RunDir, RunState, StopReason
from tunebook.runs.directory import NoStepsError
from tunebook.types import Completion
from tunebook.types import StopReason as CompletionEnd

TINY = "pkg://tunebook/assets/tiny_model"


def answers(prompt, number):
    """Every other completion of a prompt is right."""
    return f"It is {prompt if number % 2 == 0 else '-1'}."


@dataclass
class ScriptedBackend(FakeBackend):
    """Answers a prompt by the number in it; `answer` says what."""

    answer: object = answers
    truncated: object = staticmethod(lambda prompt, number: False)
    sessions: list = field(default_factory=list)
    samples: list = field(default_factory=list)
    """(version, prompts, num_samples) of every sample call."""
    updates: list = field(default_factory=list)
    """The data and the loss of every forward_backward."""

    def __post_init__(self):
        self.tokenizer = load_tokenizer(TINY)

    @property
    def capabilities(self):
        return replace(super().capabilities, max_sessions=8, has_generator=True)

    def open_session(self, name, lora, *, directory, restore=None, with_optimizer=True):
        plain = super().open_session(
            name, lora, directory=directory, restore=restore, with_optimizer=with_optimizer
        )
        session = ScriptedSession(self, plain.directory, plain.batches)
        session.name, session.version = name, 0
        self.sessions.append(session)
        return session


class ScriptedSession(FakeSession):
    def publish_weights(self):
        self.backend.calls.append("publish")
        self.version += 1
        return Done(ScriptedGenerator(self, self.version))

    def forward_backward(self, data, loss_fn, *, rows_per_unit=1):
        done = super().forward_backward(data, loss_fn, rows_per_unit=rows_per_unit)
        self.backend.updates.append((list(data), loss_fn))
        num_tokens = float(sum((np.asarray(d.columns["token_weights"]) != 0).sum() for d in data))
        return Done({**done.value, "num_tokens": num_tokens, "ratio_sum": num_tokens})


@dataclass
class ScriptedGenerator:
    session: ScriptedSession
    version: int

    def sample(self, prompts, params, num_samples):
        backend = self.session.backend
        backend.calls.append(f"sample v{self.version}")
        texts = [backend.tokenizer.decode(prompt) for prompt in prompts]
        numbers = ["".join(filter(str.isdigit, text)) for text in texts]
        backend.samples.append((self.version, [int(number) for number in numbers], num_samples))
        completions = [
            [self._completion(number, sample) for sample in range(num_samples)]
            for number in numbers
        ]
        return Later(self, completions)

    def _completion(self, prompt, number):
        backend = self.session.backend
        cut = backend.truncated(int(prompt), number)
        tokens = backend.tokenizer.encode(backend.answer(prompt, number), add_special_tokens=False)
        if not cut:
            tokens.append(backend.tokenizer.eos_token_id)
        return Completion(
            np.asarray(tokens, np.int32),
            np.full(len(tokens), -1.0, np.float32),
            CompletionEnd.LENGTH if cut else CompletionEnd.STOP,
            self.version,
        )


@dataclass
class Later:
    """Completions that are gone once the session has published again."""

    generator: ScriptedGenerator
    value: object

    def result(self):
        if self.generator.version != self.generator.session.version:
            raise StaleGenerator("published since")
        return self.value


@pytest.fixture
def configure(tmp_path):
    """A function that composes a config over prompts `Say 1`, `Say 2`, ... with their number."""

    def make(count=10, /, **overrides):
        path = tmp_path / "prompts.jsonl"
        rows = [
            {"prompt": [{"role": "user", "content": f"Say {number}"}], "answer": str(number)}
            for number in range(1, count + 1)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        values = {
            "data.path": str(path),
            "runs_dir": str(tmp_path / "runs"),
            "eval.fraction": 0,
            "plan.batch_size": 2,
            "rollout.group_size": 4,
            "rollout.max_new_tokens": 16,
            "samples.num_prompts": 0,
        }
        values.update({key.replace("__", "."): value for key, value in overrides.items()})
        return compose("grpo", values)

    return make


def run_all(config, backend):
    task = grpo.prepare(config)
    run = start_run("grpo", task)
    reports = list(grpo.train(task, backend, run))
    return task, RunDir.open(run.path), reports


def trained_prompts(backend):
    """Prompts of every sample call, in order."""
    return [number for _, prompts, _ in backend.samples for number in prompts]


def rows_of(run):
    return [row for row in run.metrics() if row["step"] > 0]


def test_every_step_samples_from_the_weights_of_the_step_before(configure):
    """Case 73: each step samples from what was published after the last update; staleness is 0."""
    backend = ScriptedBackend()
    _, run, _ = run_all(configure(plan__epochs=None, plan__max_steps=3), backend)
    seen = [call.split()[0] for call in backend.calls]
    seen = [call for call in seen if call in ("publish", "sample", "forward_backward")]
    # Before the first step, an evaluation looks at samples.num_prompts=0 prompts: no call.
    assert seen == ["publish"] + 3 * ["sample", "forward_backward", "publish"]
    assert [version for version, _, _ in backend.samples] == [1, 2, 3]
    assert [row["train/staleness"] for row in rows_of(run)] == [0, 0, 0]
    assert run.record.outcome.stop_reason is StopReason.MAX_STEPS


def test_a_lagging_policy_samples_the_next_batch_before_it_trains_this_one(configure):
    backend = ScriptedBackend()
    config = configure(plan__epochs=None, plan__max_steps=3, rollout__policy_lag=1)
    _, run, _ = run_all(config, backend)
    seen = [call.split()[0] for call in backend.calls]
    seen = [call for call in seen if call in ("publish", "sample", "forward_backward")]
    assert seen == [
        "publish", "sample", "sample", "forward_backward", "publish", "sample",
        "forward_backward", "publish", "forward_backward", "publish",
    ]  # fmt: skip
    assert [version for version, _, _ in backend.samples] == [1, 1, 2]
    assert [row["train/staleness"] for row in rows_of(run)] == [0, 1, 1]
    assert [row["train/staleness_max"] for row in rows_of(run)] == [0, 1, 1]


def test_trains_exactly_the_sampled_ids_with_the_samplers_logprobs(configure):
    """Cases 71 and 80: nothing is tokenised again, the sampled end token carries weight."""
    backend = ScriptedBackend()
    run_all(configure(plan__epochs=None, plan__max_steps=1), backend)
    [(data, _)] = backend.updates
    [(_, [first, _], _)] = backend.samples
    ids = backend.tokenizer.encode(f"It is {first}.", add_special_tokens=False)
    end = backend.tokenizer.eos_token_id
    tokens = data[0].tokens.tolist()
    assert tokens[-len(ids) - 1 :] == [*ids, end]
    columns = data[0].columns
    sampled = len(ids) + 1
    assert (np.asarray(columns["token_weights"]) != 0).tolist() == [
        position >= data[0].num_scored - sampled for position in range(data[0].num_scored)
    ]
    assert columns["sampling_logprobs"][-sampled:].tolist() == [-1.0] * sampled
    # Two of four are right: rewards 1, 0, 1, 0, so advantages of half.
    assert (
        columns["advantages"].tolist() == [0.0] * (data[0].num_scored - sampled) + [0.5] * sampled
    )
    weights = sum(float(np.sum(datum.columns["token_weights"])) for datum in data)
    assert weights == pytest.approx(1, abs=1e-6)


def test_groups_without_variance_are_left_out_and_counted(configure):
    """Prompt 1 is always answered right: only the other is trained, and the share says a half."""
    backend = ScriptedBackend(
        answer=lambda prompt, number: f"{prompt if prompt == '1' or number else -1}"
    )
    _, run, _ = run_all(configure(2), backend)
    [(data, _)] = backend.updates
    assert len(data) == 4
    [row] = rows_of(run)
    assert (row["train/zero_variance_share"], row["train/samples"]) == (0.5, 4)


def test_a_step_with_nothing_to_learn_makes_no_update_and_the_run_goes_on(configure):
    """The second batch has equal rewards: 3 steps, 2 updates, counters and checkpoints right."""
    taught = set()

    def answer(prompt, number):
        taught.add(prompt)
        equal = len(taught) in (3, 4)  # the prompts of the second step
        return f"{prompt if equal or number else -1}"

    backend = ScriptedBackend(answer=answer)
    config = configure(10, plan__epochs=None, plan__max_steps=3, plan__checkpoint_every=1)
    _, run, reports = run_all(config, backend)
    assert [row["train/num_updates"] for row in rows_of(run)] == [1, 0, 1]
    assert backend.calls.count("optim_step") == 2
    assert run.record.outcome.steps == 3
    assert [report.step for report in reports if report.checkpoint] == [1, 2, 3]
    assert "train/loss" not in rows_of(run)[1]


def test_a_run_without_a_single_update_fails(configure):
    """Success with 0 optimizer steps is impossible (case 30)."""
    backend = ScriptedBackend(answer=lambda prompt, number: prompt)
    with pytest.raises(NoStepsError, match="no group had rewards that differ"):
        run_all(configure(4), backend)


def test_the_position_counts_prompts_whatever_is_filtered(configure):
    """Case 35: 10 prompts, 2 a step, 3 groups filtered; after a resume the next prompt follows."""
    filtered = {"3", "5", "8"}

    def answer(prompt, number):
        return f"{prompt if prompt in filtered or number else -1}"

    unbroken = ScriptedBackend(answer=answer)
    run_all(configure(10, plan__epochs=2, plan__checkpoint_every=1), unbroken)
    assert len(trained_prompts(unbroken)) == 20
    assert sorted(trained_prompts(unbroken)[:10]) == list(range(1, 11))

    backend = ScriptedBackend(answer=answer)
    task = grpo.prepare(configure(10, plan__epochs=2, plan__checkpoint_every=1))
    run = start_run("grpo", task)
    steps = grpo.train(task, backend, run)
    for report in steps:
        if report.step == 4:
            steps.close()
    resumed = ScriptedBackend(answer=answer)
    run_all(compose("grpo", {"resume": str(run.path)}), resumed)
    assert trained_prompts(backend) + trained_prompts(resumed) == trained_prompts(unbroken)


def test_dynamic_sampling_refills_and_goes_on_where_it_stopped(configure):
    """Case 35 with refills: the stream is walked once, no prompt repeated or skipped."""
    filtered = {"3", "5", "8"}

    def answer(prompt, number):
        return f"{prompt if prompt in filtered or number else -1}"

    overrides = {
        "plan__epochs": None, "plan__max_steps": 3, "plan__checkpoint_every": 1,
        "rollout__dynamic_sampling": 4,
    }  # fmt: skip
    unbroken = ScriptedBackend(answer=answer)
    _, run, _ = run_all(configure(10, **overrides), unbroken)
    walked = trained_prompts(unbroken)
    assert len(set(walked[:10])) == len(walked[:10])
    # Every step has its two groups with variance, so of the walked ones the filtered are extra.
    assert len(walked) == 6 + sum(str(prompt) in filtered for prompt in walked)
    assert [row["train/samples"] for row in rows_of(run)] == [8, 8, 8]
    assert rows_of(run)[-1]["train/prompts_consumed"] == len(walked)

    backend = ScriptedBackend(answer=answer)
    task = grpo.prepare(configure(10, **overrides))
    stopped = start_run("grpo", task)
    steps = grpo.train(task, backend, stopped)
    for report in steps:
        if report.step == 2:
            steps.close()
    resumed = ScriptedBackend(answer=answer)
    run_all(compose("grpo", {"resume": str(stopped.path)}), resumed)
    assert trained_prompts(backend) + trained_prompts(resumed) == walked


def test_dynamic_sampling_stops_at_its_limit(configure):
    backend = ScriptedBackend(
        answer=lambda prompt, number: f"{prompt if prompt != '1' or number else 0}"
    )
    config = configure(10, plan__epochs=1, rollout__dynamic_sampling=3)
    _, run, _ = run_all(config, backend)
    sampled = [row["train/prompts"] for row in rows_of(run)]
    assert max(sampled) == 5
    assert sum(row["train/num_updates"] for row in rows_of(run)) >= 1


@pytest.mark.parametrize(("policy", "rows"), [("keep", 4), ("mask", 3), ("penalise", 4)])
def test_truncated_completions_by_policy(configure, policy, rows):
    """Case 69: a masked completion is in no denominator; penalised, its reward is 1 lower."""
    backend = ScriptedBackend(truncated=lambda prompt, number: number == 0)
    config = configure(1, plan__batch_size=1, rollout__truncated=policy, rollout__penalty_buffer=1)
    _, run, _ = run_all(config, backend)
    [(data, _)] = backend.updates
    assert len(data) == rows
    assert sum(float(np.sum(d.columns["token_weights"])) for d in data) == pytest.approx(1)
    [row] = rows_of(run)
    assert row["train/truncated_share"] == 0.25
    # Rewards 1, 0, 1, 0; the first is the one that is cut.
    assert row["train/reward"] == pytest.approx(0.25 if policy == "penalise" else 0.5)


def test_all_truncated_and_masked_is_no_update(configure):
    """Case 69: nothing left to learn from is a step without an update, not 0 / 0."""
    backend = ScriptedBackend(truncated=lambda prompt, number: prompt == 1)
    config = configure(2, plan__batch_size=1, rollout__truncated="mask")
    _, run, _ = run_all(config, backend)
    assert sorted(row["train/num_updates"] for row in rows_of(run)) == [0, 1]


def test_substeps_and_iterations_are_updates_on_whole_groups(configure):
    """4 prompts in 2 minibatches, twice: 4 updates, each normalised by itself."""
    backend = ScriptedBackend()
    config = configure(4, plan__batch_size=4, rollout__num_substeps=2, rollout__num_iterations=2)
    _, run, _ = run_all(config, backend)
    assert backend.calls.count("optim_step") == 4
    assert [len(data) for data, _ in backend.updates] == [8, 8, 8, 8]
    for data, _ in backend.updates:
        total = sum(float(np.sum(datum.columns["token_weights"])) for datum in data)
        assert total == pytest.approx(1, abs=1e-6)
    first, second, *again = [data for data, _ in backend.updates]
    assert [d.tokens.tolist() for d in again[0]] == [d.tokens.tolist() for d in first]
    assert first[0].tokens.tolist() != second[0].tokens.tolist()
    assert rows_of(run)[0]["train/num_updates"] == 4


def test_the_backend_gets_the_loss_and_the_options_of_the_config(configure):
    """Case 76: exactly that loss with exactly those options; an unknown option is refused."""
    backend = ScriptedBackend()
    run_all(configure(2, loss="cispo"), backend)
    [(_, loss_fn)] = backend.updates
    assert (loss_fn.func.__name__, loss_fn.keywords) == (
        "cispo",
        {"clip_low": 0.0, "clip_high": 4.0},
    )
    with pytest.raises(ConfigError, match=r"loss\.clip_ratio.*clip_low"):
        grpo.prepare(configure(2, loss="ppo", loss__clip_ratio=0.2))


def test_a_kl_term_is_in_the_loss_with_the_reference_of_the_start(configure):
    """Case 75: the reference is a second session that is never stepped; its log-probs are sent."""
    backend = ScriptedBackend(nll=2.0)
    run_all(configure(2, kl__beta=0.1), backend)
    [(data, loss_fn)] = backend.updates
    assert loss_fn.__name__ == "grpo"
    weights = np.asarray(data[0].columns["token_weights"])
    assert (
        data[0].columns["reference_logprobs"][weights != 0].tolist()
        == [-2.0] * (weights != 0).sum()
    )
    assert not data[0].columns["reference_logprobs"][weights == 0].any()
    policy, reference = backend.sessions[:2]
    assert policy.version > 0 and reference.version == 0
    assert "reference" in reference.name and reference.batches == []


def test_kl_in_the_reward_shapes_advantages_and_keeps_their_mean(configure):
    """q - f is -1 + 2 = 1 on every token: equal everywhere, so centred it changes nothing."""
    plain, shaped = ScriptedBackend(), ScriptedBackend(nll=2.0)
    run_all(configure(2), plain)
    _, run, _ = run_all(configure(2, kl__beta=0.1, kl__placement="reward"), shaped)
    for ours, theirs in zip(shaped.updates[0][0], plain.updates[0][0], strict=True):
        np.testing.assert_allclose(
            ours.columns["advantages"], theirs.columns["advantages"], atol=1e-6
        )
    assert rows_of(run)[0]["train/kl"] == pytest.approx(1.0)


def test_temperature_goes_with_the_data(configure):
    backend = ScriptedBackend()
    run_all(configure(2, rollout__temperature=0.5), backend)
    assert {datum.columns["temperature"] for datum in backend.updates[0][0]} == {0.5}


def test_a_health_rule_can_end_the_run_under_its_own_name(configure):
    backend = ScriptedBackend(truncated=lambda prompt, number: True)
    config = configure(10, health__window=2, health__stop=["all_truncated"])
    _, run, reports = run_all(config, backend)
    assert len(reports) == 2
    outcome = run.record.outcome
    assert (outcome.stop_reason, outcome.rule) == (StopReason.HEALTH, "all_truncated")
    assert run.record.state is RunState.SUCCEEDED and run.record.model_available
    assert any("rollout.max_new_tokens" in note for note in reports[-1].notes)
    [event] = [event for event in run.events() if event["type"] == "health"]
    assert (event["step"], event["rule"]) == (2, "all_truncated")


def test_held_out_reward_is_the_monitor_and_picks_the_checkpoint(configure):
    """The share of right answers rises until step 2 and falls after it."""
    calls = []

    def answer(prompt, number):
        return f"{prompt if right(prompt, number) else -1}"

    held_out = {}

    def right(prompt, number):
        version = backend.sessions[0].version if backend.sessions else 0
        if prompt in held_out:
            return {1: False, 2: False, 3: True}.get(version, False)
        calls.append(prompt)
        return number % 2 == 0

    backend = ScriptedBackend(answer=answer)
    config = configure(
        10, eval__fraction=0.2, eval__min_rows=1, plan__checkpoint_every=1, plan__epochs=1
    )
    task = grpo.prepare(config)
    held_out.update({row.columns["answer"]: True for row in task.rows.eval})
    run = start_run("grpo", task)
    reports = list(grpo.train(task, backend, run))
    assert [report.evaluation["eval/reward"] for report in reports] == [0, 1, 0, 0]
    assert run.record.evaluation.promoted_step == 2
    assert [report.is_best for report in reports][1]
    assert run.metrics()[0]["start/reward"] == 0


@pytest.mark.parametrize(
    ("name", "weight", "direction"),
    [
        ("checklist", 1, "up"),
        ("no_errors", 1, "up"),
        ("lossless", 0.5, "up"),
        ("watched", 0, "up"),
        ("rejected", 1, "up"),
        ("verbosity", -0.5, "down"),
    ],
)
def test_a_reward_improves_as_its_weight_says_whatever_its_name(configure, name, weight, direction):
    node = {"_target_": "tunebook.rewards.exact_number", "weight": weight}
    overrides = {f"reward__functions__{name}": node, "eval__monitor": f"eval/reward/{name}"}
    task = grpo.prepare(configure(eval__fraction=0.2, eval__min_rows=1, **overrides))
    assert task.monitor.direction == direction


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rollout__group_size": 1}, "needs at least 2"),
        ({"rollout__temperature": 0.0}, "must be above 0"),
        ({"rollout__top_p": 0.9}, "ratio of the two"),
        ({"rollout__top_k": 50}, "ratio of the two"),
        ({"rollout__num_substeps": 3}, "plan.batch_size=2"),
        ({"rollout__max_new_tokens": 1024}, "leaves no room"),
        ({"rollout__policy_lag": 2}, "at most 1"),
        ({"rollout__truncated": "penalise", "rollout__penalty_buffer": 17}, "penalty_buffer"),
        ({"rollout__dynamic_sampling": 2, "plan__drop_last": True}, "drop_last"),
        ({"lora__dropout": 0.1}, "ratio would be random"),
        (
            {
                "rollout__truncated": "penalise",
                "rollout__penalty_buffer": 4,
                "advantage__estimator": "maxrl",
            },
            "must not be negative",
        ),
        ({"health__stop": ["boredom"]}, "there is no such rule"),
        ({"kl__beta": 0.1, "lora": None}, "trains the base itself"),
        ({"loss": "cross_entropy"}, "does not read .advantages."),
        ({"eval__monitor": "eval/rewrad"}, "eval/reward"),
        ({"normalization__kind": "fixed_horizon"}, "horizon"),
    ],
)
def test_refused_before_anything_is_opened(configure, overrides, message):
    """Cases 52 and 67 among them: nothing is loaded, the key and the way out are named."""
    with pytest.raises(ConfigError, match=message):
        grpo.prepare(configure(10, **overrides))


class SilentBackend(FakeBackend):
    """Trains and does not sample."""

    def __init__(self, **settings):
        super().__init__()


def test_a_backend_that_cannot_sample_is_refused(configure):
    config = configure(10, backend={"_target_": "tests.recipes.test_grpo_flow.SilentBackend"})
    with pytest.raises(ConfigError, match="does not sample"):
        grpo.prepare(config)


def test_k1_in_the_loss_is_said_to_hold_nothing(configure):
    task = grpo.prepare(configure(10, kl__beta=0.1, kl__estimator="k1"))
    assert any("k1 in the loss" in warning for warning in task.summary["warnings"])
    task = grpo.prepare(configure(10, kl__beta=0.1, kl__estimator="k1", kl__placement="reward"))
    assert not any("k1 in the loss" in warning for warning in task.summary["warnings"])


def test_a_run_in_which_nothing_was_scored_says_so_and_has_no_model(configure):
    """No update, so no model; the cause is the reward, whatever rule ended the run."""
    reward = {"mine": {"_target_": "tests.recipes.test_grpo_flow.raises"}}
    config = configure(
        10,
        **{
            "reward": "base",
            "reward.functions": reward,
            "health.window": 2,
            "health.stop": ["all"],
        },
    )
    task = grpo.prepare(config)
    run = start_run("grpo", task)
    with pytest.raises(
        NoStepsError, match=r"no completion could be scored.*events\.jsonl"
    ) as raised:
        list(grpo.train(task, ScriptedBackend(), run))
    assert "many_unscored" in str(raised.value)
    assert not RunDir.open(run.path).record.model_available


def raises(completion):
    """A reward that can judge nothing."""
    raise ValueError("nope")


def test_the_first_step_without_an_update_is_said(configure):
    backend = ScriptedBackend(
        answer=lambda prompt, number: prompt if prompt != "1" or number else "0"
    )
    _, run, reports = run_all(configure(4, plan__batch_size=1), backend)
    said = [report.step for report in reports if any("made no update" in n for n in report.notes)]
    idle = [row["step"] for row in rows_of(run) if not row["train/num_updates"]]
    assert said == idle[:1] and len(idle) == 3


def test_kept_completions_are_of_groups_that_were_trained_on(configure):
    backend = ScriptedBackend(
        answer=lambda prompt, number: prompt if prompt != "2" or number else "0"
    )
    config = configure(2, samples__num_prompts=1)
    _, run, _ = run_all(config, backend)
    assert {each["prompt"] for each in run.last_rollouts()} == {"Say 2"}
    assert any(each["advantage"] for each in run.last_rollouts())
