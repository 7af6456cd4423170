"""What all parts of the server share: settings, live records, queues, and who waits for what."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tunebook.serve.errors import ApiError, not_found
from tunebook.serve.faults import NO_FAULTS, FaultPlan
from tunebook.serve.monitoring import Monitor
from tunebook.serve.operations import Limits, Request
from tunebook.serve.rates import Limit, RateLimiter
from tunebook.serve.records import (
    CREATED_BY,
    ENDED_RESOURCE,
    Operation,
    Resource,
    ResourceStatus,
    Session,
    SessionStatus,
)
from tunebook.serve.store import Store

R = TypeVar("R", Resource, Session)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line decides."""

    model: str
    """As clients name it."""
    home: Path
    token: str | None
    """What clients must show; None = anything."""
    max_sessions: int = 5
    """Sessions of a LoRA resource at a time."""
    max_body_bytes: int = 64 * 2**20
    max_payload_bytes: int = 512 * 2**20
    max_queued: int = 1024
    """Operations of a session that wait or run."""
    inline_output_bytes: int = 2**20
    """Larger results are downloaded beside the operation."""
    poll_s: float = 20.0
    """How long a question is held open until there is something to say."""
    keep_s: float = 3600.0
    """How long payloads and large results can be fetched."""
    price_per_hour: float = 0.0
    """US dollars that an estimate names."""
    faults: FaultPlan = NO_FAULTS
    rates: Mapping[str, Limit] = field(default_factory=dict[str, Limit])
    now: Callable[[], float] = time.time


@dataclass(slots=True)
class Queued:
    """An operation that waits."""

    operation: Operation
    request: Request | None
    """None = to be read from the store."""
    since: float = field(default_factory=time.monotonic)
    alone: bool = False
    """It failed in a batch, and is tried by itself."""


@dataclass(slots=True)
class Lane:
    """What the worker has to do for a live session."""

    session: Session
    queue: deque[Queued] = field(default_factory=deque[Queued])
    num_running: int = 0
    due_at: float = 0.0
    """When it may be opened."""
    ending: SessionStatus | None = None
    """What the session is to become."""


class Waiters:
    """Wakes coroutines when something has changed; changes may come from any thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._events: dict[str, set[asyncio.Event]] = {}
        self._ending = False

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Takes the loop that the coroutines run on."""
        self._loop = loop

    def end(self) -> None:
        """Lets everybody go, now and later; may be called from any thread."""
        self._ending = True
        for key in list(self._events):
            self.notify(key)

    def notify(self, key: str) -> None:
        """Says that what `key` names has changed."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake, key)

    def _wake(self, key: str) -> None:
        for event in self._events.get(key, ()):
            event.set()

    async def until(self, key: str, reached: Callable[[], bool], *, timeout: float) -> None:
        """Returns when `reached` holds, or after a time.

        Args:
            key: what `notify` is called with when it may have changed.
            reached: asked at first and after every change.
            timeout: seconds.
        """
        event = asyncio.Event()
        self._events.setdefault(key, set()).add(event)
        try:
            async with asyncio.timeout(timeout):
                while not reached() and not self._ending:
                    event.clear()
                    await event.wait()
        except TimeoutError:
            return
        finally:
            self._events[key].discard(event)
            if not self._events[key]:
                del self._events[key]


class State:
    """The live part of what the store holds, in memory; guarded by `lock`."""

    def __init__(
        self, settings: Settings, store: Store, limits: Limits, head_targets: tuple[str, ...]
    ) -> None:
        """Reads what is live from the store.

        Args:
            settings: of the server.
            store: what it remembers.
            limits: of the model.
            head_targets: `target_modules` of an adapter that has the output head as well.
        """
        self.settings = settings
        self.store = store
        self.limits = limits
        self.head_targets = head_targets
        self.lock = threading.RLock()
        self.work = threading.Condition(self.lock)
        self.waiters = Waiters()
        self.monitor = Monitor()
        self._rates = RateLimiter(settings.rates)
        self.resources: dict[str, Resource] = {}
        """Those that have not ended, oldest first."""
        self.lanes: dict[str, Lane] = {}
        """Of sessions that hold something in the engine."""
        self.operations: dict[str, Operation] = {}
        """Those that have not ended."""
        live = [r for r in store.all(Resource) if r.status not in ENDED_RESOURCE]
        for resource in reversed(live):
            resource.last_activity = max(resource.last_activity, settings.now())
            self.resources[resource.id] = resource

    def resource(self, identity: str) -> Resource:
        """The resource with an id.

        Raises:
            ApiError: there is none.
        """
        found = self.resources.get(identity) or self.store.find(Resource, identity)
        if found is None:
            raise not_found("model resource", identity)
        return found

    def session(self, identity: str) -> Session:
        """The session with an id.

        Raises:
            ApiError: there is none.
        """
        lane = self.lanes.get(identity)
        found = lane.session if lane else self.store.find(Session, identity)
        if found is None:
            raise not_found("training session", identity)
        return found

    def check_rate(self, action: str, session_id: str | None = None) -> None:
        """Counts a call, if it is not one too many.

        Args:
            action: a key of `tunebook.serve.rates.HOSTED`.
            session_id: of the session it belongs to.

        Raises:
            ApiError: it is; the answer says how long to wait.
        """
        with self.lock:
            wait_s = self._rates.wait_s(
                action, project=CREATED_BY, session=session_id, now=time.monotonic()
            )
        if wait_s is not None:
            raise ApiError(
                429,
                f"too many calls of {action}; wait {wait_s:.2f} s",
                code="rate_limited",
                headers={
                    "retry-after": str(math.ceil(wait_s)),
                    "retry-after-ms": str(math.ceil(1000 * wait_s)),
                },
            )

    def save(self, record: Resource | Session) -> None:
        """Writes a changed record and says so."""
        record.updated_at = self.settings.now()
        if isinstance(record, Resource) and record.status in ENDED_RESOURCE:
            self.resources.pop(record.id, None)
        self.store.put(record)
        self.waiters.notify(record.id)

    def lanes_of(self, resource: Resource) -> list[Lane]:
        """Live sessions of a resource."""
        return [lane for lane in self.lanes.values() if lane.session.resources_id == resource.id]

    def touch(self, resource_id: str) -> None:
        """Notes that a resource is in use."""
        resource = self.resources.get(resource_id)
        if resource is not None and resource.status is ResourceStatus.READY:
            resource.last_activity = self.settings.now()
