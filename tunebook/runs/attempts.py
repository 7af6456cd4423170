"""One attempt at training: one writer at a time, and an end that is recorded on every way out."""

from __future__ import annotations

import errno
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from tunebook.display import tunebook_command
from tunebook.errors import RunCancelled, RunError, TunebookError
from tunebook.runs.files import read_json, writing
from tunebook.runs.numbering import RECORD_FILE
from tunebook.runs.record import (
    LIVE_ATTEMPT_STATES,
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
LEASE_VARIABLE = "TUNEBOOK_LEASE"
"""Holds `<run id>:<lease>:<seconds>` for the process that is to make a leased attempt.

The seconds are those of this machine's monotonic clock when it was leased.
"""
ELSEWHERE_S = 3600.0
"""Seconds for which an attempt that another machine is to begin is taken to be on its way.

One that comes later still begins, unless another attempt has begun meanwhile.
"""
CANCELLING = (KeyboardInterrupt, SystemExit, GeneratorExit, RunCancelled)
AWAITING_PROCESS = (AttemptState.LEASED, AttemptState.ACCEPTED)
TRACEBACK = "Traceback (most recent call last)"
"""Begins what of a message belongs into `log.txt` alone."""
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
STATE_OF_RUN_STATE = {
    RunState.SUCCEEDED: AttemptState.SUCCEEDED,
    RunState.CANCELLED: AttemptState.CANCELLED,
    RunState.FAILED: AttemptState.FAILED,
}


class RunHeldError(RunError):
    """A run that another process prepares or trains."""


@contextmanager
def locked(run_path: Path) -> Iterator[None]:
    """Holds the lock of a run, which the operating system frees when the process dies.

    Raises:
        RunHeldError: another process holds it.
        StorageError: the lock file cannot be made.
    """
    lock = FileLock(run_path / LOCK_FILE, thread_local=False)
    with writing(run_path / LOCK_FILE):
        try:
            lock.acquire(timeout=LOCK_WAIT_S)
        except Timeout:
            raise RunHeldError(_who_holds(run_path)) from None
    try:
        yield
    finally:
        lock.release()


def is_being_trained(run_path: Path) -> bool:
    """Whether a process holds the run right now; a record says `running` also after a kill."""
    if not (run_path / LOCK_FILE).exists():
        return False  # A look leaves no file behind.
    lock = FileLock(run_path / LOCK_FILE, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    except OSError:
        return False  # A folder that cannot be written cannot be trained in either.
    lock.release()
    return False


def leased(record: RunRecord, *, resumed_from_step: int, idempotency_key: str | None) -> RunRecord:
    """The record with an attempt that waits for its process; until then it is this process's."""
    attempt = Attempt(
        number=len(record.attempts) + 1,
        state=AttemptState.LEASED,
        started_at=utc_now(),
        ended_at=None,
        pid=os.getpid(),
        host=socket.gethostname(),
        resumed_from_step=resumed_from_step,
        lease=secrets.token_hex(8),
        idempotency_key=idempotency_key,
        process_started=process_started(os.getpid()),
    )
    record = replace(with_dead_settled(record).with_attempt(attempt), state=RunState.PENDING)
    return replace(record, failure=None, outcome=None)


def started(record: RunRecord, resumed_from_step: int) -> RunRecord:
    """The record with an attempt of this process begun: the one leased to it, else a new one.

    The caller holds the lock, so an attempt that still looks live belongs to a dead process.

    Raises:
        RunError: the attempt that was leased to this process is no longer the last one.
    """
    lease = held_lease(record)
    if lease is not None:  # a later attempt in this process is another one
        os.environ.pop(LEASE_VARIABLE, None)
    live = record.live_attempt
    attempt = Attempt(
        number=len(record.attempts) + 1,
        state=AttemptState.STARTED,
        started_at=utc_now(),
        ended_at=None,
        pid=os.getpid(),
        host=socket.gethostname(),
        resumed_from_step=resumed_from_step,
    )
    if lease is None:
        record = with_dead_settled(record)
    elif live is None or live.lease != lease:
        raise RunError(
            "The attempt that this process was started for was given up meanwhile, so it trains "
            "nothing. The run itself is as it was."
        )
    else:
        attempt = replace(
            attempt, number=live.number, lease=lease, idempotency_key=live.idempotency_key
        )
    return replace(record.with_attempt(attempt), state=RunState.RUNNING, failure=None, outcome=None)


def with_dead_settled(record: RunRecord) -> RunRecord:
    """The record in which an attempt that its process left without an end has one."""
    dead = record.live_attempt
    return record if dead is None else record.with_attempt(settled(dead))


def settled(dead: Attempt) -> Attempt:
    """A live attempt whose process is gone, as what it has become."""
    if dead.state is AttemptState.LEASED:
        return replace(dead, state=AttemptState.SUBMISSION_UNCERTAIN)
    return replace(dead, state=AttemptState.EXPIRED)


def held_lease(record: RunRecord) -> str | None:
    """The lease of an attempt of this run that this process was started for, or has leased."""
    run_id, _, rest = os.environ.get(LEASE_VARIABLE, "").partition(":")
    if run_id == record.id:
        return rest.partition(":")[0]
    live = record.live_attempt
    if live is not None and live.state in AWAITING_PROCESS and _is_here(live):
        return live.lease
    return None


def is_leased_here(record: RunRecord) -> bool:
    """Whether the last attempt of a run waits for this process to begin it."""
    live = record.live_attempt
    return (
        live is not None
        and live.state in AWAITING_PROCESS
        and live.lease is not None
        and live.lease == held_lease(record)
    )


def begins_anew(record: RunRecord) -> bool:
    """Whether this process was started to train a run again from step 0."""
    return is_leased_here(record) and record.attempts[-1].resumed_from_step == 0


def leased_seconds(record: RunRecord) -> float | None:
    """Seconds since another process leased the attempt of this one; None = none did."""
    if os.environ.get(LEASE_VARIABLE, "").partition(":")[0] != record.id:
        return None
    return time.monotonic() - float(os.environ[LEASE_VARIABLE].rpartition(":")[2])


def lease_text(record: RunRecord) -> str:
    """What `LEASE_VARIABLE` holds in the process that is to make the last attempt."""
    return f"{record.id}:{record.attempts[-1].lease}:{time.monotonic()}"


def is_live(attempt: Attempt, run_path: Path) -> bool:
    """Whether a process makes this attempt, or is about to."""
    if attempt.state in AWAITING_PROCESS and process_exists(attempt):
        return True
    return attempt.state in LIVE_ATTEMPT_STATES and is_being_trained(run_path)


def process_exists(attempt: Attempt) -> bool:
    """Whether the process of an attempt that has not begun is there.

    One of another machine is taken to be, for `ELSEWHERE_S`: that machine may be gone, or be this
    one under a former name.
    """
    if attempt.host != socket.gethostname():
        age = datetime.now(UTC) - datetime.fromisoformat(attempt.started_at)
        return age.total_seconds() < ELSEWHERE_S
    with suppress(ChildProcessError):  # a dead child of ours looks alive until it is waited for
        os.waitpid(attempt.pid, os.WNOHANG)
    try:
        os.kill(attempt.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is somebody else's
    return not _is_zombie(attempt.pid) and _is_same_process(attempt)


def process_started(pid: int) -> str | None:
    """When a process started, as boot and clock ticks since; None where the system does not say."""
    stat = _process_stat(pid)
    boot = Path("/proc/sys/kernel/random/boot_id")
    if stat is None or not boot.is_file():
        return None
    return f"{boot.read_text(encoding='ascii').strip()} {stat[19]}"


def _process_stat(pid: int) -> list[str] | None:
    """The fields of `/proc/<pid>/stat` from the third, the state; None where there is no such."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()  # the second is a name, which may hold anything


def _is_zombie(pid: int) -> bool:
    """Whether a process is dead and only its parent has not noticed."""
    stat = _process_stat(pid)
    return stat is not None and stat[0] in ("Z", "X")


def _is_same_process(attempt: Attempt) -> bool:
    """Whether the process that has the pid of an attempt is its own, as far as can be told."""
    now = process_started(attempt.pid)
    return None in (attempt.process_started, now) or attempt.process_started == now


def _is_here(attempt: Attempt) -> bool:
    here = attempt.pid == os.getpid() and attempt.host == socket.gethostname()
    return here and _is_same_process(attempt)


def refuse_if_leased(record: RunRecord, run_path: Path) -> None:
    """Returns unless the next attempt belongs to another process that is starting.

    Raises:
        RunHeldError: it does; the message names it.
    """
    live = record.live_attempt
    if live is None or live.state not in AWAITING_PROCESS or not process_exists(live):
        return
    if live.lease != held_lease(record):
        raise RunHeldError(_who_holds(run_path))


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
        message = str(error).partition(TRACEBACK)[0].rstrip()
        return Failure(error.code, error.category, redact(message, os.environ))
    text = " ".join(f"{type(error).__name__}: {error}".split())
    code, category = _kind_of(error)
    return Failure(code, category, redact(text, os.environ))


def _kind_of(error: BaseException) -> tuple[str, str]:
    """Failure code and category of an error that is none of ours."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "out_of_memory", "capacity"
    if isinstance(error, OSError) and error.errno in FULL_DISK:
        return "storage", "system"
    if isinstance(error, ConnectionError | TimeoutError):
        return "service_unreachable", "service"
    return "internal", "system"


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
        f"{run_path}: {who} is training this run. One process at a time may: wait for it, stop it "
        f"by `{tunebook_command()} runs cancel {record.number}`, or start a new run."
    )
