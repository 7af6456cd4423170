"""Turns what a source holds into plain JSON values, or says why it cannot."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import date, datetime, time
from typing import Any

MAX_INT_BITS = 1024


class BadRow(Exception):
    """What is wrong with the row at hand; `load` adds the file and the line."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field
        self.reason = reason


class WrongKind(BadRow):
    """A good row of a kind that another recipe trains on."""


def to_json_value(value: Any, field: str) -> Any:
    """The value as fresh JSON: dict, list, str, int, float, bool or None.

    NaN is how tables mark a missing cell, so it becomes None. Dates become ISO strings, arrays and
    tuples become lists.

    Raises:
        BadRow: a lone surrogate, an infinite number, or an object that JSON does not know.
    """
    if isinstance(value, str):
        _check_text(value, field)
        return value
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if value.bit_length() > MAX_INT_BITS:
            raise BadRow(field, "is an integer of over 300 digits; write it as a string")
        return value
    if isinstance(value, float):
        return _finite(float(value), field)
    if isinstance(value, Mapping):
        return {
            _key(key, field): to_json_value(item, f"{field}.{key}" if field else str(key))
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [to_json_value(item, f"{field}[{i}]") for i, item in enumerate(value)]
    return _from_other_type(value, field)


def type_name(value: Any) -> str:
    """The JSON name of the value's type with its article, for messages."""
    if value is None:
        return "null"
    names: list[tuple[type, str]] = [
        (bool, "a boolean"),
        (int, "a number"),
        (float, "a number"),
        (str, "a string"),
        (list, "a list"),
        (dict, "an object"),
    ]
    return next((name for kind, name in names if isinstance(value, kind)), type(value).__name__)


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Stricter than Python's own reader: NaN and Infinity are refused, since no other reader takes
    them, and so is a key that appears twice in one object, since one of the two would be lost.

    Raises:
        ValueError: not JSON, in words.
    """
    try:
        return _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def parse_json_at(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at `start`, and the position after it.

    Raises:
        ValueError: not JSON, in words.
    """
    try:
        return _DECODER.raw_decode(text, start)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} appears twice in one object; keep one")
    return values


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value; write null or a number")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)


def _check_text(text: str, field: str) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = f"\\u{ord(text[error.start]):04x}"
        raise BadRow(
            field,
            f"holds half of a character (a lone surrogate {code} at position {error.start}); "
            "repair or remove it",
        ) from error


def _key(key: Any, field: str) -> str:
    if not isinstance(key, str):
        raise BadRow(field, f"has the key {key!r}; keys are strings")
    _check_text(key, field)
    return key


def _finite(value: float, field: str) -> float | None:
    if math.isinf(value):
        raise BadRow(field, "is an infinite number; write null or a finite number")
    return None if math.isnan(value) else value


def _from_other_type(value: Any, field: str) -> Any:
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if hasattr(value, "tolist"):
        return to_json_value(value.tolist(), field)
    raise BadRow(field, f"is a {type(value).__name__}, which is not text; remove the column")
