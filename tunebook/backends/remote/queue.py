"""The operations of one session, in call order, and how they go on in a new session on the service.

A call submits at once; waiting comes later. Operations are settled in the order they were called,
so that a failure makes all later ones fail. What has changed the session since its last checkpoint
is kept: where the service loses the session, a new one begins from that checkpoint, makes the same
changes, and goes on with what was under way. Nothing else ever submits an operation again.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from tunebook.backends.remote.failures import RemoteError, StalledError
from tunebook.backends.remote.link import Finish, Link
from tunebook.backends.remote.loop import LoopThread
from tunebook.errors import BackendError, TunebookError
from tunebook.notices import Notes, notice

T = TypeVar("T")
LinkT = TypeVar("LinkT", bound=Link)
Start = Callable[[Any], Awaitable[Finish]]
"""Submits an operation to a session, given its link."""

STATUS_EVERY_S = 60.0
LOOK_EVERY_S = 1.0


@dataclass(eq=False)
class Operation:
    """One call on a session."""

    name: str
    start: Start
    changes: bool
    """A session that takes the place of a lost one has to do it again."""
    settled: Callable[[Any], Any] = lambda value: value
    """Turns the value into what the caller gets; called once, in call order, on the loop."""
    outcome: concurrent.futures.Future[Any] = field(default_factory=concurrent.futures.Future)
    finish: Finish | None = None
    error: Exception | None = None
    """Why it could not be submitted."""
    tried: bool = False
    """Its turn to be submitted has come."""


class RemoteFuture(Generic[T]):
    """The result of an operation that was submitted, or is going to be."""

    def __init__(self, queue: RemoteQueue[Any], operation: Operation) -> None:
        self._queue = queue
        self._operation = operation

    def result(self) -> T:
        """Waits for the operation and returns its value, or raises what it raised."""
        self._queue.wait_for(self._operation)
        return cast(T, self._operation.outcome.result())


class RemoteQueue(Generic[LinkT]):
    """Submits and settles the operations of one session, on the loop of the backend."""

    def __init__(
        self,
        name: str,
        link: LinkT,
        loop: LoopThread,
        notes: Notes,
        *,
        reopen: Callable[[str | None, bool], Awaitable[LinkT]],
        base: tuple[str | None, bool],
        recover: int,
        stall_timeout: float | None,
    ) -> None:
        """
        Args:
            name: of the session.
            link: the session on the service.
            loop: where its coroutines run.
            notes: what whoever waits should say.
            reopen: opens a session on the service from a checkpoint id (None = fresh), with or
                without its optimizer.
            base: what `link` was opened from.
            recover: times that the session may be replaced.
            stall_timeout: seconds without any progress after which waiting ends; None = never.
        """
        self.name = name
        self.link = link
        self._loop = loop
        self._reopen = reopen
        self._base = base
        self._recoveries_left = recover
        self._keeps = recover > 0
        self._stall_timeout = stall_timeout
        self._changes: list[Start] = []
        """Of what was settled since the base, in order. Not the operations: their outcomes would
        keep generators alive."""
        self._called: asyncio.Queue[Operation] = asyncio.Queue()
        self._sent: deque[Operation] = deque()
        self._arrived = asyncio.Event()
        self._submitting = asyncio.Lock()
        self._failed: tuple[str, Exception] | None = None
        self._blocked = False
        """Something could not be submitted, so nothing behind it may be."""
        self._closed = False
        self._progress_at = time.monotonic()
        self._notes = notes
        self._tasks = [loop.start(self._submit_all()), loop.start(self._settle_all())]

    def call(self, operation: Operation) -> RemoteFuture[Any]:
        """A future for an operation; it is submitted behind those called before.

        Raises:
            BackendError: the session is closed.
        """
        if self._closed:
            raise BackendError(f"session {self.name!r} is closed, it takes no {operation.name}")
        self._loop.call_soon(self._called.put_nowait, operation)
        return RemoteFuture(self, operation)

    def note(self, event: str, text: str, **fields: Any) -> None:
        """Has a sentence about the session said by whoever waits."""
        self._notes.add(event, text, session=self.name, **fields)

    def move_base(self, checkpoint_id: str, changes: list[Start]) -> None:
        """Makes a checkpoint the one that a new session would begin from.

        Args:
            checkpoint_id: saved by the operation that is being settled.
            changes: what has to be done after it nevertheless.
        """
        self._base = (checkpoint_id, True)
        self._changes = changes

    def wait_for(self, operation: Operation) -> None:
        """Returns when an operation is settled; says meanwhile how long nothing came back.

        Raises:
            StalledError: nothing at all came back for too long.
        """
        started = time.monotonic()
        said_at = started
        while True:
            done, _ = concurrent.futures.wait([operation.outcome], timeout=LOOK_EVERY_S)
            self._notes.say()
            if done:
                return
            for task in self._tasks:
                if task.done() and not self._closed:
                    task.result()  # a fault of ours: nothing would ever come back
            now = time.monotonic()
            idle_s = now - max(started, self._progress_at)
            if self._stall_timeout is not None and idle_s >= self._stall_timeout:
                raise self._stall(operation, idle_s)
            if now - max(said_at, self._progress_at) >= STATUS_EVERY_S:
                said_at = now
                notice(
                    "waiting",
                    f"session {self.name!r}: waiting for {operation.name} for {now - started:.0f} "
                    f"s; the service last said: {self.link.seen}",
                    session=self.name,
                    seconds=round(now - started),
                )

    def close(self) -> None:
        """Takes no more calls and waits for none; what is not settled raises."""
        if self._closed:
            return
        self._closed = True
        for task in self._tasks:
            task.cancel()
        self._loop.run(self._drop_all())

    async def _submit_all(self) -> None:
        while True:
            operation = await self._called.get()
            async with self._submitting:
                self._sent.append(operation)
                if self._failed is None and not self._blocked:
                    await self._submit(operation)
                operation.tried = True
            self._arrived.set()

    async def _submit(self, operation: Operation) -> None:
        operation.finish = operation.error = None
        try:
            operation.finish = await operation.start(self.link)
        except Exception as error:
            operation.error = error
            self._blocked = True
        self._progress_at = time.monotonic()

    async def _settle_all(self) -> None:
        while True:
            while not self._sent or not self._sent[0].tried:
                self._arrived.clear()
                await self._arrived.wait()
            # In place until it is settled: a new session has to be given it.
            await self._settle(self._sent[0])
            self._sent.popleft()
            self._progress_at = time.monotonic()

    async def _settle(self, operation: Operation) -> None:
        while True:
            if self._failed is not None:
                operation.outcome.set_exception(self._refusal(operation))
                return
            try:
                if operation.error is not None:
                    raise operation.error
                assert operation.finish is not None, "what was in its way has failed or recovered"
                value = operation.settled(await operation.finish())
            except RemoteError as error:
                try:
                    if error.recoverable and await self._recovered(error):
                        continue
                except Exception as again:
                    self._fail(operation, again)
                else:
                    self._fail(operation, error)
                return
            except Exception as error:
                self._fail(operation, error)
                return
            else:
                if operation.changes and self._keeps:
                    self._changes.append(operation.start)
                operation.outcome.set_result(value)
                return

    def _fail(self, operation: Operation, error: Exception) -> None:
        self._failed = (operation.name, error)
        operation.outcome.set_exception(error)

    async def _recovered(self, error: RemoteError) -> bool:
        """Whether a new session has taken the place of the lost one and got all that is sent."""
        async with self._submitting:
            while self._recoveries_left > 0:
                self._recoveries_left -= 1
                checkpoint_id, with_optimizer = self._base
                self.note(
                    "recovering",
                    f"session {self.name!r} is lost ({error}); a new one begins from "
                    f"{checkpoint_id or 'the start'} and repeats {len(self._changes)} operations",
                    lost=self.link.session_id,
                    checkpoint=checkpoint_id,
                    operations=len(self._changes),
                    recoveries_left=self._recoveries_left,
                )
                try:
                    self.link = await self._reopen(checkpoint_id, with_optimizer)
                    for start in self._changes:
                        await (await start(self.link))()
                        self._progress_at = time.monotonic()
                except RemoteError as again:
                    if not again.recoverable:
                        raise
                    error = again
                    continue
                self._blocked = False
                for operation in self._sent:
                    if not self._blocked:
                        await self._submit(operation)
                return True
        return False

    def _refusal(self, operation: Operation) -> TunebookError:
        assert self._failed is not None
        name, failure = self._failed
        kind = BackendError
        if isinstance(failure, TunebookError) and not isinstance(failure, RemoteError):
            kind = type(failure)
        error = kind(
            f"session {self.name!r} refuses {operation.name}: its {name} failed before: {failure}"
        )
        error.__cause__ = failure
        return error

    def _stall(self, operation: Operation, idle_s: float) -> StalledError:
        error = StalledError(
            f"session {self.name!r}: nothing came back for {idle_s:.0f} s "
            f"(backend.stall_timeout) while waiting for {operation.name}; the service last said: "
            f"{self.link.seen}. It may still be at it, so nothing was sent again. Resume the run "
            "from its last checkpoint, or raise backend.stall_timeout"
        )
        self._failed = self._failed or (operation.name, error)
        return error

    async def _drop_all(self) -> None:
        while not self._called.empty():
            self._sent.append(self._called.get_nowait())
        for operation in self._sent:
            if not operation.outcome.done():
                operation.outcome.set_exception(
                    BackendError(
                        f"session {self.name!r} was closed before its {operation.name} was waited "
                        "for"
                    )
                )
        self._sent.clear()
