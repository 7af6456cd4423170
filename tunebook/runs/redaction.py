"""Keeps secrets out of everything a run writes, prints or sends to a tracker."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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

# Shapes that cannot be a path or the name of a model: what a run is resumed from has to survive.
_ALONE = r"(?![A-Za-z0-9_-])"
_SHAPES = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"hf_[A-Za-z0-9]{30,}"
    r"|gh[pousr]_[A-Za-z0-9]{36,}"
    r"|AKIA[A-Z0-9]{16}(?![A-Za-z0-9])"
    rf"|sk-(?:or-v\d+-)?(?:[0-9a-f]{{32}}|[0-9a-f]{{48}}|[0-9a-f]{{64}}){_ALONE}"
    r")"
)
_MIXED_SHAPES = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"(?:sk-(?:ant|proj|svcacct|admin)-|tgp_v\d+_|wandb_v\d+_|github_pat_)[A-Za-z0-9_-]{30,}"
    rf"|(?:sk-|tml-|tgp_)[A-Za-z0-9]{{20,}}{_ALONE}"
    r")"
)
"""Keys only if they mix digits, small and capital letters, as hyphenated words do not."""
_HEX_KEY = re.compile(
    r"(?i)((?<![a-z])(?:wandb|(?:api)?key|token|secret|password|login)(?:\s+is)?[\s\"':=]{1,5})"
    r"[0-9a-f]{40}(?![0-9a-z])"
)
"""Forty hex digits are a W&B key or a git commit; only right behind such a word they are a key."""
_BEARER = re.compile(r"(?i)(bearer\s+)(?=\S*\d)[A-Za-z0-9._~+/=-]{12,}")
_SIGNED = re.compile(
    r"(?i)([?&](?:X-(?:Amz|Goog)-(?:Signature|Credential|Security-Token)|AWSAccessKeyId|Signature"
    r"|Key-Pair-Id|sig)=)[^\s&#\"'<>]+"
)
"""What signs an address, so that whoever has it can read the file, without a key of their own."""
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
    """The text with every secret of the environment, and all that looks like a key, replaced."""
    text = _without_certain_secrets(text, environ)
    text = _SIGNED.sub(rf"\1{REDACTED}", text)
    return _BEARER.sub(rf"\1{REDACTED}", text)


def contains_secret(text: str, environ: Mapping[str, str]) -> bool:
    """Whether `config.yaml` would not hold this text as it is, so that no run could resume."""
    return _without_certain_secrets(text, environ) != text


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
    """A configuration with its secrets replaced, and whole values under keys such as `api_key`.

    A run is resumed from it, so what could be a path, a model or a prompt stays. An interpolation
    (`${oc.env:NAME}`) is a reference to a secret, not one, and stays too.
    """
    if isinstance(config, Mapping):
        return {
            key: REDACTED if _holds_secret(key, item) else redact_config(item, environ)
            for key, item in config.items()
        }
    if isinstance(config, Sequence) and not isinstance(config, str | bytes | bytearray):
        return [redact_config(item, environ) for item in config]
    return _without_certain_secrets(config, environ) if isinstance(config, str) else config


class RedactingOutput(io.TextIOWrapper):
    """A stream that redacts what is written to it, a write at a time."""

    def write(self, text: str, /) -> int:
        super().write(redact(text, os.environ))
        return len(text)


@contextmanager
def redacted_output() -> Iterator[None]:
    """Redacts for a block what this process prints, unless a person reads it on a terminal."""
    before = sys.stdout, sys.stderr
    redacting = [
        RedactingOutput(each.buffer, encoding="utf-8", errors="replace", line_buffering=True)
        if isinstance(each, io.TextIOWrapper) and not each.isatty()
        else each
        for each in before
    ]
    sys.stdout, sys.stderr = redacting
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for each in redacting:
            if isinstance(each, RedactingOutput):
                each.detach()  # else the stream would be closed with it


def _without_certain_secrets(text: str, environ: Mapping[str, str]) -> str:
    for secret in secrets_in(environ):
        text = text.replace(secret, REDACTED)
    text = _SHAPES.sub(REDACTED, text)
    text = _MIXED_SHAPES.sub(lambda found: REDACTED if _mixes(found[0]) else found[0], text)
    text = _HEX_KEY.sub(rf"\1{REDACTED}", text)
    return _URL_PASSWORD.sub(rf"\1:{REDACTED}@", text)


def _mixes(key: str) -> bool:
    """Whether a key mixes digits, small and capital letters behind its prefix."""
    body = re.split("[-_]", key, maxsplit=1)[1]
    return all(re.search(kind, body) for kind in ("[0-9]", "[a-z]", "[A-Z]"))


def _holds_secret(key: Any, value: Any) -> bool:
    name = str(key).lower()
    return (
        isinstance(value, str)
        and bool(value)
        and not value.startswith("${")
        and bool(_SECRET_CONFIG_KEY.search(name))
        and not _NO_SECRET_CONFIG_KEY.search(name)
    )
