"""The SDK, which is there only in an environment of its own."""

from __future__ import annotations

import sys
from typing import Any

from tunebook.errors import ConfigError

INSTALL = (
    "`pip install 'tunebook[baseten]'` in an environment of its own with Python 3.12 or newer, "
    "since the extras tinker and baseten do not go together"
)


def loops_sdk() -> Any:
    """The module `baseten.loops`.

    Raises:
        ConfigError: it is not installed, or cannot be on this Python.
    """
    if sys.version_info < (3, 12):
        raise ConfigError(
            f"backend=baseten needs Python 3.12 or newer, and this is "
            f"{sys.version_info.major}.{sys.version_info.minor}: {INSTALL}"
        )
    try:
        from baseten import loops
    except ImportError as error:
        raise ConfigError(f"backend=baseten needs the package baseten-loops: {INSTALL}") from error
    return loops


def set_patience(client: Any, seconds: float) -> None:
    """Sets how long the SDK sends a refused request of a training client again.

    It has one limit for a trainer or sampler that starts, which takes an hour, and for a request
    that is answered 400 because it is wrong, and no public way to change it after the start.

    Raises:
        ConfigError: another release of the SDK.
    """
    _look_inside(client, "_ready_timeout")
    client._ready_timeout = seconds


def leave_own_loop(client: Any) -> None:
    """Closes the connection that a training client has made its first request by.

    That is of an event loop of the SDK's own. Requests on another loop get another connection, and
    the SDK leaves the first one open then.

    Raises:
        ConfigError: another release of the SDK.
    """
    _look_inside(client, "_async_client")
    _look_inside(client, "_bridge")

    async def close() -> None:
        async with client._async_client as connections:
            await connections.aclose()

    client._bridge.run_sync(close())


def _look_inside(client: Any, name: str) -> None:
    if not hasattr(client, name):
        raise ConfigError(
            f"backend=baseten: this release of baseten-loops has no {type(client).__name__}."
            f"{name}; install baseten-loops==0.32.0"
        )
