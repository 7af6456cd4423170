"""What a loaded row is: one shape for conversations, preference pairs and prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tunebook.errors import RowProblem


class Kind(StrEnum):
    """What a recipe trains on."""

    conversation = "conversation"
    preference = "preference"
    prompt = "prompt"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a dataset, normalised and checked, with the place it came from."""

    file: str
    """Absolute path, Hub id or dotted function path, as shown to people."""
    line: int
    """1-based physical line in a text file; 1-based row number in any other source."""
    source: int
    """Index of its source in a mixture."""
    kind: Kind
    messages: list[dict[str, Any]]
    """The conversation; for preference and prompt rows, the prompt. Every message has `role` and
    `content` (a string), and where the source says so `reasoning_content`, `tool_calls` (arguments
    are objects), `tool_call_id`, `name` and `trained` (a bool, or a weight between 0 and 1)."""
    chosen: list[dict[str, Any]]
    """Preference rows: the better completion; else empty."""
    rejected: list[dict[str, Any]]
    """Preference rows: the worse completion; else empty."""
    num_prompt: int | None
    """prompt/completion rows: messages before this index are the prompt, which is never trained."""
    plain: bool
    """Prompt and completions were plain strings: without a chat template they render as text."""
    tools: list[dict[str, Any]] | None
    columns: dict[str, Any]
    """Every other column that is not null, `answer` for example; id and group stay in it."""
    id: str | None
    """Value of `data.id_column`, else of a column named `id`."""
    group: str | None
    """Value of `data.group_column`."""
    content_hash: str
    """`content_hash` of the row: equal for rows that a model cannot tell apart."""
    text_hash: str
    """`content_hash` without what is trained of the row and how its turns were written: equal for
    rows of which one gives the other away."""

    def to_json(self) -> dict[str, Any]:
        """The row as one JSON object."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Row:
        """The row that `to_json` gave these values of.

        Rows that were frozen without a `text_hash` go by their `content_hash`.
        """
        values = {"text_hash": values["content_hash"], **values}
        return cls(**{**values, "kind": Kind(values["kind"])})


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """What was read from one source."""

    name: str
    """Path, Hub id or function, as configured."""
    rows: int
    """Good rows."""
    weight: float
    """Appearances of each row per epoch."""
    fingerprint: str
    """Over the content of its good rows, in order."""


@dataclass(slots=True)
class LoadedRows:
    """The good rows of a dataset, and everything a person should know about the others."""

    rows: list[Row]
    problems: list[RowProblem]
    """One for every row that was skipped."""
    warnings: list[str]
    sources: list[SourceInfo]
    num_read: int
    """Rows read, skipped ones included."""
    fingerprint: str = field(init=False)
    """Over the content of all good rows, in order."""

    def __post_init__(self) -> None:
        self.fingerprint = fingerprint_of(row.content_hash for row in self.rows)


def content_hash(
    *,
    kind: Kind,
    messages: list[dict[str, Any]],
    chosen: list[dict[str, Any]],
    rejected: list[dict[str, Any]],
    num_prompt: int | None,
    plain: bool,
    tools: list[dict[str, Any]] | None,
    answer_columns: dict[str, Any],
) -> str:
    """32 hex digits that are equal for rows with equal content, wherever and however stored.

    Covers all that can change a token, a mask or a reward: line ends, a byte order mark, key order
    of rows and messages, and null against absent keys do not. Two things stay as written, because
    a template prints them so: Unicode is not normalised, and keys inside tool schemas and tool
    arguments keep their order.
    """
    content = [
        kind,
        messages,
        chosen,
        rejected,
        num_prompt,
        plain,
        tools,
        sorted(answer_columns.items()),
    ]
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:32]


def without_trained(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns without the word on which of them are trained."""
    return [{key: value for key, value in turn.items() if key != "trained"} for turn in turns]


def fingerprint_of(hashes: Iterable[str]) -> str:
    """32 hex digits over hashes in their order."""
    digest = hashlib.sha256()
    for value in hashes:
        digest.update(value.encode("ascii") + b"\n")
    return digest.hexdigest()[:32]
