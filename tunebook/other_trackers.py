"""TensorBoard, MLflow and Trackio as trackers: thin, optional, imported only when they are used.

Each goes on with its own run when ours is resumed. None of them asks anybody anything.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunebook.errors import ConfigError
from tunebook.runs.listing import flattened
from tunebook.runs.record import STATE_OF_STOP_REASON, RunState, StopReason
from tunebook.runs.redaction import redact
from tunebook.tracking import TrackedRun

RUN_TAG = "tunebook.id"
"""Tag by which a resumed run finds its MLflow run."""
MLFLOW_STATUS = {
    RunState.SUCCEEDED: "FINISHED",
    RunState.FAILED: "FAILED",
    RunState.CANCELLED: "KILLED",
}
MAX_PARAMETER_CHARACTERS = 500


class TensorBoardTracker:
    """Event files for `tensorboard --logdir`, one folder a run."""

    def __init__(self, folder: str | None = None) -> None:
        """Only keeps the settings.

        Args:
            folder: holds a folder for each run; None = `tensorboard/` of the run directory.
        """
        self.folder = None if folder is None else Path(folder).expanduser().absolute()
        self._writer: Any = None

    def check(self) -> None:
        """Returns if TensorBoard is installed.

        Raises:
            ConfigError: it is not.
        """
        _require("tensorboard")

    def start(self, run: TrackedRun) -> None:
        """Begins an event file; those of earlier attempts lie beside it and are read as one."""
        from torch.utils.tensorboard import SummaryWriter

        own = run.path / "tensorboard" if self.folder is None else self.folder / run.tracker_id
        self._writer = SummaryWriter(log_dir=str(own))
        self._writer.add_text(
            "config", f"```\n{json.dumps(run.config, indent=1)}\n```", run.attempt
        )

    def log(self, metrics: Mapping[str, float | int | None], step: int) -> None:
        """Writes the known values of a step."""
        for key, value in metrics.items():
            if value is not None:
                self._writer.add_scalar(key, value, step)

    def finish(self, stop_reason: StopReason) -> None:
        """Writes everything out."""
        self._writer.add_text("stop_reason", stop_reason.value)
        self._writer.close()


class MLflowTracker:
    """A run of an MLflow experiment, on a server or in MLflow's own files."""

    def __init__(self, experiment: str, tracking_uri: str | None = None) -> None:
        """Only keeps the settings.

        Args:
            experiment: name of the MLflow experiment, made where there is none.
            tracking_uri: of the MLflow store; None = `MLFLOW_TRACKING_URI`, else MLflow's default.
        """
        self.experiment = experiment
        self.tracking_uri = tracking_uri
        self._client: Any = None
        self._run_id = ""

    def check(self) -> None:
        """Returns if MLflow is installed.

        Raises:
            ConfigError: it is not.
        """
        _require("mlflow")

    def start(self, run: TrackedRun) -> None:
        """Begins an MLflow run, or goes on with the one of an earlier attempt."""
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

        self._client = MlflowClient(tracking_uri=self.tracking_uri)
        experiment = self._client.get_experiment_by_name(self.experiment)
        experiment_id = (
            self._client.create_experiment(self.experiment)
            if experiment is None
            else experiment.experiment_id
        )
        query = f"tags.`{RUN_TAG}` = '{run.tracker_id}'"
        found = self._client.search_runs([experiment_id], query, max_results=1)
        if found:
            self._run_id = found[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        tags = {RUN_TAG: run.tracker_id, "recipe": run.recipe}
        made = self._client.create_run(experiment_id, tags=tags, run_name=run.name)
        self._run_id = made.info.run_id
        for key, value in flattened(run.config).items():
            text = redact(str(value), os.environ)[:MAX_PARAMETER_CHARACTERS]
            self._client.log_param(self._run_id, key, text)

    def log(self, metrics: Mapping[str, float | int | None], step: int) -> None:
        """Logs the known values of a step in one call."""
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = int(time.time() * 1000)
        points = [Metric(key, float(v), now, step) for key, v in metrics.items() if v is not None]
        self._client.log_batch(self._run_id, metrics=points)

    def finish(self, stop_reason: StopReason) -> None:
        """Ends the MLflow run with a status like ours."""
        self._client.set_tag(self._run_id, "stop_reason", stop_reason.value)
        status = MLFLOW_STATUS[STATE_OF_STOP_REASON[stop_reason]]
        self._client.set_terminated(self._run_id, status=status)


class TrackioTracker:
    """A run of a Trackio project, kept on this machine."""

    def __init__(self, project: str) -> None:
        """Only keeps the settings.

        Args:
            project: name of the Trackio project.
        """
        self.project = project
        self._run: Any = None

    def check(self) -> None:
        """Returns if Trackio is installed.

        Raises:
            ConfigError: it is not.
        """
        _require("trackio")

    def start(self, run: TrackedRun) -> None:
        """Begins the Trackio run, or goes on with it when this is a later attempt."""
        import trackio  # pyright: ignore[reportMissingImports]

        self._run = trackio.init(
            project=self.project,
            name=run.tracker_id,
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, metrics: Mapping[str, float | int | None], step: int) -> None:
        """Logs the known values of a step."""
        self._run.log({key: v for key, v in metrics.items() if v is not None}, step=step)

    def finish(self, stop_reason: StopReason) -> None:
        """Writes everything out; Trackio keeps no status of a run."""
        self._run.finish()


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"tracker={package}: the package is not installed. Run `pip install "
            f"'tunebook[{package}]'`, or go without a tracker by tracker=none"
        )
