"""One attempt at training: one writer at a time, and an end that is recorded on every way out."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from tunebook.errors import RunError, TunebookError
from tunebook.runs.files import read_json, writing
from tunebook.runs.numbering import RECORD_FILE
from tunebook.runs.record import (
    Attempt,
    AttemptState,
    Failure,
    RunRecord,
    RunState,
    StopReason,
    record_from_json,
)
from tunebook.runs.redaction import redact

LOCK_FILE = ".lock"
LOCK_WAIT_S = 1.0
"""Long enough for a reader that looks whether the run is alive, and for a new holder to sign."""
CANCELLING = (KeyboardInterrupt, SystemExit, GeneratorExit)
STATE_OF_RUN_STATE = {
    RunState.SUCCEEDED: AttemptState.SUCCEEDED,
    RunState.CANCELLED: AttemptState.CANCELLED,
    RunState.FAILED: AttemptState.FAILED,
}


@contextmanager
def locked(run_path: Path) -> Iterator[None]:
    """Holds the lock of a run, which the operating system frees when the process dies.

    Raises:
        RunError: another process holds it.
        StorageError: the lock file cannot be made.
    """
    lock = FileLock(run_path / LOCK_FILE, thread_local=False)
    with writing(run_path / LOCK_FILE):
        try:
            lock.acquire(timeout=LOCK_WAIT_S)
        except Timeout:
            raise RunError(_who_holds(run_path)) from None
    try:
        yield
    finally:
        lock.release()


def is_being_trained(run_path: Path) -> bool:
    """Whether a process holds the run right now; a record says `running` also after a kill."""
    lock = FileLock(run_path / LOCK_FILE, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    except OSError:
        return False  # A folder that cannot be written cannot be trained in either.
    lock.release()
    return False


def started(record: RunRecord, resumed_from_step: int) -> RunRecord:
    """The record with an attempt of this process begun.

    The caller holds the lock, so an attempt that still looks live belongs to a dead process.
    """
    dead = record.live_attempt
    if dead is not None:
        record = record.with_attempt(replace(dead, state=AttemptState.EXPIRED))
    attempt = Attempt(
        number=len(record.attempts) + 1,
        state=AttemptState.STARTED,
        started_at=utc_now(),
        ended_at=None,
        pid=os.getpid(),
        host=socket.gethostname(),
        resumed_from_step=resumed_from_step,
    )
    return replace(record.with_attempt(attempt), state=RunState.RUNNING, failure=None, outcome=None)


def ended(record: RunRecord) -> RunRecord:
    """The record with its last attempt ended as the run did."""
    assert record.state in STATE_OF_RUN_STATE, "the attempt ended without run.finish(...)"
    state = STATE_OF_RUN_STATE[record.state]
    return record.with_attempt(replace(record.attempts[-1], state=state, ended_at=utc_now()))


def ending_of(error: BaseException) -> tuple[StopReason, Failure | None]:
    """The stop reason that an exception means, and the failure unless it is an interruption."""
    if isinstance(error, CANCELLING):
        return StopReason.CANCELLED, None
    return StopReason.FAILED, failure_of(error)


def failure_of(error: BaseException) -> Failure:
    """The public description of an error: stable code, category and redacted message."""
    if isinstance(error, TunebookError):
        return Failure(error.code, error.category, redact(str(error), os.environ))
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return Failure("internal", "system", redact(text, os.environ))


def utc_now() -> str:
    """The time of day in ISO 8601, UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@contextmanager
def shielded() -> Iterator[None]:
    """Holds back SIGINT and SIGTERM during a few file writes; they arrive at the end of the block.

    Handlers are swapped rather than signals masked: another thread would take a masked signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    before = {
        number: signal.signal(number, lambda signum, frame: held.append(signum))
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) is not None
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(held):
            signal.raise_signal(number)


@contextmanager
def terminable() -> Iterator[None]:
    """Makes SIGTERM leave the block by SystemExit(143), so that every `with` inside cleans up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _who_holds(run_path: Path) -> str:
    record = record_from_json(read_json(run_path / RECORD_FILE))
    holder = record.live_attempt
    who = "another process" if holder is None else f"process {holder.pid} on {holder.host}"
    return (
        f"{run_path}: {who} is training this run. One process at a time may: wait for it, stop it, "
        "or start a new run."
    )
