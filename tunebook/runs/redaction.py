"""Keeps secrets out of everything a run writes, prints or sends to a tracker."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

REDACTED = "[redacted]"

MIN_SECRET_LENGTH = 8
"""Characters; a shorter value of a secret-looking variable would match ordinary words."""

_SECRET_NAME = re.compile(
    r"(?:^|_)(?:\w*APIKEY|KEYS?|TOKENS?|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|CREDENTIALS?)(?:_|$)"
)
_NO_SECRET_NAME = re.compile(r"_(?:PATH|FILE|DIR|NAME|ID|URL|HOST|PORT)$")
_SECRET_CONFIG_KEY = re.compile(
    r"(?:^|_)(?:token|secret|password|passwd|passphrase|credentials?|apikey)$"
    r"|(?:api|access|private|secret|auth)_?(?:key|token)$"
)
_NO_SECRET_CONFIG_KEY = re.compile(r"^(?:bos|eos|pad|unk|sep|cls|mask|stop|end)_token$")

_SHAPES = (
    re.compile(r"(?<![A-Za-z0-9])hf_[A-Za-z0-9]{16,}"),
    re.compile(r"(?<![A-Za-z0-9])sk-[A-Za-z0-9_-]{16,}"),
    re.compile(r"(?<![A-Za-z0-9])tgp_[A-Za-z0-9_-]{16,}"),
    re.compile(r"(?<![A-Za-z0-9])tml-[A-Za-z0-9_-]{16,}"),
    re.compile(r"(?<![A-Za-z0-9])wandb_v\d+_[A-Za-z0-9_-]{16,}"),
    re.compile(r"(?<![A-Za-z0-9])(?:gh[pousr]_|github_pat_)[A-Za-z0-9_]{16,}"),
    re.compile(r"(?<![A-Za-z0-9])AKIA[A-Z0-9]{16}(?![A-Za-z0-9])"),
)
_HEX_KEY = re.compile(
    r"(?i)((?:wandb|key|token|secret|password|login)[^\n]{0,40}?)(?<![0-9a-z])[0-9a-f]{40}(?![0-9a-z])"
)
"""Forty hex digits are a W&B key or a git commit; only next to such a word they are a key."""
_BEARER = re.compile(r"(?i)(bearer\s+)[A-Za-z0-9._~+/=-]{8,}")
_URL_PASSWORD = re.compile(r"(?<=://)([^\s/:@]+):[^\s/@]+@")


def secrets_in(environ: Mapping[str, str]) -> list[str]:
    """Values of the variables whose names look secret, the longest first."""
    values = {
        value
        for name, value in environ.items()
        if len(value) >= MIN_SECRET_LENGTH
        and _SECRET_NAME.search(name.upper())
        and not _NO_SECRET_NAME.search(name.upper())
    }
    return sorted(values, key=lambda value: (-len(value), value))


def redact(text: str, environ: Mapping[str, str]) -> str:
    """The text with every secret of the environment, and every well-known key, replaced."""
    for secret in secrets_in(environ):
        text = text.replace(secret, REDACTED)
    for shape in _SHAPES:
        text = shape.sub(REDACTED, text)
    text = _HEX_KEY.sub(rf"\1{REDACTED}", text)
    text = _BEARER.sub(rf"\1{REDACTED}", text)
    return _URL_PASSWORD.sub(rf"\1:{REDACTED}@", text)


def redact_values(value: Any, environ: Mapping[str, str]) -> Any:
    """The same nested value with every string in it redacted, keys included."""
    if isinstance(value, str):
        return redact(value, environ)
    if isinstance(value, Mapping):
        return {
            redact_values(key, environ): redact_values(item, environ) for key, item in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [redact_values(item, environ) for item in value]
    return value


def redact_config(config: Any, environ: Mapping[str, str]) -> Any:
    """A configuration with its strings redacted, and whole values under keys such as `api_key`.

    An interpolation (`${oc.env:NAME}`) is a reference to a secret, not one, and stays.
    """
    if isinstance(config, Mapping):
        return {
            key: REDACTED if _holds_secret(key, item) else redact_config(item, environ)
            for key, item in config.items()
        }
    if isinstance(config, Sequence) and not isinstance(config, str | bytes | bytearray):
        return [redact_config(item, environ) for item in config]
    return redact_values(config, environ)


def _holds_secret(key: Any, value: Any) -> bool:
    name = str(key).lower()
    return (
        isinstance(value, str)
        and bool(value)
        and not value.startswith("${")
        and bool(_SECRET_CONFIG_KEY.search(name))
        and not _NO_SECRET_CONFIG_KEY.search(name)
    )
