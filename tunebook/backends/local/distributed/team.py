"""The processes of one launch: how process 0 sends operations, and how a failure ends all of them.

An error that every process learns of at the same point of an operation is *agreed*: all of them are
in step, and process 0 decides what comes next. Any other error leaves the others waiting in the
middle of an operation, so it ends the launch: the process notes what happened in the launcher's
store, its connections close, and the others read the note when their own operation breaks.
"""

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from tunebook.errors import BackendError, TunebookError

T = TypeVar("T")

OPERATION_TIMEOUT = timedelta(minutes=30)
"""How long a process may keep the others waiting inside an operation."""
IDLE_TIMEOUT = timedelta(days=1)
"""How long process 0 may do something else (prepare data, write, upload) between operations."""
NOTE_WAIT_S = 2.0
"""For the note of a process whose connection is gone."""
TERMINATION_WAIT_S = 3.0
"""A launcher looks at its processes several times a second."""
FAILURE = "failure"
LOST_CONNECTION = ("Connection closed", "Connection reset", "Broken pipe", "Timed out", "gloo")


class Agreed(Exception):
    """An error that all processes know of, raised in each of them at the same point."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True)
class End:
    """Sent instead of an operation: process 0 is done."""

    exit_code: int


@dataclass(frozen=True, slots=True)
class Operation:
    """What all processes do next: a method of the member and its arguments."""

    name: str
    arguments: tuple[Any, ...]


class Team:
    """This process among those of its launch."""

    def __init__(self) -> None:
        """Meets the other processes, which must do the same."""
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        store, self.rank, self.size = next(rendezvous("env://", timeout=OPERATION_TIMEOUT))
        self.local_rank = int(os.environ.get("LOCAL_RANK", str(self.rank)))
        self._store = PrefixStore("tunebook", store)
        dist.init_process_group(
            backend,
            store=PrefixStore("groups", store),
            rank=self.rank,
            world_size=self.size,
            timeout=OPERATION_TIMEOUT,
        )
        self._operations = _control_group(IDLE_TIMEOUT)
        self._results = _control_group(OPERATION_TIMEOUT)
        self.broken = False
        """An operation ended in a way that the others cannot follow."""

    @property
    def leads(self) -> bool:
        """Whether this is process 0."""
        return self.rank == 0

    def call(self, operation: Operation, run: Callable[[], T]) -> T:
        """Makes all processes do an operation; returns what `run` returned here, on process 0.

        Args:
            operation: for the others.
            run: the same operation here.

        Raises:
            BackendError: it cannot be sent, or another process failed.
        """
        assert self.leads
        if self.broken:
            raise BackendError("the processes of this run are no longer in step; start it again")
        sent = pickled(operation)
        try:
            self._send(sent)
            self.agree(None)
            return run()
        except Agreed as agreed:
            raise agreed.error from agreed.error.__cause__
        except BaseException as error:
            self.broken = True
            raise self.explained(error) from error

    def follow(self, run: Callable[[Operation], object]) -> int:
        """Does what process 0 sends until it ends; returns its exit code."""
        while True:
            received = self._receive()
            try:
                message, error = pickle.loads(received), None
            except Exception as failure:  # whatever an import in user code raises
                message, error = None, failure
            if isinstance(message, End):
                return message.exit_code
            try:
                self.agree(error)
                assert isinstance(message, Operation)
                run(message)
            except Agreed:
                continue

    def agree(self, error: Exception | None) -> None:
        """Returns if no process has an error; else all raise that of the first which has.

        Raises:
            Agreed: on all processes.
        """
        self.exchange(None, error)

    def exchange(self, value: T, error: Exception | None) -> list[T]:
        """The values of all processes by rank, on all of them.

        Args:
            value: of this process.
            error: of this process; None = none.

        Raises:
            Agreed: on all processes, if one had an error.
        """
        mine = (value, None if error is None else portable(error, self.rank))
        answers: list[Any] = [None] * self.size
        dist.all_gather_object(answers, mine, group=self._results)
        for rank, (_, packed) in enumerate(answers):
            if packed is not None:
                # The original where it is at hand: it has a traceback.
                own = error if rank == self.rank else None
                raise Agreed(own or pickle.loads(packed))
        return [answer for answer, _ in answers]

    def gather(self, value: T) -> list[T] | None:
        """The values of all processes by rank on process 0, None on the others."""
        answers: list[Any] | None = [None] * self.size if self.leads else None
        dist.gather_object(value, answers, dst=0, group=self._results)
        return answers

    def end(self, exit_code: int) -> None:
        """Sends the others home; if that is no longer possible, they find the note."""
        if self.broken:
            self.note_failure("process 0 failed in the middle of an operation")
        else:
            self._send(pickled(End(exit_code)))

    def note_failure(self, message: str) -> None:
        """Leaves a note for the others; the first one stays."""
        try:
            self._store.compare_set(FAILURE, "", message)
        except RuntimeError:
            return  # the launcher is gone, so nobody reads it

    def failure_note(self, limit_s: float) -> str | None:
        """What the process that failed first has noted, if it does within the limit."""
        deadline = time.monotonic() + limit_s
        try:
            while not self._store.check([FAILURE]):
                if time.monotonic() > deadline:
                    return None
                time.sleep(0.1)
            return self._store.get(FAILURE).decode()
        except RuntimeError:
            return None  # the launcher is gone

    def explained(self, error: BaseException) -> BaseException:
        """What to raise for an error in the middle of an operation: its cause, where it is known.

        A connection that breaks is never the cause itself.
        """
        if not is_lost_connection(error):
            return error
        outlive_termination()
        note = self.failure_note(NOTE_WAIT_S)
        if note is not None:
            return BackendError(note)
        return BackendError(
            "another process of this run is gone or does not answer (killed, or out of memory?): "
            + " ".join(str(error).split())
        )

    def disconnect(self) -> None:
        """Closes the connections of this process, nothing being under way."""
        dist.destroy_process_group()

    def _send(self, message: bytes) -> None:
        dist.broadcast_object_list([message], src=0, group=self._operations)

    def _receive(self) -> bytes:
        received: list[Any] = [None]
        dist.broadcast_object_list(received, src=0, group=self._operations)
        return received[0]


def _control_group(timeout: timedelta) -> dist.ProcessGroup:
    """A group of all processes for messages in main memory."""
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group


def pickled(message: object) -> bytes:
    """A message as bytes.

    Raises:
        BackendError: it cannot be sent to another process.
    """
    try:
        return pickle.dumps(message)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise BackendError(f"cannot be sent to the other processes: {error}") from error


def portable(error: Exception, rank: int) -> bytes:
    """An error for other processes, as itself if it can be sent, else as a `BackendError`."""
    text = f"{type(error).__name__}: {error}"
    if not isinstance(error, TunebookError):
        error.add_note(f"(in process {rank})")
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
    except Exception:  # an exception class may need anything to be built
        return pickle.dumps(BackendError(f"process {rank}: {text}"))
    return packed


def outlive_termination() -> None:
    """Takes the one SIGTERM with which a launcher ends all processes when one has failed.

    This process ends anyway, but first it has to record and say why.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    deadline = time.monotonic() + TERMINATION_WAIT_S
    while not came and time.monotonic() < deadline:
        time.sleep(0.05)
    signal.signal(signal.SIGTERM, before)


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error says no more than that another process is gone or silent."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in LOST_CONNECTION)
