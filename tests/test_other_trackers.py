"""TensorBoard, MLflow and Trackio, each read back by its own package; skipped where not installed."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_tracking import prepared, train
from tunebook.compose import build, compose
from tunebook.errors import ConfigError
from tunebook.other_trackers import MLflowTracker, TensorBoardTracker
from tunebook.runs import RunDir

EXPECTED = [(step, pytest.approx(1.0 / step)) for step in range(1, 11)]
"""Of `train/loss` in a run of two attempts of five steps each, as one."""


def two_attempts(tmp_path: Path, make) -> RunDir:
    """A run that was resumed at step 6 by another tracker object, as in another process."""
    run, warnings = prepared(tmp_path / "runs"), []
    train(run, make(), warnings, last=5)
    train(RunDir.open(run.path), make(), warnings, first=6, last=10)
    assert warnings == []
    return run


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "trackio"])
def test_a_package_that_is_missing_is_said_while_preparing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = build(compose("sft", {"tracker": name}).tracker, key="tracker")
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=rf"pip install 'tunebook\[{name}\]'"):
        tracker.check()


def test_no_tracker_is_imported_before_it_is_used() -> None:
    script = (
        "import sys, tunebook.other_trackers as o\n"
        "o.TensorBoardTracker(), o.MLflowTracker('x'), o.TrackioTracker('x')\n"
        "print([n for n in ('tensorboard', 'mlflow', 'trackio', 'torch') if n in sys.modules])\n"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environ
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("own_folder", [False, True])
def test_tensorboard_shows_one_run(tmp_path: Path, own_folder: bool) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = tmp_path / "boards" if own_folder else None
    run = two_attempts(tmp_path, lambda: TensorBoardTracker(folder and str(folder)))
    written = run.path / "tensorboard" if folder is None else folder / f"sft-{run.record.id}"
    board = reading.EventAccumulator(str(written))
    board.Reload()
    assert [(one.step, one.value) for one in board.Scalars("train/loss")] == EXPECTED
    assert [one.step for one in board.Scalars("eval/loss")] == [5, 10]
    config = board.Tensors("config/text_summary")
    text = b"".join(part for one in config for part in one.tensor_proto.string_val)
    assert b"learning_rate" in text and b"plain-key" not in text


def test_mlflow_shows_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    run = two_attempts(tmp_path, lambda: MLflowTracker("mine", tracking_uri=uri))
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("mine")
    [found] = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert sorted((one.step, one.value) for one in history) == EXPECTED
    assert found.info.status == "FINISHED"
    assert found.data.tags["stop_reason"] == "completed"
    assert found.data.tags["tunebook.id"] == f"sft-{run.record.id}"
    assert found.data.params["optimizer.learning_rate"] == "0.0001"
    assert found.data.params["backend.api_key"] == "[redacted]"


def test_trackio_shows_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    script = """
import sys
from pathlib import Path
from tests.test_other_trackers import two_attempts
from tunebook.other_trackers import TrackioTracker
run = two_attempts(Path(sys.argv[1]), lambda: TrackioTracker("mine"))
from trackio.sqlite_storage import SQLiteStorage
logs = SQLiteStorage.get_logs("mine", f"sft-{run.record.id}")
print("LOGS", [(one["step"], one["train/loss"]) for one in logs if "train/loss" in one])
print("RUNS", len(SQLiteStorage.get_runs("mine")))
"""
    environ = {
        **os.environ,
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
    }
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=environ,
    )
    assert done.returncode == 0, done.stderr
    told = dict(
        line.split(" ", 1) for line in done.stdout.splitlines() if line[:4] in ("LOGS", "RUNS")
    )
    assert told["RUNS"] == "1"
    assert told["LOGS"] == str([(step, 1.0 / step) for step in range(1, 11)])
