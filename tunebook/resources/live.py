"""What a service that bills by the hour must answer: what is there, make one, stop one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tunebook.errors import BackendError


class ServiceError(BackendError):
    """A service that did not do what was asked, or could not be reached."""

    code = "service"
    category = "service"


class ReplyLost(ServiceError):
    """A request to create that may have been carried out: the reply never came."""

    code = "reply_lost"


class StillInUse(ServiceError):
    """A resource that was not stopped because sessions are active on it."""

    code = "in_use"


@dataclass(frozen=True, slots=True)
class LiveResource:
    """A resource that bills or is going to."""

    id: str
    state: str
    """The service's short name of it, for example READY."""
    what: Mapping[str, Any]
    """As far as the service says it, the description that it was created with."""
    created_at: str | None
    queue_position: int | None = None
    expires_at: str | None = None
    """When it stops by itself unless it is used."""

    def agrees_with(self, what: Mapping[str, Any]) -> bool:
        """Whether a create call with this description can have made it."""
        return _agrees(what, self.what)


class ResourceService(Protocol):
    """A service on which the caller has resources."""

    @property
    def name(self) -> str:
        """The name that `service_of` knows it by."""
        ...

    @property
    def base_url(self) -> str:
        """Its address, without a secret."""
        ...

    def list_live(self) -> list[LiveResource]:
        """The resources of the caller that bill or are going to.

        Raises:
            ServiceError: the service cannot be reached, or refuses.
        """
        ...

    def stop(self, resource_id: str, *, force: bool) -> None:
        """Stops a resource and waits until it no longer bills; one that is gone is no error.

        Args:
            resource_id: the resource.
            force: stop it with whatever sessions are active on it.

        Raises:
            StillInUse: sessions are active and `force` is False.
            ServiceError: it could not be stopped.
        """
        ...


class CreatingService(ResourceService, Protocol):
    """A service whose resources one request makes."""

    def create(self, what: Mapping[str, Any]) -> LiveResource:
        """Creates a resource by a request that is sent once, and does not wait until it is ready.

        Raises:
            ReplyLost: it may exist.
            ServiceError: it does not exist.
        """
        ...


def service_of(name: str, base_url: str | None) -> ResourceService:
    """The service of that name at an address; None = where it is unless the environment differs.

    Raises:
        ConfigError: its package or its key is missing.
    """
    if name == "baseten":
        from tunebook.backends.baseten.service import BasetenService

        return BasetenService(base_url)
    assert name == "together", name
    from tunebook.backends.together.service import TogetherService

    return TogetherService(base_url)


def services_of_environment() -> list[tuple[str, str]]:
    """Names and addresses of the services that the environment has a key or an address of."""
    from tunebook.backends.baseten import service as baseten
    from tunebook.backends.together import service as together

    return [
        (name, module.service_url(None))
        for name, module in (("together", together), ("baseten", baseten))
        if os.environ.get(module.KEY_VARIABLE) or os.environ.get(module.URL_VARIABLE)
    ]


def _agrees(asked: Any, found: Any) -> bool:
    """Whether all that was asked for, and that the service tells, is as it was asked for."""
    if isinstance(asked, Mapping) and isinstance(found, Mapping):
        return all(_agrees(value, found[key]) for key, value in asked.items() if key in found)
    return asked is None or asked == found
