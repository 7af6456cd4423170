"""Where a service is, and the key for it."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from tunebook.errors import ConfigError
from tunebook.runs.redaction import redact

NO_KEY = "none"
"""What most servers on this machine can be sent where there is no key."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def checked_address(base_url: str | None, *, variable: str, hosted: str) -> str:
    """The address of a service, without a `/` at its end.

    Args:
        base_url: None = that of the environment, else the hosted service.
        variable: of the environment.
        hosted: where the hosted service is.

    Raises:
        ConfigError: it is no http address, or holds a user or a password.
    """
    url = (base_url or os.environ.get(variable) or hosted).rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        # What stands before an @ may be a key, of any shape.
        shown = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        raise ConfigError(
            f"backend.base_url={redact(shown, os.environ)}: has to be http(s)://HOST[:PORT], "
            "without a user or password before the host"
        )
    return url


def key_for(address: str, *, variable: str, no_key: str = NO_KEY) -> str:
    """The API key of the environment; a server on this machine needs none.

    Args:
        address: of the service.
        variable: of the environment.
        no_key: what a server on this machine is sent where there is none.

    Raises:
        ConfigError: there is no key.
    """
    key = os.environ.get(variable)
    if key:
        return key
    if urlsplit(address).hostname in LOOPBACK:
        return no_key
    raise ConfigError(f"{variable} is not set, which holds the key for {address}")
