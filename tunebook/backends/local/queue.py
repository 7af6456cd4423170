"""The queue of operations: queued by a call, run when somebody waits.

Operations of all sessions stand in one queue in call order. Waiting for one runs everything queued
before it, and joint operations together with those of their kind that nothing holds back. Where
several threads wait that drive a session each, their waits meet; see `tunebook.backends.gathering`.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from tunebook.backends.gathering import current_gathering
from tunebook.errors import BackendError, TunebookError

PHASES: dict[str | None, int] = {"sample": 1, "forward": 2, "forward_backward": 3}
"""Kind of operations that run together -> when in a step it comes; all else runs at once."""

S = TypeVar("S")
T = TypeVar("T")


@dataclass(slots=True)
class Lane:
    """The operations of one session; after a failure every later one is refused."""

    name: str
    failed_operation: str | None = None
    failure: BaseException | None = None
    closed: bool = False


class LocalFuture(Generic[T]):
    """The result of a queued operation."""

    def __init__(self, queue: "OperationQueue", lane: Lane, kind: str | None) -> None:
        self._queue = queue
        self._lane = lane
        self._kind = kind
        self._done = False
        self._value: T | None = None
        self._error: BaseException | None = None

    def result(self) -> T:
        """Runs what was queued up to this operation; returns its value or raises what it raised."""
        gathering = current_gathering()
        if gathering is None:
            self._queue.run_until(self)
        elif not self._done:
            gathering.wait_for(self._run_lane, phase=PHASES.get(self._kind, 0))
        if self._error is not None:
            raise self._error
        return cast(T, self._value)

    @property
    def done(self) -> bool:
        """Whether the operation has run, failed, or was dropped."""
        return self._done

    def settle(self, value: T | None, error: BaseException | None) -> None:
        """Records the outcome."""
        self._value, self._error, self._done = value, error, True

    def _run_lane(self) -> None:
        # Whoever drives the session waits, so all that it wants before it goes on is queued.
        self._queue.run_lane(self._lane)


@dataclass(frozen=True, slots=True)
class Joint(Generic[S, T]):
    """An operation that can run together with others of its kind."""

    kind: str
    """Operations of one kind meet."""
    begin: Callable[[], S]
    """Checks and prepares the operation; what it raises is the operation's failure."""
    run: Callable[[list[S]], None]
    """Runs what several `begin` returned; what it raises is the failure of all of them."""
    finish: Callable[[S], T]
    """The value of the operation, or its failure, once all have run."""
    drop: Callable[[], None]
    """Called where the operation has failed."""


@dataclass(slots=True)
class _Operation:
    lane: Lane
    name: str
    run: Callable[[], Any] | Joint[Any, Any]
    future: LocalFuture[Any]
    poisons: bool

    @property
    def kind(self) -> str | None:
        """What it can run together with."""
        return self.run.kind if isinstance(self.run, Joint) else None


class OperationQueue:
    """Operations of the sessions of one backend, in call order."""

    def __init__(self) -> None:
        self._operations: deque[_Operation] = deque()
        self._lock = threading.RLock()

    def submit(
        self,
        lane: Lane,
        name: str,
        run: Callable[[], T] | Joint[Any, T],
        *,
        poisons: bool = True,
    ) -> LocalFuture[T]:
        """A future for `run`, which is called when this or a later operation is waited for.

        Args:
            lane: the session it belongs to.
            name: for error messages.
            run: the operation; a joint one runs together with those of its kind that other
                sessions have queued next, and that this session has queued right after it.
            poisons: whether its failure makes later operations of the session fail.

        Raises:
            BackendError: the session is closed.
        """
        if lane.closed:
            raise BackendError(f"session {lane.name!r} is closed, it takes no {name}")
        kind = run.kind if isinstance(run, Joint) else None
        future: LocalFuture[T] = LocalFuture(self, lane, kind)
        with self._lock:
            self._operations.append(_Operation(lane, name, run, future, poisons))
        return future

    def run_until(self, future: LocalFuture[Any]) -> None:
        """Runs operations in call order until `future` is settled."""
        with self._lock:
            while not future.done:
                if not self._operations:
                    raise BackendError(
                        "this operation is being computed; a loss cannot wait for its own result "
                        "or for one that is computed together with it"
                    )
                self._run(self._operations.popleft())

    def run_lane(self, lane: Lane) -> None:
        """Runs all that a session has queued, and what of others can run together with it."""
        with self._lock:
            while True:
                own = (n for n, each in enumerate(self._operations) if each.lane is lane)
                place = next(own, None)
                if place is None:
                    return
                operation = self._operations[place]
                del self._operations[place]
                self._run(operation)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which no operation runs, whichever thread waits for it."""
        with self._lock:
            yield

    def close_lane(self, lane: Lane) -> None:
        """Closes a session: operations of it that nobody has waited for are dropped."""
        with self._lock:
            lane.closed = True
            kept: deque[_Operation] = deque()
            for operation in self._operations:
                if operation.lane is lane:
                    operation.future.settle(None, _dropped(operation))
                else:
                    kept.append(operation)
            self._operations = kept

    def _run(self, operation: _Operation) -> None:
        if isinstance(operation.run, Joint):
            self._run_together([operation, *self._take_companions(operation)])
        elif operation.lane.failure is not None:
            operation.future.settle(None, _refused(operation))
        else:
            _settle(operation, operation.run)

    def _take_companions(self, first: _Operation) -> list[_Operation]:
        """Takes out of the queue what can run with an operation without changing any order.

        That is what stands first in the line of its session, or behind such operations only.
        """
        companions: list[_Operation] = []
        others: deque[_Operation] = deque()
        blocked: set[int] = set()
        for operation in self._operations:
            lane = id(operation.lane)
            if lane not in blocked and operation.kind == first.kind:
                companions.append(operation)
            else:
                blocked.add(lane)
                others.append(operation)
        self._operations = others
        return companions

    def _run_together(self, operations: list[_Operation]) -> None:
        started: list[tuple[_Operation, Joint[Any, Any], Any]] = []
        for operation in operations:
            joint = operation.run
            assert isinstance(joint, Joint)
            if operation.lane.failure is not None:
                operation.future.settle(None, _refused(operation))
                continue
            try:
                started.append((operation, joint, joint.begin()))
            except Exception as error:
                joint.drop()
                _fail(operation, error)
        if not started:
            return
        try:
            started[0][1].run([state for _, _, state in started])
        except BaseException as error:
            for operation, joint, _ in started:
                joint.drop()
                _fail(operation, error)
            # An interrupt concerns whoever waits now, not only the owner of this operation.
            if not isinstance(error, Exception):
                raise
            return
        for operation, joint, state in started:
            if operation.lane.failure is not None:
                operation.future.settle(None, _refused(operation))
                continue
            try:
                value = joint.finish(state)
            except Exception as error:
                joint.drop()
                _fail(operation, error)
            else:
                operation.future.settle(value, None)


def _settle(operation: _Operation, run: Callable[[], Any]) -> None:
    try:
        value = run()
    except BaseException as error:
        _fail(operation, error)
        # An interrupt concerns whoever waits now, not only the owner of this operation.
        if not isinstance(error, Exception):
            raise
    else:
        operation.future.settle(value, None)


def _fail(operation: _Operation, error: BaseException) -> None:
    operation.future.settle(None, error)
    if operation.poisons and operation.lane.failure is None:
        operation.lane.failed_operation, operation.lane.failure = operation.name, error


def _dropped(operation: _Operation) -> BackendError:
    return BackendError(
        f"session {operation.lane.name!r} was closed before its {operation.name} was waited for"
    )


def _refused(operation: _Operation) -> TunebookError:
    lane = operation.lane
    failure = lane.failure
    message = (
        f"session {lane.name!r} refuses {operation.name}: "
        f"its {lane.failed_operation} failed before: {failure}"
    )
    kind = type(failure) if isinstance(failure, TunebookError) else BackendError
    error = kind(message)
    error.__cause__ = failure
    return error
