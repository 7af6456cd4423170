"""The model resource that sessions train on: made and stopped, or borrowed and left alone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunebook.backends.remote.failures import Duty, RemoteError
from tunebook.backends.remote.loop import LoopThread
from tunebook.backends.together.failures import DUTIES, translated
from tunebook.backends.together.service import TogetherService
from tunebook.errors import BackendError
from tunebook.notices import Notes
from tunebook.resources import Ledger, owned_resource

if TYPE_CHECKING:
    from together import AsyncTogether

PREFIX = "MODEL_RESOURCES_STATUS_"
READY, WAITING = "READY", ("PENDING", "CREATING")
FIRST_LOOK_S, LAST_LOOK_S = 0.2, 10.0
"""Seconds between two looks at a resource that is not ready yet, at first and in the end."""
SHORTEST_EXTENSION_S, LONGEST_EXTENSION_S = 60, 86_400


@dataclass(frozen=True, slots=True)
class ResourceSettings:
    """What a resource is asked for, and how long it may take."""

    service: TogetherService
    borrowed_id: str | None
    """Attach to this one; None = make one."""
    what: Mapping[str, Any]
    """The arguments of the create call but `lora_enabled`."""
    inactive_timeout: int
    """Seconds."""
    ready_timeout: float | None
    """Seconds; None = without end."""
    keep_alive: float
    """Seconds without an operation during which the resource is kept from expiring."""
    price: tuple[float, str] | None
    """An hour of it, and the currency; None = not known."""


class ModelResource:
    """One resource, from when it is first needed until `close`."""

    def __init__(
        self, settings: ResourceSettings, client: AsyncTogether, loop: LoopThread, notes: Notes
    ) -> None:
        self._settings = settings
        self._client = client
        self._loop = loop
        self._notes = notes
        self._stack = ExitStack()
        self._run: str | None = None
        self.lora: bool | None = None
        """Whether it trains adapters; None = not known yet."""
        self._used_at = time.monotonic()
        self._replacing = asyncio.Lock()
        self._closed = threading.Event()
        self._changing = threading.Lock()
        """A resource is made in one thread while the backend may be closed in another."""
        self.id: str | None = None
        """None = it is not there (yet)."""
        self.has_generator = False

    def require(self, *, lora: bool, run: str) -> str:
        """Id of the resource, ready for adapters or for the full weights.

        Args:
            lora: for adapters.
            run: what it is for.

        Raises:
            RemoteError: it does not become ready; it is stopped again if it is ours.
            BackendError: it is for the other kind of training.
        """
        if self.id is None:
            self._run, self.lora = run, lora
            self._open()
        if lora != self.lora:
            raise BackendError(
                f"resource {self.id} trains {'adapters' if self.lora else 'full weights'} only, "
                f"so lora={'an adapter' if lora else 'null'} needs another one"
            )
        assert self.id is not None
        return self.id

    def touch(self) -> None:
        """Notes that the resource was used."""
        self._used_at = time.monotonic()

    async def replace(self, lost_id: str) -> None:
        """Sees that there is a ready resource where one may be lost; called on the loop.

        Raises:
            RemoteError: it is not ours to replace, or the new one does not become ready.
        """
        async with self._replacing:
            if self.id is not None:  # else the one before was given up, and no new one came up
                if self.id != lost_id:
                    return
                status = await self._status(lost_id)
                if status == READY:
                    return
                if self._settings.borrowed_id is not None:
                    raise RemoteError(
                        f"the borrowed resource {lost_id} is {status}",
                        code="RESOURCE_LOST",
                        duty=Duty("service", False, "Attach to another one and resume the run"),
                    )
                self._notes.add("resource_lost", f"resource {lost_id} is {status}")
            await self._loop.wait_for_thread(self._replace)

    async def renew(self) -> None:
        """Makes a new resource in place of this one, whatever its state; called on the loop.

        Raises:
            BackendError: it is not ours to replace.
        """
        if self._settings.borrowed_id is not None:
            raise BackendError(
                f"the borrowed resource {self.id} has trained full weights, and a checkpoint of "
                "them can be loaded on a new resource only; use backend.model_resources_id=null"
            )
        async with self._replacing:
            await self._loop.wait_for_thread(self._replace)

    def close(self) -> None:
        """Stops the resource if it is ours; else leaves it as it is.

        One that is being made in place of a lost one is stopped by the thread that makes it.
        """
        with self._changing:
            self._closed.set()
            self.id = None
        self._stack.close()
        self._notes.say()

    def _replace(self) -> None:
        self.id = None
        self._stack.close()
        self._open()

    def _open(self) -> None:
        settings = self._settings
        self._check_open()
        with ExitStack() as stack:
            if settings.borrowed_id is not None:
                resource_id = settings.borrowed_id
            else:
                price, currency = settings.price or (None, None)
                resource_id = stack.enter_context(
                    owned_resource(
                        Ledger.of_user(),
                        settings.service,
                        {**settings.what, "lora_enabled": self.lora},
                        run=self._run,
                        say=lambda text: self._say(text),
                        price_per_hour=price,
                        currency=currency,
                    )
                )
            found = self._wait_until_ready(resource_id)
            self.lora = found.lora_enabled
            self.has_generator = found.compute_config.num_generator_replicas > 0
            stack.enter_context(self._kept_alive(resource_id))
            with self._changing:
                self._check_open()
                self._stack, self.id = stack.pop_all(), resource_id

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise BackendError("this backend is closed")

    def _wait_until_ready(self, resource_id: str) -> Any:
        """The resource, once it is ready; says each change of its state and place in the queue."""
        started = time.monotonic()
        said, look_s = "", FIRST_LOOK_S
        while True:
            found = self._loop.run(self._retrieve(resource_id))
            state = found.status.removeprefix(PREFIX)
            position = found.status_details.queue_position if found.status_details else None
            waited_s = time.monotonic() - started
            text = state if position is None else f"{state}, place {position} in the queue"
            if text != said:
                said = text
                self._say(f"resource {resource_id} is {text}", seconds=round(waited_s))
            if state == READY:
                return found
            if state not in WAITING:
                raise _not_ready(resource_id, state, found.error)
            timeout = self._settings.ready_timeout
            if timeout is not None and waited_s >= timeout:
                raise RemoteError(
                    f"resource {resource_id} is {text} after {waited_s:.0f} s",
                    code="not_ready",
                    duty=Duty(
                        "capacity",
                        False,
                        "Raise backend.ready_timeout, or null to wait without end",
                    ),
                )
            self._closed.wait(look_s)
            self._check_open()
            look_s = min(2 * look_s, LAST_LOOK_S)

    async def _retrieve(self, resource_id: str) -> Any:
        with translated(f"resource {resource_id}"):
            return await self._client.post_training.model_resources.retrieve(resource_id)

    async def _status(self, resource_id: str) -> str:
        return (await self._retrieve(resource_id)).status.removeprefix(PREFIX)

    @contextmanager
    def _kept_alive(self, resource_id: str) -> Iterator[None]:
        """Keeps the resource from expiring while nothing is asked of it, as in a long rollout."""
        if not self._settings.keep_alive:
            yield
            return
        task: Future[None] = self._loop.start(self._keep_alive(resource_id))
        try:
            yield
        finally:
            task.cancel()

    async def _keep_alive(self, resource_id: str) -> None:
        every_s = self._settings.inactive_timeout / 3
        seconds = min(
            max(self._settings.inactive_timeout, SHORTEST_EXTENSION_S), LONGEST_EXTENSION_S
        )
        while True:
            await asyncio.sleep(every_s)
            if not every_s <= time.monotonic() - self._used_at <= self._settings.keep_alive:
                continue
            try:
                with translated(f"resource {resource_id}"):
                    await self._client.post_training.model_resources.extend_expiry(
                        resource_id, seconds=seconds
                    )
            except RemoteError as error:
                self._notes.add("keep_alive_failed", f"resource {resource_id} may expire: {error}")

    def _say(self, text: str, **fields: Any) -> None:
        self._notes.add("resource", text, **fields)
        if not self._replacing.locked():  # else whoever waits says it
            self._notes.say()


def _not_ready(resource_id: str, state: str, error: Any) -> RemoteError:
    said = f": {error.code}: {error.message}" if error is not None else ""
    return RemoteError(
        f"resource {resource_id} is {state}{said}",
        code="RESOURCE_LOST",
        duty=DUTIES["RESOURCE_LOST"],
    )
