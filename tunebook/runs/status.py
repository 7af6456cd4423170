"""How a run stands right now: what it recorded, and whether its process is still there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from tunebook.runs import cancellation, files
from tunebook.runs.attempts import is_being_trained, is_live, settled
from tunebook.runs.directory import RunDir
from tunebook.runs.record import (
    ENDED_STATES,
    AttemptState,
    Failure,
    Preparation,
    RunRecord,
    RunState,
)

INTERRUPTED = "interrupted"
"""Shown for a run whose process is gone without having said how it ended."""
STARTING = "starting"
"""Shown for a run whose first process is on its way to training."""
DRY_RUN = "dry run"
"""Shown for a run that was to be planned only."""
OUTPUT_FILE = "output.txt"
"""What a process in the background prints, redacted."""
QUEUED_S = 60.0
"""Seconds after which a run that nobody has begun to prepare is one whose process is gone."""
PROCESS_LOST = "process_lost"
"""Failure code of such a run."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run at one moment; ask again for a later one."""

    path: Path
    record: RunRecord
    """As recorded, except where its process is gone or a cancellation is under way."""
    steps: int
    """Optimizer steps recorded so far."""
    planned_steps: int | None
    """None = the run was not prepared to the end."""
    released: bool
    """No process holds the lock of the run, so that its last event is written."""

    @property
    def done(self) -> bool:
        """Whether nothing more will happen by itself; `succeeded` says whether it went well."""
        return self.record.state in ENDED_STATES and self.released

    @property
    def succeeded(self) -> bool:
        """Whether the run ended as it should; `record.model_available` tells of the model."""
        return self.record.state is RunState.SUCCEEDED

    @property
    def total_s(self) -> float | None:
        """Seconds from the making of the run to its last end, gaps between attempts included.

        It is never less than the phases add up to, as a clock that was set back would have it; None
        while the run has not ended.
        """
        ends = [one.ended_at for one in self.record.attempts if one.ended_at is not None]
        if not self.done or not ends:
            return None
        begun, ended = map(datetime.fromisoformat, (self.record.created_at, ends[-1]))
        return max((ended - begun).total_seconds(), self.record.timing.total_s)


def run_status(path: Path | str) -> RunStatus:
    """How the run in a directory stands.

    Raises:
        RunError: the directory holds no run, or its record is damaged.
    """
    run = RunDir.open(path)
    rows = run.metrics()
    plan = run.path / "plan.json"
    planned = files.read_json(plan).get("planned_steps") if plan.is_file() else None
    outcome = run.record.outcome
    record = observed(run)
    return RunStatus(
        path=run.path,
        record=record,
        steps=rows[-1]["step"] if rows else 0,
        planned_steps=outcome.planned_steps if outcome is not None else planned,
        released=not is_being_trained(run.path),
    )


def observed(run: RunDir) -> RunRecord:
    """The record of a run as it is now; nothing is written.

    An attempt whose process is gone is expired (or its submission uncertain) and its run failed, as
    is a run whose process is gone from its preparation; a request to cancel that the trainer has
    not yet read makes the run `cancel_requested`.
    """
    record = run.record
    attempt = record.live_attempt
    if attempt is None:
        return _observed_preparation(run)
    if is_live(attempt, run.path):
        asked = (
            record.state is RunState.RUNNING
            and attempt.state is not AttemptState.FINALIZING
            and cancellation.is_requested(run.path, attempt.number)
        )
        return replace(record, state=RunState.CANCEL_REQUESTED) if asked else record
    latest = RunDir.open(run.path).record
    if latest != record:  # it ended, or went on, between the two looks
        return observed(RunDir(run.path, latest))
    has_output = (run.path / OUTPUT_FILE).is_file()
    printed = f"; what it printed is in {OUTPUT_FILE}" if has_output else ""
    failure = Failure(
        PROCESS_LOST,
        "system",
        f"the process of attempt {attempt.number} ({attempt.pid} on {attempt.host}) is gone "
        f"without having said how it ended{printed}",
    )
    record = record.with_attempt(settled(attempt))
    return replace(record, state=RunState.FAILED, failure=failure)


def _observed_preparation(run: RunDir) -> RunRecord:
    record = run.record
    underway = record.preparation is Preparation.SNAPSHOTTING or _is_queued_for_long(record)
    if record.state is not RunState.PENDING or not underway or is_being_trained(run.path):
        return record
    latest = RunDir.open(run.path).record
    if latest != record:  # it went on between the two looks
        return observed(RunDir(run.path, latest))
    failure = Failure(
        PROCESS_LOST,
        "system",
        "the process that prepared the run is gone without having said how it ended; prepare a new "
        "run",
    )
    preparation = Preparation.FAILED
    return replace(record, state=RunState.FAILED, preparation=preparation, failure=failure)


def _is_queued_for_long(record: RunRecord) -> bool:
    if record.preparation is not Preparation.QUEUED:
        return False
    age = datetime.now(UTC) - datetime.fromisoformat(record.created_at)
    return age.total_seconds() > QUEUED_S


def shown_state(run: RunDir) -> str:
    """The state of a run, `interrupted` where its process was killed, `dry run` where none was."""
    text = shown(observed(run))
    if text == RunState.PENDING and not run.record.attempts:
        config = run.path / "config.yaml"
        return DRY_RUN if config.is_file() and run.read_config().get("dry_run") else text
    return text


def shown(record: RunRecord) -> str:
    """The state of an observed record, as people read it."""
    if record.failure is not None and record.failure.code == PROCESS_LOST:
        return INTERRUPTED
    underway = {AttemptState.LEASED, AttemptState.ACCEPTED}
    if record.state is RunState.PENDING and {one.state for one in record.attempts} & underway:
        return STARTING
    return record.state.value
