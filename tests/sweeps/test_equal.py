"""Trials that train together get the numbers that each gets alone."""

import signal
import threading

import pytest
import torch
from safetensors.torch import load_file

from tests.sweeps.running import Seen, reopened, train_alone, train_together
from tunebook.backends.local.engine.engine import Engine
from tunebook.compose import compose
from tunebook.launch import StopRequest
from tunebook.opening import build_backend
from tunebook.runs import RunState, StopReason
from tunebook.sweeps.trial import TrialState

SETTINGS = {
    "sft": {
        "data.limit": 24, "eval.fraction": 0.2, "eval.min_rows": 1, "plan.batch_size": 8,
        "plan.checkpoint_every": 2, "samples.num_prompts": 1, "samples.max_tokens": 8,
    },
    "dpo": {
        "data.limit": 24, "eval.fraction": 0.2, "eval.min_rows": 1, "plan.batch_size": 8,
        "plan.checkpoint_every": 2, "samples.num_prompts": 0, "optimizer.learning_rate": 1e-3,
    },
    "grpo": {
        "data.limit": 20, "eval.fraction": 0.2, "eval.min_rows": 1, "plan.batch_size": 4,
        "plan.epochs": None, "plan.max_steps": 2, "plan.checkpoint_every": 1,
        "rollout.group_size": 4, "rollout.max_new_tokens": 10, "optimizer.learning_rate": 1e-3,
        "samples.num_prompts": 1,
    },
}  # fmt: skip
CHANGES = (
    {"lora.rank": 4, "lora.alpha": 8},
    {"lora.rank": 8, "lora.seed": 3, "seed": 5, "lora.target_modules": ["q_proj", "v_proj"]},
    {"optimizer.learning_rate": 5e-3, "data.limit": 18, "lora.rslora": True, "plan.batch_size": 3},
)
"""Mixed ranks, alphas, target modules, seeds, rates, data and batch sizes."""


def configured(recipe, tmp_path, changes=None):
    return compose(recipe, {**SETTINGS[recipe], "runs_dir": str(tmp_path), **(changes or {})})


def numbers(run):
    """All metrics but times."""
    return [
        {key: value for key, value in row.items() if not key.startswith("time/")}
        for row in run.metrics()
    ]


def adapter(run):
    return load_file(run.checkpoints()[-1].ref.path / "adapter.safetensors")


def assert_same(together, alone):
    """To the last bit what was trained; what was sampled in a larger batch, to 1e-5."""
    sampled = together.record.recipe == "grpo"
    for ours, theirs in zip(numbers(together), numbers(alone), strict=True):
        assert ours == (pytest.approx(theirs, rel=1e-5, abs=1e-7) if sampled else theirs)
    expected = adapter(alone)
    for name, value in adapter(together).items():
        torch.testing.assert_close(
            value, expected[name], rtol=0, atol=1e-6 if sampled else 0, msg=name
        )
    assert together.samples() == alone.samples()
    assert [each["completion"] for each in together.last_rollouts()] == [
        each["completion"] for each in alone.last_rollouts()
    ]


@pytest.mark.parametrize("recipe", ["sft", "dpo", "grpo"])
def test_numbers_are_those_of_each_alone(recipe, tmp_path, monkeypatch):
    """By the fast path, where their operations do meet."""
    configs = [configured(recipe, tmp_path / "together", changes) for changes in CHANGES]
    jobs_at_once = []
    run_jobs = Engine.run

    def count(engine, jobs, *, max_tokens):
        jobs_at_once.append(len({id(job.adapter) for job in jobs}))
        run_jobs(engine, jobs, max_tokens=max_tokens)

    monkeypatch.setattr(Engine, "run", count)
    trials, _ = train_together(configs)
    assert [trial.state for trial in trials] == [TrialState.SUCCEEDED] * 3
    assert max(jobs_at_once) == 3
    monkeypatch.undo()
    alone = train_alone([configured(recipe, tmp_path / "alone", changes) for changes in CHANGES])
    for trial, run in zip(trials, alone, strict=True):
        assert_same(reopened(trial), run)


def test_the_general_path_a_reference_policy_and_turns(tmp_path):
    """A KL term needs two sessions a trial; `fast=false` shares nothing but the base."""
    changes = {
        "kl.beta": 0.1, "backend.fast": False, "plan.max_steps": 2, "rollout.max_new_tokens": 8,
        "environment": "calculator", "environment.described_in": "system_message",
    }  # fmt: skip
    seeds = [{**changes, "seed": seed} for seed in (0, 1)]
    trials, _ = train_together([configured("grpo", tmp_path / "together", one) for one in seeds])
    alone = train_alone([configured("grpo", tmp_path / "alone", one) for one in seeds])
    for trial, run in zip(trials, alone, strict=True):
        assert_same(reopened(trial), run)


def test_slots_are_reused_and_every_adapter_is_fresh(tmp_path):
    """Case 88: three trials in one slot; each begins with its own A, not with zeros."""
    changes = [{"lora.seed": seed} for seed in range(3)]
    threads = set()
    seen = Seen(on_step=lambda trial, report: threads.add(threading.active_count()))
    trials, _ = train_together(
        [configured("sft", tmp_path / "together", one) for one in changes], at_once=1, watch=seen
    )
    assert [trial for trial, _ in seen.steps] == sorted(trial for trial, _ in seen.steps)
    assert len(threads) == 1
    norms = [reopened(trial).metrics()[0]["train/grad_norm"] for trial in trials]
    assert min(norms) > 0 and len(set(norms)) == 3
    [alone] = train_alone([configured("sft", tmp_path / "alone", changes[2])])
    assert_same(reopened(trials[2]), alone)


def test_one_that_fails_hurts_no_other(tmp_path):
    """A loss that becomes NaN, an exception in it, and an adapter that cannot be opened."""
    loss = {"loss._target_": "tests.recipes.test_sft_local.nan_loss"}
    broken = {"loss._target_": "tests.sweeps.test_equal.broken_loss"}
    configs = [configured("sft", tmp_path / "together", one) for one in (loss, {}, broken)]
    trials, seen = train_together(configs)
    assert [trial.state for trial in trials] == ["failed", "succeeded", "failed"]
    assert "loss is nan" in trials[0].why
    assert trials[2].why == "ZeroDivisionError: division by zero"
    assert reopened(trials[0]).record.failure.code == "non_finite"
    assert sorted(seen.ended_) == [0, 1, 2]
    [alone] = train_alone([configured("sft", tmp_path / "alone")])
    assert_same(reopened(trials[1]), alone)


def broken_loss(logprobs, *, token_weights):
    """Fails on real batches only, not on the few tokens it is tried on in `prepare`."""
    1 / (0 if token_weights.numel() > 20 else 1)
    return (logprobs * token_weights).sum(), {}


def test_a_request_to_stop_lets_all_finish_their_step(tmp_path):
    stop = StopRequest()

    def ask(trial, report):
        if report.step == 2:
            stop.signal_number = signal.SIGINT

    configs = [configured("sft", tmp_path, {"seed": seed}) for seed in range(3)]
    trials, _ = train_together(configs, at_once=2, stop=stop, watch=Seen(on_step=ask))
    assert [trial.state for trial in trials] == ["cancelled", "cancelled", "pending"]
    for trial in trials[:2]:
        record = reopened(trial).record
        assert record.outcome.stop_reason is StopReason.CANCELLED
        assert record.model_available
        assert record.outcome.steps == reopened(trial).checkpoints()[-1].step
    assert trials[2].run is None


def test_an_interrupt_in_the_middle_ends_all_at_once(tmp_path, monkeypatch):
    """What a second Ctrl-C does: it reaches the thread that computes."""
    configs = [configured("sft", tmp_path, {"seed": seed}) for seed in range(2)]
    run_jobs, calls = Engine.run, []

    def interrupted(engine, jobs, *, max_tokens):
        calls.append(len(jobs))
        if len(calls) > 3:
            raise KeyboardInterrupt
        run_jobs(engine, jobs, max_tokens=max_tokens)

    monkeypatch.setattr(Engine, "run", interrupted)
    seen = Seen()
    with build_backend(configs[0]) as backend, pytest.raises(KeyboardInterrupt):
        train_together(configs, backend=backend, watch=seen)
    assert sorted(seen.ended_) == [0, 1]
    runs = sorted(tmp_path.glob("sft/*/run.json"))
    states = {reopened_state(path.parent) for path in runs}
    assert states == {RunState.CANCELLED}


def reopened_state(path):
    from tunebook.runs import RunDir

    return RunDir.open(path).record.state
