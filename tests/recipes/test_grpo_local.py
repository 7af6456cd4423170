"""The GRPO recipe on the built-in model and the local backend: the numbers themselves."""

import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipes import grpo
from tests.running import train_all
from tunebook.compose import compose
from tunebook.errors import ConfigError, NonFiniteError, RewardError
from tunebook.launch import start_run
from tunebook.opening import build_backend
from tunebook.runs import RunDir, RunState

pytestmark = pytest.mark.xdist_group("grpo")

SETTINGS = {
    "data.limit": 40,
    "eval.fraction": 0.2,
    "eval.min_rows": 1,
    "plan.batch_size": 4,
    "plan.epochs": None,
    "plan.max_steps": 6,
    "plan.checkpoint_every": 2,
    "rollout.group_size": 4,
    "rollout.max_new_tokens": 12,
    "optimizer.learning_rate": 1e-3,
    "samples.num_prompts": 1,
}


def configured(tmp_path, /, **overrides):
    values = {**SETTINGS, "runs_dir": str(tmp_path / "runs")}
    values.update({key.replace("__", "."): value for key, value in overrides.items()})
    return compose("grpo", values)


def run_all(config, *, stop_after=None):
    _, run = train_all(config, stop_after=stop_after)
    return run


def adapter_at(run, step):
    [path] = [each.ref.path for each in run.checkpoints() if each.step == step]
    return load_file(path / "adapter.safetensors")


def rows_of(run):
    return [row for row in run.metrics() if row["step"] > 0]


def numbers(row):
    """The metrics of a step but for times."""
    return {key: value for key, value in row.items() if not key.startswith("time/")}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return run_all(configured(tmp_path_factory.mktemp("unbroken")))


def test_held_out_reward_rises_by_a_quarter(tmp_path):
    """40 steps of 16 prompts and 8 completions; about 20 s on two idle cores."""
    run = run_all(
        compose(
            "grpo",
            {
                "runs_dir": str(tmp_path),
                "experiment": "grpo_quickstart",
                "plan.max_steps": 40,
            },
        )
    )
    before = run.metrics()[0]["start/reward"]
    after = run.record.evaluation.best
    assert after - before >= 0.25
    assert run.record.model_available


def test_sampler_and_trainer_agree_before_the_first_update(unbroken):
    """Cases 52 and 68: the ratio is 1 and the gap is rounding, at every on-policy step."""
    for row in rows_of(unbroken):
        if row["train/num_updates"]:
            assert row["train/logprob_gap"] < 1e-4
            assert row["train/ratio"] == pytest.approx(1, abs=1e-5)
            assert row["train/effective_sample_size"] == pytest.approx(1, abs=1e-5)
            assert row["train/clipped_low"] == row["train/clipped_high"] == 0


@pytest.mark.parametrize("fast", [True, False])
def test_they_agree_at_another_temperature(tmp_path, fast):
    """Case 68: at T 0.5 the trained log-probs are those of T 0.5, on both paths."""
    config = configured(tmp_path, rollout__temperature=0.5, plan__max_steps=2, backend__fast=fast)
    rows = [row for row in rows_of(run_all(config)) if row["train/num_updates"]]
    assert rows
    assert all(row["train/logprob_gap"] < 1e-3 for row in rows)


@pytest.mark.parametrize("stop_after", [2, 3])
def test_stop_and_resume_is_bit_identical(unbroken, tmp_path, stop_after):
    """Cases 33 and 85: the same completions, rewards and weights as without the stop."""
    stopped = run_all(configured(tmp_path), stop_after=stop_after)
    assert stopped.record.state is RunState.CANCELLED
    _, resumed = train_all(compose("grpo", {"resume": str(stopped.path)}))
    for ours, theirs in zip(resumed.metrics(), unbroken.metrics(), strict=True):
        assert numbers(ours) == numbers(theirs)
    expected = adapter_at(unbroken, 6)
    for name, value in adapter_at(resumed, 6).items():
        assert torch.equal(value, expected[name]), name


def test_micro_batches_change_nothing(unbroken, tmp_path):
    run = run_all(configured(tmp_path, backend__micro_batch_tokens=64))
    expected = adapter_at(unbroken, 6)
    for name, value in adapter_at(run, 6).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5)


def test_completions_of_a_group_differ_and_seeds_repeat(unbroken, tmp_path):
    """Case 72: a fixed seed gives different completions of one prompt, and the same every time."""
    again = run_all(configured(tmp_path))
    assert [numbers(row) for row in again.metrics()] == [numbers(row) for row in unbroken.metrics()]
    rollouts = again.last_rollouts()
    assert len({each["completion"] for each in rollouts}) > 1
    other = run_all(configured(tmp_path, seed=1))
    assert rows_of(other)[0]["train/reward"] != rows_of(again)[0]["train/reward"] or (
        rows_of(other)[0]["train/entropy"] != rows_of(again)[0]["train/entropy"]
    )


def test_a_lagging_policy_learns_from_the_weights_before(tmp_path):
    run = run_all(configured(tmp_path, rollout__policy_lag=1))
    rows = rows_of(run)
    assert [row["train/staleness"] for row in rows] == [0, 1, 1, 1, 1, 1]
    drifted = [row["train/ratio_gap"] if "train/ratio_gap" in row else row["train/logratio_abs"]
               for row in rows[1:] if row["train/num_updates"]]  # fmt: skip
    assert all(value > 1e-5 for value in drifted)


def test_later_updates_of_a_step_have_a_ratio(tmp_path):
    """With two passes over the same completions the second one is off-policy, the first is not."""
    run = run_all(configured(tmp_path, rollout__num_iterations=2, plan__max_steps=1))
    [row] = rows_of(run)
    assert row["train/num_updates"] == 2
    assert row["train/logprob_gap"] < 1e-4 < row["train/logratio_abs"]


def test_a_kl_term_changes_the_gradient_once_the_policy_has_drifted(unbroken, tmp_path):
    """Case 75: equal at the first step, where policy and reference are the same, then not."""
    held = run_all(configured(tmp_path, kl__beta=1.0, plan__max_steps=6))
    ours, theirs = rows_of(held), rows_of(unbroken)
    assert ours[0]["train/grad_norm"] == pytest.approx(theirs[0]["train/grad_norm"], rel=1e-4)
    assert ours[0]["train/kl"] == pytest.approx(0, abs=1e-6)
    later = [row for row in ours[1:] if row["train/num_updates"]]
    assert all(row["train/kl"] > 0 for row in later)
    expected = adapter_at(unbroken, 6)
    assert any(
        not torch.allclose(value, expected[name], atol=1e-4)
        for name, value in adapter_at(held, 6).items()
    )


def test_the_reference_is_the_policy_at_the_start_not_the_base(unbroken, tmp_path):
    """A run that begins from another's model has a KL of 0 at its first step."""
    chained = run_all(
        configured(tmp_path, start_from=str(unbroken.path), kl__beta=0.1, plan__max_steps=2)
    )
    first = rows_of(chained)[0]
    assert first["train/kl"] == pytest.approx(0, abs=1e-6)
    assert first["train/logprob_gap"] < 1e-4


def test_one_reward_that_raises_is_unscored_or_ends_the_run(tmp_path):
    """Case 64: by policy, counted and shown, never a reward of 0."""
    reward = {"mine": {"_target_": "tests.recipes.test_grpo_local.raises_on_one"}}
    config = configured(
        tmp_path, **{"reward.functions": reward, "reward.on_error": "skip", "plan.max_steps": 1}
    )
    run = run_all(config)
    [row] = rows_of(run)
    assert row["train/unscored_share"] > 0
    assert row["train/unscored/exception"] >= 1
    [event] = [event for event in run.events() if event["type"] == "reward_problems"][-1:]
    assert "the reward went wrong" in event["first"][0]

    config = configured(tmp_path, **{"reward.functions": reward, "reward.on_error": "fail"})
    task = grpo.prepare(config)
    run = start_run("grpo", task)
    with build_backend(config) as backend, pytest.raises(RewardError, match="went wrong"):
        list(grpo.train(task, backend, run))
    assert RunDir.open(run.path).record.state is RunState.FAILED


def raises_on_one(completion, *, prompt, answer):
    """A reward that cannot judge what ends in an odd digit."""
    if completion[-2:-1] in ("1", "3"):
        raise ValueError("the reward went wrong")
    return float(answer in completion)


def test_a_row_without_the_column_of_a_reward_is_refused(tmp_path):
    reward = {"mine": {"_target_": "tests.recipes.test_grpo_local.needs_a_key"}}
    with pytest.raises(ConfigError, match="key"):
        grpo.prepare(configured(tmp_path, **{"reward.functions": reward}))


def needs_a_key(completion, *, key):
    """A reward that reads a column which no row has."""
    return float(key in completion)


def test_the_export_of_a_run_samples_like_the_run(unbroken):
    """Case 87: the model folder loads in peft, tokenizer and template with it."""
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    model = AutoPeftModelForCausalLM.from_pretrained(unbroken.model_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(unbroken.model_dir)
    step = max(unbroken.samples())
    [sample] = unbroken.samples()[step][:1]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": sample["prompt"]}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    logits = model(**ids).logits
    assert math.isfinite(float(logits.sum().detach()))


def test_an_environment_with_turns_trains(tmp_path):
    """The calculator answers calls; what it says carries no weight, and tokens stay as sampled."""
    config = configured(
        tmp_path,
        environment="calculator",
        plan__max_steps=1,
        rollout__max_new_tokens=8,
        **{"environment.described_in": "system_message"},
    )
    run = run_all(config)
    [row] = rows_of(run)
    assert row["train/num_turns"] >= 1
    for each in run.last_rollouts():
        said = [message["content"] for message in each.get("messages", [])]
        assert not said or (each["prompt"] in said[0] or each["prompt"] in said[1])
    if row["train/num_updates"]:
        assert row["train/logprob_gap"] < 1e-4


def test_a_chained_run_goes_on_with_the_reference_of_its_start(unbroken, tmp_path):
    """A run begun from another resumes bit for bit, its KL against the same start."""
    chained = {"start_from": str(unbroken.path), "kl__beta": 0.2, "plan__max_steps": 3}
    whole = run_all(configured(tmp_path / "whole", **chained))
    stopped = run_all(configured(tmp_path / "stopped", **chained), stop_after=2)
    _, resumed = train_all(compose("grpo", {"resume": str(stopped.path)}))
    for ours, theirs in zip(resumed.metrics(), whole.metrics(), strict=True):
        assert numbers(ours) == numbers(theirs)


def test_a_start_that_changed_is_refused_where_it_is_read_again(unbroken, tmp_path):
    """Else the KL of the resumed steps would be against other weights, without a word."""
    start = tmp_path / "start"
    shutil.copytree(unbroken.model_dir, start)
    chained = {"start_from": str(start), "plan__max_steps": 3}
    held = run_all(configured(tmp_path, **chained, kl__beta=0.2), stop_after=2)
    free = run_all(configured(tmp_path, **chained), stop_after=2)
    file = start / "adapter_model.safetensors"
    weights = {name: value + 0.01 for name, value in load_file(file).items()}
    save_file(weights, file)
    with pytest.raises(ConfigError, match="gone"):
        grpo.prepare(compose("grpo", {"resume": str(held.path)}))
    _, resumed = train_all(compose("grpo", {"resume": str(free.path)}))
    assert resumed.record.state is RunState.SUCCEEDED


def test_a_monitor_without_a_value_is_no_best_and_no_crash(tmp_path):
    """A judge that is silent during one evaluation must not end the run."""
    silent = {"_target_": "tests.recipes.test_grpo_local.silent", "weight": 0}
    config = configured(
        tmp_path, **{"reward.functions.judge": silent, "eval.monitor": "eval/reward/judge",
                     "plan.max_steps": 2}
    )  # fmt: skip
    with pytest.raises(NonFiniteError, match="never a finite number"):
        run_all(config)


def silent(completion):
    """A judge that never answers."""
    return None


def test_large_rewards_keep_their_differences(tmp_path):
    """1e6 and 1e6 + 0.01 differ; in float32 they would not."""
    reward = {"_target_": "tests.recipes.test_grpo_local.large"}
    run = run_all(configured(tmp_path, **{"reward": "base", "reward.functions.large": reward,
                                          "plan.max_steps": 1}))  # fmt: skip
    [row] = rows_of(run)
    assert row["train/num_updates"] == 1


def large(completion, *, num_tokens):
    """A large reward with small differences."""
    return 1e6 + 0.01 * num_tokens
