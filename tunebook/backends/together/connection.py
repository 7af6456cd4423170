"""What the open sessions of a backend share: the loop, the client, the resource."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from tunebook.backends.remote.failures import RemoteError
from tunebook.backends.remote.loop import LoopThread
from tunebook.backends.together.adapters import lora_config
from tunebook.backends.together.failures import DUTIES, translated
from tunebook.backends.together.link import TogetherLink
from tunebook.backends.together.resource import ModelResource, ResourceSettings
from tunebook.backends.together.service import api_key_for
from tunebook.notices import Notes
from tunebook.types import LoraConfig

RUNNING = "TRAINING_SESSION_STATUS_RUNNING"
STARTING = ("TRAINING_SESSION_STATUS_CREATING",)
ENDED = (
    "TRAINING_SESSION_STATUS_STOPPED", "TRAINING_SESSION_STATUS_ERROR",
    "TRAINING_SESSION_STATUS_EXPIRED",
)  # fmt: skip
SESSION_TIMEOUT_S = 3600.0
STOP_TIMEOUT_S = 300.0
LOOK_S = 0.2
REQUEST_TIMEOUT_S = 300.0
MAX_CONNECTIONS = 256
RETRY_HEADER = "x-stainless-retry-count"
"""How often the SDK has sent a request before."""
FIRST_DELAYS = (0.75, 1.5, 3.0, 6.0)
LONGEST_DELAY = 7.5
"""Seconds that the SDK waits at least before its first retries, and before each further one."""


class Connection:
    """The loop, the client and the resource that open sessions share."""

    def __init__(self, settings: ResourceSettings, *, retry_budget: float) -> None:
        base_url = settings.service.base_url
        self.notes = Notes()
        self.loop = LoopThread()
        self._retry_budget = retry_budget
        self._num_retries = 0
        self._client = self.loop.run(
            _open_client(base_url, retries_within(retry_budget), self._count_retry)
        )
        self.resource = ModelResource(settings, self._client, self.loop, self.notes)

    async def open_link(
        self, name: str, lora: LoraConfig | None, checkpoint_id: str | None, with_optimizer: bool
    ) -> TogetherLink:
        """A running session on the resource.

        Raises:
            RemoteError: the service has no place for it, or it does not run.
        """
        resource_id = self.resource.id
        if resource_id is None:  # another session is replacing it, or could not
            raise RemoteError(
                f"session {name!r}: the resource is lost, and no other one is ready",
                code="RESOURCE_LOST",
                duty=DUTIES["RESOURCE_LOST"],
            )
        from together import omit

        wanted: dict[str, Any] = {
            "model_resources_id": resource_id,
            # Its own, so that it is found again where the reply is lost.
            "display_name": f"{name} {uuid.uuid4().hex[:12]}",
            "lora_config": omit if lora is None else lora_config(lora),
        }
        if checkpoint_id is not None:
            wanted["resume_from_checkpoint_id"] = checkpoint_id
            wanted["load_optimizer"] = with_optimizer
        with translated(f"session {name!r}"):
            session = await self._create(wanted)
            try:
                await self._wait_until_running(session)
            except BaseException:
                await self.stop_session(session.id)
                raise
        return TogetherLink(
            self._client,
            session.id,
            resource_id,
            has_generator=self.resource.has_generator,
            used=self.resource.touch,
        )

    async def stop_session(self, session_id: str) -> None:
        """Stops a session and waits until its place is free; notes it where that fails."""
        sessions = self._client.post_training.sessions
        give_up_at = time.monotonic() + STOP_TIMEOUT_S
        try:
            with translated(f"stop of session {session_id}"):
                status = (await sessions.stop(session_id)).status
                while status not in ENDED and time.monotonic() < give_up_at:
                    await asyncio.sleep(LOOK_S)
                    status = (await sessions.retrieve(session_id)).status
        except RemoteError as error:
            if error.code != "session_not_active":
                self.notes.add("session_not_stopped", f"session {session_id} is left: {error}")

    async def _count_retry(self, request: Any) -> None:
        if int(request.headers.get(RETRY_HEADER, 0)) > 0:
            self._num_retries += 1

    def say(self) -> None:
        """Says what was noted, how many requests were sent again among it."""
        if self._num_retries:
            self.notes.add(
                "retries",
                f"{self._num_retries} requests were sent again",
                shown=False,
                count=self._num_retries,
            )
            self._num_retries = 0
        self.notes.say()

    def close(self) -> None:
        """Stops or leaves the resource, then ends all connections."""
        try:
            self.resource.close()
        finally:
            self.loop.run(self._client.close())
            self.loop.close()

    async def _create(self, wanted: dict[str, Any]) -> Any:
        """A new session, by requests that cannot make two: they carry no idempotency key."""
        from together import APIConnectionError, InternalServerError, RateLimitError

        sessions = self._client.with_options(max_retries=0).post_training.sessions
        give_up_at = time.monotonic() + self._retry_budget
        delays = iter(FIRST_DELAYS)
        while True:
            try:
                return await sessions.create(**wanted)
            except (RateLimitError, APIConnectionError, InternalServerError) as error:
                response = getattr(error, "response", None)
                delay = _retry_after(response) or next(delays, LONGEST_DELAY)
                if time.monotonic() + delay > give_up_at or _is_final(response):
                    raise
                await asyncio.sleep(delay)
                if not isinstance(error, RateLimitError):
                    found = await self._find(wanted["model_resources_id"], wanted["display_name"])
                    if found is not None:
                        return found

    async def _find(self, resource_id: str, display_name: str) -> Any:
        """The session of a name; None = there is none."""
        page = await self._client.post_training.sessions.list(
            model_resources_id=resource_id, limit=100
        )
        return next((each for each in page.data or [] if each.display_name == display_name), None)

    async def _wait_until_running(self, session: Any) -> None:
        give_up_at = time.monotonic() + SESSION_TIMEOUT_S
        while session.status in STARTING and time.monotonic() < give_up_at:
            await asyncio.sleep(LOOK_S)
            session = await self._client.post_training.sessions.retrieve(session.id)
        if session.status == RUNNING:
            return
        code = getattr(session.error, "code", None) or ""
        said = getattr(session.error, "message", None) or "no reason given"
        kind = "AT_CAPACITY" if code.endswith("AT_CAPACITY") else "SESSION_NOT_ACTIVE"
        raise RemoteError(
            f"session {session.id} is {session.status.rpartition('_')[2]}: {said} ({code})",
            code=kind,
            duty=DUTIES[kind],
        )


def retries_within(budget: float) -> int:
    """Retries that take the SDK at least so many seconds, as far as nothing tells it to wait."""
    count, left = 0, budget
    while left > 0:
        left -= FIRST_DELAYS[count] if count < len(FIRST_DELAYS) else LONGEST_DELAY
        count += 1
    return count


async def _open_client(
    base_url: str, max_retries: int, on_request: Callable[[Any], Awaitable[None]]
) -> Any:
    """The SDK's client on the loop that this runs on."""
    import httpx
    import together.post_training  # noqa: F401  (its import makes long token lists fast to send)
    from together import AsyncTogether, DefaultAsyncHttpxClient

    return AsyncTogether(
        api_key=api_key_for(base_url),
        base_url=base_url,
        timeout=httpx.Timeout(REQUEST_TIMEOUT_S),
        max_retries=max_retries,
        http_client=DefaultAsyncHttpxClient(
            limits=httpx.Limits(
                max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS
            ),
            event_hooks={"request": [on_request]},
        ),
    )


def _retry_after(response: Any) -> float | None:
    """Seconds that an answer asks to wait; None = it does not."""
    if response is None:
        return None
    for header, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            return max(0.0, float(response.headers[header]) * unit)
        except (KeyError, ValueError):
            continue
    return None


def _is_final(response: Any) -> bool:
    return response is not None and response.headers.get("x-should-retry") == "false"
