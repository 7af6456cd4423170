"""What the DPO recipe does around the numbers: pairs, reference, saves, stops, resume.

A fake backend stands in for the computing, so every step can fail and every call is seen.
"""

import json
import math
import shutil
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from recipes import dpo, sft
from tests.fakes import Done, FakeBackend, FakeSession
from tunebook.compose import compose
from tunebook.errors import ConfigError, DataError, NonFiniteError, RunError
from tunebook.launch import start_run
from tunebook.plan_report import plan_text
from tunebook.runs import RunDir, RunState, StopReason

LN2 = math.log(2)


class PairSession(FakeSession):
    """Log-probs fall by 0.1 nats a step on rejected tokens; a loss is really computed."""

    def forward(self, data):
        self.backend.calls.append("forward")
        self.backend.scored += len(data)
        found = []
        for row, datum in enumerate(data):
            values = torch.full((datum.num_scored,), -1.0 - 0.1 * len(self.batches) * (row % 2))
            values[torch.from_numpy(datum.columns["token_weights"]) == 0] = math.nan
            found.append(values * self.backend.scale)
        return Done(found)

    def forward_backward(self, data, loss_fn, *, rows_per_unit=1):
        super().forward_backward(data, loss_fn, rows_per_unit=rows_per_unit)
        self.backend.units.append(rows_per_unit)
        self.backend.steps.append(data)
        return Done(dict(self.backend.step_metrics))


class PairBackend(FakeBackend):
    """A `FakeBackend` for pairs."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.units = []
        self.steps = []
        self.scored = 0
        self.scale = 1.0
        self.step_metrics = {
            "loss": 0.5,
            "margin": 0.1,
            "chosen_logprob": -2,
            "rejected_logprob": -3,
        }

    def open_session(self, name, lora, *, directory, restore=None, with_optimizer=True):
        session = super().open_session(
            name, lora, directory=directory, restore=restore, with_optimizer=with_optimizer
        )
        return PairSession(self, session.directory, session.batches)


def pair_row(number, chosen=None, rejected=None, **more):
    return {
        "prompt": f"What is {number} + 1?",
        "chosen": chosen or f"{number + 1}",
        "rejected": rejected or f"It is {number}",
        **more,
    }


def write_pairs(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def configure(tmp_path):
    """A function that composes a config over `count` small pairs."""

    def make(count=10, /, recipe="dpo", **overrides):
        path = tmp_path / "pairs.jsonl"
        if not path.exists():
            write_pairs(path, [pair_row(number) for number in range(count)])
        values = {
            "data.path": str(path),
            "runs_dir": str(tmp_path / "runs"),
            "eval.fraction": 0.2,
            "eval.min_rows": 1,
            "plan.batch_size": 2,
            "samples.num_prompts": 0,
        }
        values.update({key.replace("__", "."): value for key, value in overrides.items()})
        return compose(recipe, values)

    return make


def run_all(config, backend):
    task = dpo.prepare(config)
    run = start_run("dpo", task)
    reports = list(dpo.train(task, backend, run))
    return task, RunDir.open(run.path), reports


def resume(run, backend, **overrides):
    values = {"resume": str(run.path)}
    values.update({key.replace("__", "."): value for key, value in overrides.items()})
    return run_all(compose("dpo", values), backend)


def stopped_after(step, config, backend):
    task = dpo.prepare(config)
    run = start_run("dpo", task)
    steps = dpo.train(task, backend, run)
    for report in steps:
        if report.step == step:
            steps.close()
    return RunDir.open(run.path)


# Pairs.


def test_5_pairs_batch_2_three_epochs_are_9_steps(configure):
    """Case 29: rows are pairs everywhere; the last batch of an epoch holds one pair."""
    backend = PairBackend()
    task, run, reports = run_all(configure(5, eval__fraction=0, plan__epochs=3), backend)
    assert (task.plan.steps_per_epoch, task.plan.planned_steps) == (3, 9)
    assert [report.step for report in reports] == list(range(1, 10))
    assert reports[-1].planned_steps == 9 and run.record.outcome.steps == 9
    assert [len(data) for data in backend.steps] == [4, 4, 2] * 3
    assert [row["train/pairs"] for row in run.metrics()] == [2, 2, 1] * 3
    assert task.summary["unit"] == "pairs"


def test_dropping_the_last_batch_is_said_in_pairs(configure):
    """Case 29."""
    task = dpo.prepare(configure(5, eval__fraction=0, plan__drop_last=True))
    assert task.plan.planned_steps == 2
    text = plan_text(task.summary, width=200)
    assert "1 pairs unused per epoch" in text and "2 pairs each" in text


def test_each_step_holds_whole_pairs_and_weights_that_sum_to_one(configure):
    """Chosen and rejected side by side, never split; divisors make the step a mean over pairs."""
    backend = PairBackend()
    task, _, _ = run_all(configure(5, eval__fraction=0), backend)
    assert set(backend.units) == {2}
    decode = task.tokenizer.decode
    for data in backend.steps:
        for chosen, rejected in zip(data[0::2], data[1::2], strict=True):
            weights = (chosen.columns["pair_weights"], rejected.columns["pair_weights"])
            assert weights == (2 / len(data), 2 / len(data))
            texts = [
                decode(each.tokens[1:][each.columns["token_weights"] == 1])
                for each in (chosen, rejected)
            ]
            number = int(texts[0].split("<")[0])
            assert texts == [f"{number}<|im_end|>", f"It is {number - 1}<|im_end|>"]


def test_answers_are_never_divided_by_their_length(configure):
    """Case 5: token weights are the mask itself, and the plan says so."""
    task = dpo.prepare(configure(5, eval__fraction=0))
    data = dpo.step_data(task, [0, 1], {})
    assert {float(w) for each in data for w in each.columns["token_weights"]} == {0.0, 1.0}
    assert task.summary["normalization"].startswith("none:")


def test_an_invalid_pair_is_left_out_whole(configure, tmp_path):
    """Case 58: of 3 pairs the middle one is invalid; 2 are trained, each with its own rejected."""
    rows = [pair_row(1), {"prompt": "x", "chosen": "y"}, pair_row(3)]
    write_pairs(tmp_path / "pairs.jsonl", rows)
    with pytest.raises(DataError, match=r"pairs\.jsonl:2: rejected"):
        dpo.prepare(configure(eval__fraction=0))
    backend = PairBackend()
    task, _, reports = run_all(
        configure(eval__fraction=0, data__on_bad_row="skip", plan__batch_size=1), backend
    )
    assert (task.summary["rows_read"], task.summary["rows_skipped"]) == (3, 1)
    assert len(reports) == reports[-1].planned_steps == 2
    texts = [[task.tokenizer.decode(each.tokens) for each in data] for data in backend.steps]
    for chosen, rejected in texts:
        number = int(chosen.split("What is ")[1].split()[0])
        assert f"\n{number + 1}<|im_end|>" in chosen and f"It is {number}<|im_end|>" in rejected
        assert f"What is {number} + 1?" in rejected


def test_the_case_files_of_pairs(configure):
    """Cases 53, 54 and 58 through the whole recipe."""
    folder = "tests/inputs/cases"
    settings = {"eval__fraction": 0, "data__on_bad_row": "skip"}
    task = dpo.prepare(configure(data__path=f"{folder}/pref_bad_rows.jsonl", **settings))
    assert task.summary["train"]["kept"] == 1
    task = dpo.prepare(configure(data__path=f"{folder}/pref_identical.jsonl", **settings))
    assert (task.summary["train"]["kept"], task.summary["rows_skipped"]) == (1, 2)
    task = dpo.prepare(configure(data__path=f"{folder}/pref_implicit_prompt.jsonl", **settings))
    implicit, explicit = (dpo.step_data(task, [row], {}) for row in (0, 1))
    for one, other in zip(implicit, explicit, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert (one.columns["token_weights"] == other.columns["token_weights"]).all()


def test_an_all_identical_file_fails_before_anything_is_opened(configure, tmp_path):
    """Case 54."""
    rows = [pair_row(n, chosen="same", rejected="same") for n in range(4)]
    write_pairs(tmp_path / "pairs.jsonl", rows)
    for policy in ("fail", "skip"):
        with pytest.raises(DataError, match="identical to chosen"):
            dpo.prepare(configure(data__on_bad_row=policy))
    assert not (tmp_path / "runs").exists()


def test_pairs_that_the_limit_leaves_nothing_of_are_counted_and_located(configure, tmp_path):
    """Case 55: no side is lost silently, and neighbours are untouched."""
    rows = [pair_row(1), pair_row(2, prompt="word " * 80), pair_row(3)]
    path = write_pairs(tmp_path / "pairs.jsonl", rows)
    task = dpo.prepare(configure(eval__fraction=0, max_seq_len=64))
    assert task.summary["train"]["dropped"] == {"no_target_after_truncation": 1}
    assert (
        f"1 left out, max_seq_len ends before an answer begins: {path}:2"
        in task.summary["warnings"]
    )
    assert task.plan.train_rows == 2
    cut = dpo.prepare(
        configure(eval__fraction=0, max_seq_len=64, data__on_long_row="truncate_prompt")
    )
    assert cut.plan.train_rows == 3 and cut.summary["train"]["truncated"] == 2
    assert {len(cut.train_data[number].tokens) for number in cut.train_data.data_of_row(1)} <= set(
        range(50, 65)
    )


def test_only_pairs_can_have_their_prompt_cut(configure, tmp_path):
    rows = [{"prompt": f"Say {n}.", "completion": str(n)} for n in range(4)]
    path = write_pairs(tmp_path / "rows.jsonl", rows)
    with pytest.raises(ConfigError, match="truncate_prompt: is for preference pairs only"):
        sft.prepare(configure(recipe="sft", data__path=path, data__on_long_row="truncate_prompt"))


# What cannot run is refused while preparing.


def test_dropout_is_refused(configure):
    """Case 52: scored twice, a pair would differ from itself."""
    with pytest.raises(ConfigError, match=r"^lora\.dropout=0\.5: must be 0 .* noise"):
        configure(lora__dropout=0.5)
    assert configure(lora=None).lora is None


def test_a_mask_that_would_not_be_read_is_refused(configure):
    with pytest.raises(ConfigError, match=r"^data\.mask=all: must be all_assistant"):
        configure(data__mask="all")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"loss__beta": 0}, r"loss\.beta=0: must be above 0"),
        ({"loss__beta": -1.0}, r"loss\.beta=-1\.0: must be above 0"),
        ({"loss": "dpo_conservative", "loss__label_smoothing": 0.5}, r"loss\.label_smoothing=0\.5"),
        ({"loss__label_smoothing": 0.1}, r"loss\.label_smoothing"),
        ({"loss": "cross_entropy"}, r"'cross_entropy' does not read 'pair_weights'"),
        ({"loss": "grpo"}, r"'grpo' needs"),
        ({"loss___target_": "tests.recipes.test_dpo_flow.broken_loss"}, r"broken_loss.*returned"),
    ],
)
def test_losses_are_tried_before_anything_is_opened(configure, tmp_path, overrides, words):
    """Case 59, and losses that are none for pairs."""
    values = {key.replace("__", "."): value for key, value in overrides.items()}
    loss = values.pop("loss", None)
    config = configure()
    lines = [f"{key}={value}" for key, value in values.items()]
    lines += [] if loss is None else [f"loss={loss}"]
    lines += [f"data.path={config.data.path}", f"runs_dir={config.runs_dir}", "eval.min_rows=1"]
    with pytest.raises(ConfigError, match=words):
        dpo.prepare(compose("dpo", lines))
    assert not (tmp_path / "runs").exists()


def broken_loss(logprobs, *, token_weights, pair_weights, beta):
    return (logprobs * token_weights).sum()


def test_an_unknown_monitor_lists_the_metrics_of_the_loss(configure):
    """Case 47, for the metrics that this loss has."""
    with pytest.raises(ConfigError, match=r"eval/acuracy.*eval/loss, eval/accuracy, eval/margin"):
        dpo.prepare(configure(eval__monitor="eval/acuracy"))
    with pytest.raises(ConfigError, match=r"eval/rejected_reward: .*set eval\.direction"):
        dpo.prepare(configure(eval__monitor="eval/rejected_reward"))
    task = dpo.prepare(configure(eval__monitor="eval/accuracy"))
    assert task.monitor is not None and not task.monitor.lower_is_better
    own = configure(
        loss={"_target_": "tests.recipes.test_dpo_flow.own_loss"}, eval__monitor="eval/accuracy"
    )
    with pytest.raises(ConfigError, match=r"Available: eval/loss, eval/worst$"):
        dpo.prepare(own)


def own_loss(logprobs, *, token_weights, pair_weights, beta):
    """A loss of somebody's own without a reference: its metric is the lowest token."""
    scores = (logprobs * token_weights).sum(dim=1)
    loss = beta * (pair_weights[0::2] * (scores[1::2] - scores[0::2])).sum()
    return loss, {"worst": logprobs.min()}


# The reference.


def reference_of(run):
    folder = run.data_dir / "reference"
    return {path.stem: np.load(path) for path in sorted(folder.glob("*.npy"))}, json.loads(
        (folder / "reference.json").read_text()
    )


def test_the_reference_is_scored_once_over_both_sides(configure):
    backend = PairBackend()
    task, run, _ = run_all(configure(plan__checkpoint_every=2), backend)
    num_train, num_eval = len(task.train_data), len(task.eval_data)
    assert (num_train, num_eval) == (16, 4)
    assert backend.scored == num_train + num_eval + 2 * num_eval  # and two evaluations
    values, mark = reference_of(run)
    assert {side: len(each) for side, each in values.items()} == {
        "train": task.train_data.report.num_supervised,
        "eval": task.eval_data.report.num_supervised,
    }
    assert set(values["train"]) == {-1.0} and set(mark) == {"fingerprint"}
    assert not [path for path in run.data_dir.iterdir() if path.name.endswith(".tmp")]
    for data in backend.steps:
        for datum in data:
            column = datum.columns["reference_logprobs"]
            assert (column == np.where(datum.columns["token_weights"] != 0, -1.0, 0.0)).all()


def test_a_resumed_run_compares_with_the_same_numbers(configure):
    """They are not scored again, though the policy has moved on."""
    backend = PairBackend()
    run = stopped_after(2, configure(15, plan__checkpoint_every=1), backend)
    before, _ = reference_of(run)
    backend.scored = 0
    backend.steps.clear()
    task, run, reports = resume(run, backend)
    assert [report.step for report in reports] == [3, 4, 5, 6]
    assert backend.scored == 4 * len(task.eval_data)
    after, _ = reference_of(run)
    assert all((after[side] == before[side]).all() for side in before)
    columns = {float(value) for data in backend.steps for each in data
               for value in each.columns["reference_logprobs"]}  # fmt: skip
    assert columns == {-1.0, 0.0}


def test_a_kill_while_scoring_leaves_nothing_and_scores_again(configure):
    """A folder that is half written does not count, whatever a killed process left of it."""
    backend = PairBackend()
    task = dpo.prepare(configure(60, plan__checkpoint_every=0))
    run = start_run("dpo", task)

    def die(*_):
        raise KeyboardInterrupt

    backend.fail_forward = None
    session_forward = PairSession.forward
    calls = []

    def failing(self, data):
        calls.append(len(data))
        return die() if len(calls) == 2 else session_forward(self, data)

    PairSession.forward = failing
    try:
        with pytest.raises(KeyboardInterrupt):
            list(dpo.train(task, backend, run))
    finally:
        PairSession.forward = session_forward
    assert not (run.data_dir / "reference").exists()
    (run.data_dir / ".reference.0123.tmp").mkdir()  # what SIGKILL would have left
    (run.data_dir / ".reference.0123.tmp" / "train.npy").write_bytes(b"half")
    _, run, reports = resume(RunDir.open(run.path), backend)
    assert reports[0].step == 1
    values, _ = reference_of(run)
    assert len(values["train"]) == task.train_data.report.num_supervised
    assert {path.name for path in run.data_dir.iterdir()} == {
        "train.jsonl", "eval.jsonl", "manifest.json", "tokens", "reference",
    }  # fmt: skip


@pytest.mark.parametrize("damage", ["gone", "short", "foreign"])
def test_a_lost_reference_is_refused_after_the_first_step(configure, damage):
    """The policy has moved: what it gives now is no reference."""
    backend = PairBackend()
    run = stopped_after(2, configure(15, plan__checkpoint_every=1), backend)
    folder = run.data_dir / "reference"
    if damage == "gone":
        shutil.rmtree(folder)
    elif damage == "short":
        (folder / "train.npy").write_bytes((folder / "train.npy").read_bytes()[:-8])
    else:
        (folder / "reference.json").write_text('{"fingerprint": "another"}')
    with pytest.raises(RunError, match=r"reference policy are gone or damaged.*start_from"):
        resume(run, backend)


def test_before_the_first_step_a_damaged_reference_is_scored_again(configure):
    backend = PairBackend(fail_at_step=1)
    task = dpo.prepare(configure())
    run = start_run("dpo", task)
    with pytest.raises(RuntimeError, match="the service went away"):
        list(dpo.train(task, backend, run))
    file = run.data_dir / "reference" / "train.npy"
    whole = file.read_bytes()
    file.write_bytes(whole[:-8])
    backend.fail_at_step = None
    resume(RunDir.open(run.path), backend)
    assert file.read_bytes() == whole


@pytest.mark.parametrize("loss", ["simpo", "orpo"])
def test_losses_without_a_reference_skip_it(configure, loss):
    config = compose(
        "dpo",
        [f"loss={loss}", f"data.path={configure().data.path}", "eval.fraction=0.2",
         f"runs_dir={configure().runs_dir}", "eval.min_rows=1", "plan.batch_size=2",
         "samples.num_prompts=0"],
    )  # fmt: skip
    backend = PairBackend()
    task, run, _ = run_all(config, backend)
    assert backend.scored == len(task.eval_data)  # one evaluation
    assert not (run.data_dir / "reference").exists()
    assert "reference_logprobs" not in backend.steps[0][0].columns
    assert task.summary["reference"] == f"none: {loss} compares with no reference"
    assert "eval/kl" not in run.metrics()[-1]
    assert task.workload.scored_lengths == []


def test_a_reference_that_is_no_number_is_located(configure):
    backend = PairBackend()
    backend.scale = math.inf
    config = configure()
    task = dpo.prepare(config)
    run = start_run("dpo", task)
    with pytest.raises(NonFiniteError, match=r"pairs\.jsonl:\d+: before any training.*-inf"):
        list(dpo.train(task, backend, run))
    assert backend.steps == []
    assert RunDir.open(run.path).record.state is RunState.FAILED


# Evaluation.


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_evaluation_is_the_loss_over_the_whole_split(configure, batch_size):
    """Forward only. After 2 steps each rejected token has lost 0.2 nats: worked out by hand."""
    backend = PairBackend()
    task, run, _ = run_all(
        configure(15, plan__checkpoint_every=2, plan__batch_size=batch_size,
                  plan__epochs=None, plan__max_steps=2),
        backend,
    )  # fmt: skip
    data = task.eval_data
    lengths = [int(data.supervised[number]) for number in range(1, len(data), 2)]
    margins = [0.1 * 0.2 * length for length in lengths]
    expected = sum(math.log1p(math.exp(-margin)) for margin in margins) / len(margins)
    found = run.metrics()[-1]
    assert found["eval/loss"] == pytest.approx(expected, abs=1e-6)
    assert found["eval/margin"] == pytest.approx(sum(margins) / len(margins), abs=1e-6)
    assert found["eval/accuracy"] == 1.0
    assert found["eval/chosen_reward"] == pytest.approx(0.0, abs=1e-6)
    assert found["eval/rejected_reward"] == pytest.approx(-found["eval/margin"], abs=1e-6)
    assert found["eval/kl"] == pytest.approx(-0.5 * 0.2 * sum(lengths) / len(lengths), abs=1e-6)
    chosen = [int(data.supervised[number]) for number in range(0, len(data), 2)]
    assert found["eval/chosen_logprob"] == pytest.approx(-sum(chosen) / len(chosen), abs=1e-6)
    assert found["eval/gap"] == pytest.approx(
        found["eval/chosen_logprob"] - found["eval/rejected_logprob"]
    )
    assert found["eval/rejected_length"] == pytest.approx(sum(lengths) / len(lengths))
    assert found["eval/num_tokens"] == data.report.num_supervised
    trained = [call for call in backend.calls if call in ("forward_backward", "optim_step")]
    assert trained == ["forward_backward", "optim_step"] * 2


def test_the_first_evaluation_of_an_unchanged_policy_is_ln_2(configure):
    backend = PairBackend()
    task = dpo.prepare(configure())
    run = start_run("dpo", task)
    session = backend.open_session("x", None, directory=run.checkpoints_dir)
    reference = dpo.reference_of(task, session, run, 0)
    found = dpo.evaluate(task, session, reference)
    assert found["eval/loss"] == pytest.approx(LN2, abs=1e-7)
    assert (found["eval/accuracy"], found["eval/margin"]) == (0.5, 0.0)


def test_the_gap_and_the_rest_are_logged_at_every_step(configure):
    _, run, reports = run_all(configure(eval__fraction=0), PairBackend())
    row = run.metrics()[0]
    assert (row["train/gap"], row["train/margin"], row["train/grad_norm"]) == (1.0, 0.1, 1.0)
    assert reports[0].evaluation is None and reports[-1].metrics["train/tokens"] > 0


# The run around it.


@pytest.mark.parametrize("fails_at", range(1, 7))
def test_a_crash_repeats_and_skips_nothing(configure, fails_at):
    """Case 32 for pairs."""
    config = configure(15, plan__checkpoint_every=2)
    unbroken = PairBackend()
    run_all(config, unbroken)
    backend = PairBackend(fail_at_step=fails_at)
    task = dpo.prepare(config)
    run = start_run("dpo", task)
    with pytest.raises(RuntimeError, match="the service went away"):
        list(dpo.train(task, backend, run))
    backend.fail_at_step = None
    _, run, _ = resume(RunDir.open(run.path), backend)
    assert backend.lineage == unbroken.lineage
    assert [row["step"] for row in run.metrics()] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("stop_after", [4, 5, 8])
def test_stop_and_resume_sees_the_same_pairs(configure, stop_after):
    """Case 33: inside an epoch and at its edge."""
    config = configure(10, eval__fraction=0, plan__epochs=3, plan__checkpoint_every=0)
    unbroken = PairBackend()
    run_all(config, unbroken)
    backend = PairBackend()
    run = stopped_after(stop_after, config, backend)
    assert run.record.outcome.stop_reason is StopReason.CANCELLED
    _, run, reports = resume(run, backend)
    assert backend.lineage == unbroken.lineage
    assert [report.step for report in reports] == list(range(stop_after + 1, 16))


class ScriptedSession(PairSession):
    """Evaluations that go as a script says: the margin of every pair, by steps made."""

    def forward(self, data):
        value = self.backend.script[len(self.batches)]
        found = []
        for row, datum in enumerate(data):
            mask = torch.from_numpy(datum.columns["token_weights"]) != 0
            values = torch.full((datum.num_scored,), math.nan)
            values[mask] = (value if row % 2 == 0 else 0.0) / float(mask.sum()) - 1.0
            found.append(values)
        return Done(found)


class ScriptedBackend(PairBackend):
    def __init__(self, script: Sequence[float]):
        super().__init__()
        self.script = [0.0, *script]

    def open_session(self, name, lora, **settings):
        session = super().open_session(name, lora, **settings)
        return ScriptedSession(self, session.directory, session.batches)


def test_the_best_checkpoint_is_promoted_and_patience_stops(configure):
    """Loss falls as the margin grows: step 2 is the best; two evaluations later the run stops."""
    backend = ScriptedBackend([1.0, 3.0, 2.0, 1.0, 0.0, 0.0])
    config = configure(15, plan__checkpoint_every=1, early_stopping__patience=2)
    _, run, reports = run_all(config, backend)
    assert [report.is_best for report in reports] == [True, True, False, False]
    assert run.record.outcome.stop_reason is StopReason.EARLY_STOPPING
    assert run.record.evaluation.metric == "eval/loss"
    assert (run.record.evaluation.best_step, run.record.evaluation.promoted_step) == (2, 2)
    assert (run.model_dir / "exported").read_text() == "step_000002"
    with pytest.raises(ConfigError, match="would stop at once"):
        resume(run, backend)


def test_another_monitor_decides(configure):
    backend = ScriptedBackend([1.0, -1.0, -1.0, 0.5, -1.0, -1.0])
    config = configure(15, plan__checkpoint_every=1, eval__monitor="eval/margin")
    _, run, _ = run_all(config, backend)
    assert (run.record.evaluation.direction, run.record.evaluation.best_step) == ("up", 1)
    assert run.record.evaluation.best == pytest.approx(0.1, abs=1e-6)


def test_a_margin_of_exactly_zero_is_said_once(configure, caplog):
    """Case 54: at the first step it is right, later it means that nothing is learned."""
    backend = PairBackend()
    backend.step_metrics["margin"] = 0.0
    _, run, _ = run_all(configure(eval__fraction=0), backend)
    events = [event for event in run.events() if event["type"] == "no_margin"]
    assert [event["step"] for event in events] == [2]
    assert "the margin of every pair is exactly 0" in caplog.text
    backend = PairBackend()
    _, run, _ = run_all(configure(eval__fraction=0), backend)
    assert not [event for event in run.events() if event["type"] == "no_margin"]


def test_a_downgrade_is_recorded(configure):
    overrides = {"eval__fraction": 0.05, "eval__min_rows": 8, "early_stopping__patience": 2}
    _, run, _ = run_all(configure(**overrides), PairBackend())
    assert run.record.outcome.downgrades == ["early_stopping:disabled:no_eval_set"]
    assert run.record.evaluation is None and run.record.model_available


def test_the_workload_counts_data_and_the_reference_pass(configure):
    task = dpo.prepare(configure(15, plan__checkpoint_every=2))
    workload = task.workload
    assert workload.batch_size == 4 and len(workload.lengths) == 24
    assert len(workload.sample) == 4 and workload.num_evaluations == 3
    assert workload.scored_lengths == [*workload.lengths, *workload.eval_lengths]


def test_the_plan_reads_as_pairs(configure):
    text = plan_text(dpo.prepare(configure()).summary, width=200)
    for part in (
        "8 pairs, 8 kept, 0 answers truncated",
        "2 pairs, 2 kept, 0 answers truncated",
        "4 planned, 4 an epoch, 2 pairs each",
        "at most 1,024 a prompt and answer",
        "the policy at the start of the run (the base model), scored once before step 1",
        "none: log-probs of an answer are not divided, the loss is a mean over pairs",
        "eval/loss, the lowest is the best",
        "loss_fns.dpo.dpo_sigmoid",
    ):
        assert part in text, part


def test_samples_answer_the_prompts_of_pairs(configure):
    task = dpo.prepare(configure(samples__num_prompts=2))
    assert [prompt.text for prompt in task.prompts] == [
        row.messages[0]["content"] for row in task.rows.eval
    ]
    assert [prompt.expected for prompt in task.prompts] == [
        row.chosen[0]["content"] for row in task.rows.eval
    ]
