"""A sweep that is interrupted or killed goes on, and its adapters are those of unbroken runs."""

import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.running import train_all
from tests.sweeps.test_equal import adapter, numbers
from tests.sweeps.test_multirun import run, sweep_in
from tunebook.compose import compose
from tunebook.sweeps.record import SweepDir

pytestmark = pytest.mark.xdist_group("interrupted")

SETTINGS = {
    "data.limit": 24, "eval.fraction": 0.2, "eval.min_rows": 1, "plan.batch_size": 4,
    "plan.checkpoint_every": 3, "samples.num_prompts": 0, "plan.epochs": None, "plan.max_steps": 20,
}  # fmt: skip
LINES = [f"{key}={'null' if value is None else value}" for key, value in SETTINGS.items()]
EXIT_CODE = {signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Of each seed, trained alone."""
    root = str(tmp_path_factory.mktemp("unbroken"))
    configs = [compose("sft", {**SETTINGS, "runs_dir": root, "seed": seed}) for seed in range(3)]
    return [train_all(config)[1] for config in configs]


def interrupted(folder, signals):
    """The sweep of a process that got signals once both its slots had made a step."""
    process = subprocess.Popen(
        [sys.executable, "-m", "recipes.sft", "--multirun", *LINES, "seed=0,1,2", "sweep.max_at_once=2"],
        cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    deadline = time.monotonic() + 200
    while len(list(folder.glob("runs/sft/*/metrics.jsonl"))) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    for number in signals:
        process.send_signal(number)
        time.sleep(0.02)
    out, err = process.communicate(timeout=200)
    assert process.returncode == EXIT_CODE[signals[0]], out + err
    return sweep_in(folder)


@pytest.mark.parametrize(
    "signals",
    [[signal.SIGINT], [signal.SIGINT, signal.SIGINT], [signal.SIGKILL]],
    ids=["once", "twice", "kill"],
)
def test_an_interrupted_sweep_goes_on(unbroken, tmp_path, monkeypatch, signals):
    sweep = interrupted(tmp_path, signals)
    before = [trial.state.value for trial in sweep.trials]
    if signals == [signal.SIGKILL]:
        assert before == ["running", "running", "pending"]
    else:
        assert before == ["cancelled", "cancelled", "pending"]
    if signals == [signal.SIGINT]:
        assert all(sweep.run_of(trial).record.model_available for trial in sweep.trials[:2])
    monkeypatch.chdir(tmp_path)
    assert run("--multirun", f"sweep.resume={sweep.path}") == 0
    sweep = SweepDir.open(sweep.path)
    assert [trial.state.value for trial in sweep.trials] == ["succeeded"] * 3
    attempts = [len(sweep.run_of(trial).record.attempts) for trial in sweep.trials]
    assert attempts == [2, 2, 1]
    for trial, alone in zip(sweep.trials, unbroken, strict=True):
        together = sweep.run_of(trial)
        assert numbers(together) == numbers(alone)
        expected = adapter(alone)
        for name, value in adapter(together).items():
            assert torch.equal(value, expected[name]), name
