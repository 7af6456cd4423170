"""What the record of a sweep says of trials whose process was killed."""

import json
import subprocess
import sys

import pytest

from tunebook.compose import as_dict, compose
from tunebook.reports.watch import _is_over
from tunebook.runs import RunDir, RunState, StopReason
from tunebook.sweeps.compare import compare_sweep
from tunebook.sweeps.record import SweepDir, config_hash
from tunebook.sweeps.sweep import Sweep
from tunebook.sweeps.trial import Trial, TrialState

REASON = "eval/loss 3 at step 2 is not among the best 1 of 2"
KILLED = """
import os, sys
from tunebook.runs import RunDir
run = RunDir.open(sys.argv[1])
with run.attempt(planned_steps=9):
    for step in range(1, 3):
        run.log_metrics(step, {"eval/loss": 3.0})
    if len(sys.argv) > 2:
        run.event("stopped_by_sweep", step=2, reason=sys.argv[2])
    os._exit(9)
"""


@pytest.fixture
def sweep(tmp_path):
    folder = tmp_path / "runs" / "sweeps" / "one"
    folder.mkdir(parents=True)
    return SweepDir.create(folder, "sft", halving=None)


def noted(sweep, number=0, *, state=TrialState.RUNNING, run=None, why=None):
    config = compose("sft", {"seed": number})
    trial = Trial(number=number, overrides=(), config=config, state=state, run=run, why=why)
    sweep.note(trial)
    return trial


def new_run(sweep, name):
    run = RunDir.create(sweep.runs_dir, "sft", name)
    run.write_config(as_dict(compose("sft", {"name": name})))
    return run


def killed(run, *arguments):
    """The run after a process that trained it was killed."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(run.path), *arguments], check=False)
    assert done.returncode == 9
    return RunDir.open(run.path)


def taken_over(sweep, *trials):
    Sweep("sft", None, None)._take_over(SweepDir.open(sweep.path), trials)


def test_a_trial_whose_process_was_killed_is_interrupted(sweep):
    lost, never = killed(new_run(sweep, "lost")), new_run(sweep, "never")
    trials = [
        noted(sweep, 0, run=lost),
        noted(sweep, 1, run=never),  # killed before its first attempt
        noted(sweep, 2, state=TrialState.PENDING),
    ]
    with sweep.only_writer():
        states = [sweep.current(each).state.value for each in sweep.trials]
        assert states == ["interrupted", "running", "pending"]
        assert not _is_over(sweep)
    assert [row["state"] for row in compare_sweep(sweep).rows] == [
        "interrupted", "interrupted", "pending",
    ]  # fmt: skip
    assert _is_over(sweep)
    taken_over(sweep, *trials)
    assert [trial.state for trial in trials] == [TrialState.PENDING] * 3


def test_a_trial_that_waits_to_go_on_is_pending(sweep):
    noted(sweep, state=TrialState.PENDING, run=killed(new_run(sweep, "lost")))
    with sweep.only_writer():
        assert sweep.current(sweep.trials[0]).state is TrialState.PENDING
        assert not _is_over(sweep)


def test_a_trial_that_the_sweep_had_stopped_stays_stopped(sweep):
    """Killed after the verdict, and after the run has ended; a later attempt of its own counts."""
    ended = new_run(sweep, "ended")
    again = new_run(sweep, "again")
    for run in (ended, again):
        with run.attempt(planned_steps=9):
            run.log_metrics(2, {"eval/loss": 3.0})
            run.event("stopped_by_sweep", step=2, reason=REASON)
            run.finish(StopReason.CANCELLED, steps=2)
    with again.attempt(planned_steps=9):
        run.finish(StopReason.CANCELLED, steps=2)
    assert RunDir.open(ended.path).record.state is RunState.CANCELLED
    cut = killed(new_run(sweep, "cut"), REASON)
    trials = [noted(sweep, number, run=run) for number, run in enumerate([cut, ended, again])]
    taken_over(sweep, *trials)
    states = [trial.state for trial in trials]
    assert states == [TrialState.STOPPED, TrialState.STOPPED, TrialState.PENDING]
    assert [trial.why for trial in trials] == [REASON, REASON, None]


def test_the_results_of_a_deleted_run_outlive_a_resume(sweep):
    noted(sweep, state=TrialState.SUCCEEDED)
    file = sweep.path / "sweep.json"
    content = json.loads(file.read_text())
    content["trials"][0] |= {"run": "sft/gone", "metric": "eval/loss", "value": 1.5}
    file.write_text(json.dumps(content))
    before = SweepDir.open(sweep.path).trials
    trial = Trial(number=0, overrides=(), config=compose("sft", {"seed": 0}))
    assert before[0].config_hash == config_hash(trial.config)
    taken_over(sweep, trial)
    resumed = Sweep("sft", None, None)
    resumed._sweep = SweepDir.open(sweep.path)
    resumed._record([trial], None)
    assert SweepDir.open(sweep.path).trials == before
