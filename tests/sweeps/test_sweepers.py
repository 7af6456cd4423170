"""Sweepers and launchers of others: Optuna proposes, Ray and submitit start; skipped where not installed."""

import pytest

from tests.sweeps.launchers import launcher
from tests.sweeps.test_multirun import LOSS, SMALL, here, run, sweep_in
from tunebook.runs import RunDir, RunState

__all__ = ["here", "launcher"]


def test_optuna_learns_from_what_each_trial_reached(here, capsys):
    """Two batches of two, one trial fails: it has no value, and the others go on."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper.optuna_sweeper")
    (here / "swept_loss.py").write_text(LOSS.format(bad=1))
    code = run(
        *SMALL, "hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=2",
        "hydra.sweeper.sampler.seed=1", "loss._target_=swept_loss.broken", "loss.on=choice(0,1)",
        "lora.rank=choice(2,4)",
    )  # fmt: skip
    assert code == 1
    sweep = sweep_in(here)
    failed = [trial for trial in sweep.trials if trial.state == "failed"]
    assert len(sweep.trials) == 4 and 0 < len(failed) < 4
    assert failed == [trial for trial in sweep.trials if "on=1" in trial.label]
    best = min(trial.value for trial in sweep.trials if trial.value is not None)
    found = (sweep.path / "optimization_results.yaml").read_text()
    assert f"best_value: {best}" in found


def test_a_launcher_starts_each_run_by_itself(here, launcher):
    """Each brings its own base."""
    assert run(*SMALL, *launcher, "seed=1,2") == 0
    runs = [RunDir.open(path.parent) for path in (here / "runs" / "sft").glob("*/run.json")]
    assert sorted(run.read_config()["seed"] for run in runs) == [1, 2]
    assert {run.record.state for run in runs} == {RunState.SUCCEEDED}


def test_a_job_that_fails_is_told_and_hurts_no_other(here, launcher):
    assert run(*SMALL, *launcher, "seed=1,2", "lora.rank=choice(2,-1)") == 2
