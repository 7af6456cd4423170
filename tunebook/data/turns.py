"""What the formats share: how a source is read, and the turns that a column holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tunebook.config import Mask, RowFormat
from tunebook.data.json_values import BadRow, type_name
from tunebook.data.messages import Message, normalise_messages
from tunebook.data.rows import Kind

LIST_KEYS = ("messages", "conversations")


@dataclass(frozen=True, slots=True)
class Reading:
    """How the rows of one source are read."""

    key: str
    """Where the source stands in the config, for messages."""
    kind: Kind
    format: RowFormat
    source: int
    mask: Mask
    system_prompt: str | None
    id_column: str | None
    group_column: str | None
    unread: Counter[str] = field(default_factory=Counter)
    """Counts message keys that nothing reads."""


@dataclass(slots=True)
class Content:
    """What a format makes of a row."""

    messages: list[Message]
    chosen: list[Message] = field(default_factory=list)
    rejected: list[Message] = field(default_factory=list)
    num_prompt: int | None = None
    plain: bool = False
    group: str | None = None
    used: tuple[str, ...] = ()


def turns_of(
    values: dict[str, Any], key: str, role: str, reading: Reading, *, prune: bool
) -> list[Message]:
    """The messages of a column that is a text, one message, or a list of messages.

    Args:
        role: whose message a text is.
        prune: as `normalise_messages`.

    Raises:
        BadRow: it is none of these.
    """
    if key not in values:
        raise BadRow(key, f"is missing or null; the columns are {', '.join(sorted(values))}")
    value = values[key]
    if isinstance(value, str) and key not in LIST_KEYS:
        value = [{"role": role, "content": value}]
    elif isinstance(value, dict):
        value = [value]
    elif not isinstance(value, list | str):
        raise BadRow(key, f"is {type_name(value)}; must be a string or a list of messages")
    return normalise_messages(value, key, unread=reading.unread, prune=prune)


def system_column(values: dict[str, Any]) -> list[Message]:
    """The system message that a row keeps in a column of its own; none where that is empty."""
    if values.get("system", "") == "":
        return []
    message = {"role": "system", "content": values["system"]}
    return normalise_messages([message], "system", unread=Counter(), prune=False)


def required_key(values: dict[str, Any], keys: tuple[str, ...]) -> str:
    """The first of the keys that the row has.

    Raises:
        BadRow: it has none of them.
    """
    for key in keys:
        if key in values:
            return key
    raise BadRow(keys[0], f"is missing or null; the columns are {', '.join(sorted(values))}")


def all_strings(values: dict[str, Any], keys: tuple[str, ...]) -> bool:
    """Whether every one of the columns is a plain text."""
    return all(isinstance(values.get(key), str) and key not in LIST_KEYS for key in keys)
