"""What `drive` and its signals do with a training, whatever the recipe."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from tunebook.launch import drive, stop_signals
from tunebook.runs import RunDir, RunState


def test_a_stop_outlives_whoever_reads_the_output(tmp_path):
    """As Ctrl-C under `2>&1 | tee`, which ends tee too."""
    process = subprocess.Popen(
        [
            sys.executable, "-m", "recipes.sft", "plan.epochs=50", "plan.checkpoint_every=0",
            "samples.num_prompts=0",
        ],
        cwd=tmp_path, env={**os.environ, "TUNEBOOK_HOME": f"{tmp_path}_home"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    deadline = time.monotonic() + 200
    while not list(tmp_path.glob("runs/sft/*/metrics.jsonl")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=200) == 130
    [path] = (tmp_path / "runs" / "sft").iterdir()
    run = RunDir.open(path)
    assert run.record.state is RunState.CANCELLED and run.record.failure is None
    assert run.record.model_available
    assert run.checkpoints()[-1].step == run.record.outcome.steps > 0
    assert (path / "report.html").is_file()


def test_a_training_is_closed_where_showing_it_fails(tmp_path):
    closed = []

    def training():
        try:
            yield SimpleNamespace(step=1, metrics={})  # without what every step has
        finally:
            closed.append(True)

    task = SimpleNamespace(summary={"planned_steps": 2})
    reports = training()  # kept, so that nothing but `drive` closes it
    with pytest.raises(KeyError, match="train/tokens"):
        drive(task, reports, RunDir.create(tmp_path, "sft", "x"))
    assert closed == [True]


@pytest.mark.parametrize("error", [BrokenPipeError("gone"), RuntimeError("reentrant call")])
def test_a_note_that_cannot_be_shown_tears_nothing(error):
    def fail():
        raise error

    with stop_signals() as stop:
        stop.on_request = fail
        signal.raise_signal(signal.SIGINT)
        assert stop.signal_number == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
