"""What another process can do with a run: wait for it, follow its events, cancel it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tunebook.display import tunebook_command
from tunebook.errors import RunEndedError, RunFinalizingError, TunebookError, WaitTimeout
from tunebook.runs import cancellation
from tunebook.runs.attempts import RunHeldError, with_dead_settled
from tunebook.runs.directory import RunDir, only_writer
from tunebook.runs.record import (
    ENDED_STATES,
    AttemptState,
    Outcome,
    Preparation,
    RunState,
    StopReason,
)
from tunebook.runs.status import RunStatus, observed, run_status, shown

POLL_S = 2.0
"""Seconds between two looks at a run."""
CONFIRM_S = 10.0
"""Seconds that an interrupted wait waits for its cancellation to take effect."""


@dataclass(frozen=True, slots=True)
class Event:
    """One line of `events.jsonl`."""

    seq: int
    """Rises by one from event to event, over all attempts."""
    attempt: int
    """Attempt that it belongs to; 0 = before the first."""
    time: str
    """ISO 8601, UTC; goes back where the clock was set back. `seq` never does."""
    type: str
    fields: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Cancellation:
    """What came of asking to cancel a run."""

    status: RunStatus
    confirmed: bool
    """The run has ended as cancelled; else it finishes its step first, and may be asked again."""


def wait(path: Path | str, *, poll_s: float = POLL_S, timeout_s: float | None = None) -> RunStatus:
    """How a run ended, once it has; look at `succeeded`, not at the end of the waiting.

    Ctrl-C asks to cancel the run and goes on as KeyboardInterrupt, whose note says whether that was
    confirmed. A time-out cancels nothing.

    Args:
        path: the run directory.
        poll_s: seconds between two looks.
        timeout_s: seconds after which no further look is taken; None = no end.

    Raises:
        WaitTimeout: the run has not ended by then.
        RunError: there is no such run.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        while not (status := run_status(path)).done:
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                raise WaitTimeout(
                    f"{status.path}: is {shown(status.record)} after {timeout_s:g} s of waiting "
                    f"({_progress(status)}). It goes on; wait again, or cancel it with "
                    f"`{tunebook_command()} runs cancel {status.record.number}`"
                )
            time.sleep(poll_s if deadline is None else min(poll_s, deadline - now))
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(cancellation_text(path))
        raise
    return status


def follow(path: Path | str, *, after: int = 0, poll_s: float = POLL_S) -> Iterator[Event]:
    """The events of a run with a `seq` above `after`, as they come, until the run has ended.

    Stop by stopping the iteration; nothing is cancelled by it.

    Raises:
        RunError: there is no such run, or its events are damaged.
    """
    while True:
        done = run_status(path).done  # looked at first: its last event is written then
        for event in events(path, after=after):
            after = event.seq
            yield event
        if done:
            return
        time.sleep(poll_s)


def events(path: Path | str, *, after: int = 0) -> list[Event]:
    """The events of a run so far, those with a `seq` above `after`.

    Raises:
        RunError: there is no such run, or its events are damaged.
    """
    names = ("seq", "attempt", "time", "type")
    return [
        Event(
            **{name: line[name] for name in names},
            fields={key: value for key, value in line.items() if key not in names},
        )
        for line in RunDir.open(path).events(after=after)
    ]


def cancel(path: Path | str, *, wait_s: float = 0.0, poll_s: float = 0.2) -> Cancellation:
    """Asks a run to end: after the step in flight it saves, promotes its best checkpoint, stops.

    A run that nobody trains is cancelled at once, and one that has made no step leaves no model.
    Asking again changes nothing. No other attempt is ever started.

    Args:
        path: the run directory.
        wait_s: seconds to wait for the run to end; 0 = only ask.
        poll_s: seconds between two looks.

    Raises:
        RunFinalizingError: it writes its model already, which is not interrupted.
        RunEndedError: it has succeeded or failed.
        RunError: there is no such run.
    """
    deadline = time.monotonic() + wait_s
    status = _asked(path)
    while not status.done and time.monotonic() < deadline:
        time.sleep(poll_s)
        status = run_status(path)
    return Cancellation(status, confirmed=status.record.state is RunState.CANCELLED)


def cancellation_text(path: Path | str) -> str:
    """Asks to cancel a run after Ctrl-C; what came of it, in a sentence."""
    try:
        outcome = cancel(path, wait_s=CONFIRM_S)
    except TunebookError as error:
        return f"The run was not cancelled: {error}"
    if outcome.confirmed:
        return "The run is cancelled: confirmed."
    return (
        "Cancellation was asked for and is not confirmed yet: the step in flight ends first. Ask "
        f"again with `{tunebook_command()} runs cancel {outcome.status.record.number}`."
    )


def _asked(path: Path | str) -> RunStatus:
    run = RunDir.open(path)
    before, record = run.record, observed(run)
    if record.state is RunState.CANCELLED:
        return run_status(path)
    attempt = before.live_attempt
    ended = record.state in ENDED_STATES
    lost = ended and before.state not in ENDED_STATES  # nobody is there who would read a request
    if ended and not lost:
        raise RunEndedError(f"{run.path}: has {record.state} already, so it cannot be cancelled")
    if attempt is None or lost:
        try:
            with only_writer(run):
                unchanged = run.record == before
                if unchanged:
                    _end_idle(run)
        except RunHeldError:
            if RunDir.open(path).record.preparation is Preparation.SNAPSHOTTING:
                cancellation.request(run.path, 1)  # read when it is prepared, or by the attempt
                return run_status(path)
            unchanged = False
        return run_status(path) if unchanged else _asked(path)
    if not cancellation.request(run.path, attempt.number):
        _refuse_if_finalizing(RunDir.open(path))
    return run_status(path)


def _end_idle(run: RunDir) -> None:
    status = run_status(run.path)
    outcome = Outcome(StopReason.CANCELLED, status.planned_steps or 0, status.steps)
    record = with_dead_settled(run.record)
    if record.preparation is not Preparation.VERIFIED:
        record = replace(record, preparation=Preparation.CANCELLED)
    run.save(replace(record, state=RunState.CANCELLED, outcome=outcome, failure=None))
    cancellation.forget(run.path, len(record.attempts) + 1)
    run.event("cancelled")


def _refuse_if_finalizing(run: RunDir) -> None:
    attempt = run.record.live_attempt
    finalizing = attempt is not None and attempt.state is AttemptState.FINALIZING
    if finalizing and run.record.state is RunState.RUNNING:
        raise RunFinalizingError(
            f"{run.path}: has made its last step and writes its model, which is not "
            "interrupted. It ends by itself within moments"
        )


def _progress(status: RunStatus) -> str:
    return f"step {status.steps} of {'?' if status.planned_steps is None else status.planned_steps}"
