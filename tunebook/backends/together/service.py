"""Together AI's model resources, as the ledger and `tunebook resources` need them."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tunebook.backends.remote.address import checked_address, key_for
from tunebook.errors import ConfigError
from tunebook.resources.live import LiveResource, ReplyLost, ServiceError, StillInUse
from tunebook.runs.redaction import redact

if TYPE_CHECKING:
    from together import Together
    from together.types.post_training.model_resources import ModelResources

KEY_VARIABLE = "TOGETHER_API_KEY"
URL_VARIABLE = "TOGETHER_BASE_URL"
HOSTED_URL = "https://api.together.ai"
STATUS_PREFIX = "MODEL_RESOURCES_STATUS_"
LIVE_STATES = ("PENDING", "CREATING", "READY")
"""In the order in which a resource goes through them, so that asking for one after the other
misses none that moves on meanwhile."""
PAGE = 100
MAX_RETRIES = 4
TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 300.0
STOP_INTERVAL_S = 1.0
RATE_LIMIT_BUDGET_S = 180.0
"""Seconds that a create call may wait in all for the service to take it."""


class TogetherService:
    """The model resources of whoever owns the API key; asks nothing until it is asked."""

    name = "together"

    def __init__(self, base_url: str | None = None) -> None:
        """
        Args:
            base_url: without `/v1`; None = `TOGETHER_BASE_URL`, else the hosted service.

        Raises:
            ConfigError: the package or the key is missing, or the address is none.
        """
        self.base_url = service_url(base_url)
        api_key_for(self.base_url)
        _sdk()

    def list_live(self) -> list[LiveResource]:
        """See `ResourceService.list_live`."""
        live: dict[str, LiveResource] = {}
        with self._client() as client:
            for state in LIVE_STATES:
                for resource in _pages(client, state):
                    live[resource.id] = _live(resource)
        return sorted(live.values(), key=lambda resource: resource.created_at or "")

    def create(self, what: Mapping[str, Any]) -> LiveResource:
        """See `ResourceService.create`; `what` holds the arguments of the SDK's create call."""
        from together import APIConnectionError, InternalServerError, RateLimitError

        arguments: dict[str, Any] = {key: value for key, value in what.items() if value is not None}
        give_up_at = time.monotonic() + RATE_LIMIT_BUDGET_S
        with self._client() as client:
            resources = client.with_options(max_retries=0).post_training.model_resources
            while True:
                try:
                    return _live(resources.create(**arguments))
                except RateLimitError as error:
                    wait_s = _retry_after_s(error.response.headers)
                    if time.monotonic() + wait_s > give_up_at:
                        raise
                    time.sleep(wait_s)
                except (APIConnectionError, InternalServerError) as error:
                    raise ReplyLost(
                        f"{self.base_url}: it is not known whether the resource was created: "
                        f"{_reason(error)}"
                    ) from error

    def stop(self, resource_id: str, *, force: bool) -> None:
        """See `ResourceService.stop`."""
        from together import BadRequestError, NotFoundError, omit

        with self._client() as client:
            resources = client.post_training.model_resources
            try:
                status = resources.stop(resource_id, force=force or omit).status
            except NotFoundError:
                return
            except BadRequestError as error:
                # Also the answer where it has stopped or failed already.
                status = resources.retrieve(resource_id).status
                if _short(status) in LIVE_STATES:
                    raise StillInUse(
                        f"{self.base_url} does not stop {resource_id}: {_reason(error)}. "
                        "`tunebook resources stop --force` stops it with its sessions."
                    ) from error
            give_up_at = time.monotonic() + STOP_TIMEOUT_S
            while _short(status) in LIVE_STATES:
                if time.monotonic() > give_up_at:
                    raise ServiceError(
                        f"{self.base_url}: {resource_id} is {_short(status)} still, "
                        f"{STOP_TIMEOUT_S:g} s after it was stopped"
                    )
                time.sleep(STOP_INTERVAL_S)
                try:
                    status = resources.retrieve(resource_id).status
                except NotFoundError:
                    return

    @contextmanager
    def _client(self) -> Iterator[Together]:
        with make_client(self.base_url) as client, service_errors(self.base_url):
            yield client


def service_url(base_url: str | None) -> str:
    """The address of the service; see `tunebook.backends.remote.address.checked_address`."""
    return checked_address(base_url, variable=URL_VARIABLE, hosted=HOSTED_URL)


def api_key_for(base_url: str) -> str:
    """The API key; see `tunebook.backends.remote.address.key_for`."""
    return key_for(base_url, variable=KEY_VARIABLE)


def make_client(base_url: str) -> Together:
    """The SDK's client for calls that may be repeated; close it after use."""
    return _sdk().Together(
        api_key=api_key_for(base_url),
        base_url=base_url,
        timeout=TIMEOUT_S,
        max_retries=MAX_RETRIES,
    )


@contextmanager
def service_errors(base_url: str) -> Iterator[None]:
    """Turns an error of the SDK's client into a `ServiceError` that says what to do."""
    from together import (
        APIConnectionError,
        APIError,
        AuthenticationError,
        PermissionDeniedError,
    )

    try:
        yield
    except (AuthenticationError, PermissionDeniedError) as error:
        raise ServiceError(
            f"{base_url} refuses the key in {KEY_VARIABLE}: {_reason(error)}"
        ) from error
    except APIConnectionError as error:
        raise ServiceError(f"{base_url} cannot be reached: {_reason(error)}") from error
    except APIError as error:
        raise ServiceError(f"{base_url}: {_reason(error)}") from error


def _sdk() -> Any:
    try:
        import together
    except ImportError as error:
        raise ConfigError(
            "backend=together needs the package together; `pip install 'tunebook[together]'`"
        ) from error
    return together


def _pages(client: Together, state: str) -> Iterator[ModelResources]:
    """The caller's resources in one state; the service refuses a request for several."""
    from together import omit

    after: str | None = None
    while True:
        page = client.post_training.model_resources.list(
            created_by="me",
            limit=PAGE,
            status=[STATUS_PREFIX + state],  # pyright: ignore[reportArgumentType]
            after=after or omit,
        )
        yield from page.data or []
        after = page.meta.next_cursor if page.meta else None
        if not (page.data and after and page.meta.has_more):
            return


def _live(resource: ModelResources) -> LiveResource:
    compute = resource.compute_config
    details = resource.status_details
    return LiveResource(
        id=resource.id,
        state=_short(resource.status),
        what={
            "base_model": resource.base_model,
            "lora_enabled": resource.lora_enabled,
            "inactive_timeout": resource.inactive_timeout,
            "compute_config": {
                "num_generator_replicas": compute.num_generator_replicas,
                "gpu_type": compute.gpu_type,
            },
        },
        created_at=_moment(resource.created_at),
        queue_position=details.queue_position if details else None,
        expires_at=_moment(resource.expires_at),
    )


def _moment(value: Any) -> str | None:
    """A time as text; the SDK leaves one that it cannot parse as it came."""
    return value.isoformat() if hasattr(value, "isoformat") else value


def _short(status: str) -> str:
    return status.removeprefix(STATUS_PREFIX)


def _reason(error: Exception) -> str:
    """What an error says, with its cause where it says nothing itself."""
    cause = error.__cause__
    text = f"{error}" + (f" ({cause})" if cause is not None and str(cause) else "")
    return redact(text, os.environ)


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """Seconds to wait after a refusal for its rate; not the same for all that were refused."""
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            wait_s = float(headers.get(name) or "") * unit_s
        except ValueError:
            continue
        return wait_s * random.uniform(1.0, 1.1)
    return random.uniform(1.0, 10.0)
