"""Reads JSON values strictly, with the place of whatever is wrong. Legend: T tokens of a sample."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tunebook.serve.errors import invalid, shown

INT64 = 2**63
DECIMAL = re.compile(r"-?[0-9]{1,19}", re.ASCII)
T = TypeVar("T")


def parse_json(body: bytes, *, where: str = "body") -> Any:
    """The value of a JSON text.

    Raises:
        ApiError: it is no JSON, or holds NaN or infinity, which JSON does not have.
    """
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise invalid(where, "is nested too deeply") from error
    except ValueError as error:
        raise invalid(where, f"is not valid JSON: {str(error)[:200]}") from error


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def read_object(value: Any, where: str) -> Mapping[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise invalid(where, f"must be an object, got {kind_of(value)}")
    return value


def read_list(value: Any, where: str) -> Sequence[Any]:
    """A JSON array."""
    if not isinstance(value, list):
        raise invalid(where, f"must be a list, got {kind_of(value)}")
    return value


def check_keys(given: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Returns if an object has no key but the known ones.

    Raises:
        ApiError: naming the others.
    """
    unknown = sorted(given.keys() - set(known))
    if unknown:
        names = ", ".join(shown(name) for name in unknown[:3])
        raise invalid(where, f"unknown {names}; known are {', '.join(sorted(known))}")


def read_text(value: Any, where: str, *, max_length: int = 1024) -> str:
    """A string."""
    if not isinstance(value, str):
        raise invalid(where, f"must be a string, got {kind_of(value)}")
    if len(value) > max_length:
        raise invalid(where, f"has {len(value)} characters, at most {max_length} are allowed")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise invalid(where, "holds half of a surrogate pair") from error
    return value


def read_flag(value: Any, where: str) -> bool:
    """A boolean."""
    if not isinstance(value, bool):
        raise invalid(where, f"must be true or false, got {kind_of(value)}")
    return value


def read_int(value: Any, where: str, *, low: int, high: int) -> int:
    """An integer of a range; a decimal string, as protobuf's JSON has it for int64, is one too."""
    number = value
    if isinstance(value, str) and DECIMAL.fullmatch(value):
        number = int(value)
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if not isinstance(number, int) or isinstance(number, bool):
        raise invalid(where, f"must be an integer, got {shown(value)}")
    if not low <= number <= high:
        raise invalid(where, f"is {shown(number)}, must be from {low} to {high}")
    return number


def read_number(value: Any, where: str, *, low: float = -math.inf, high: float = math.inf) -> float:
    """A finite number of a range."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise invalid(where, f"must be a number, got {kind_of(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise invalid(where, "must be a finite number")
    if not low <= number <= high:
        raise invalid(where, f"is {number:g}, must be from {low:g} to {high:g}")
    return number


def read_choice(value: Any, choices: Mapping[str, T], where: str) -> T:
    """What a name stands for."""
    if not isinstance(value, str) or value not in choices:
        raise invalid(where, f"is {shown(value)}, must be one of {', '.join(choices)}")
    return choices[value]


def read_integers(value: Any, where: str) -> npt.NDArray[np.int64]:
    """`[T]` int64, from numbers or decimal strings."""
    items = read_list(value, where)
    array = _as_array(items, {int})
    if array is not None and array.dtype.kind == "i":
        return array.astype(np.int64, copy=False)
    for index, item in enumerate(items):
        read_int(item, f"{where}[{index}]", low=-INT64, high=INT64 - 1)
    return np.array([int(item) for item in items], np.int64)


def read_floats(value: Any, where: str) -> npt.NDArray[np.float32]:
    """`[T]` float32, finite."""
    items = read_list(value, where)
    array = _as_array(items, {int, float})
    if array is None or array.dtype.kind not in "if":
        for index, item in enumerate(items):
            read_number(item, f"{where}[{index}]")
        array = np.array([float(item) for item in items])
    with np.errstate(over="ignore"):
        floats = array.astype(np.float32)
    if not np.isfinite(floats).all():
        index = int(np.argmin(np.isfinite(floats)))
        raise invalid(f"{where}[{index}]", "is beyond the range of float32")
    return floats


def _as_array(items: Sequence[Any], kinds: Collection[type]) -> npt.NDArray[Any] | None:
    """The items as an array; None = they are to be read one by one.

    Only where all are of some kinds: of other items, numpy would make each as large as the largest.
    """
    if not items:
        return np.zeros(0, np.int64)
    if not set(map(type, items)) <= set(kinds):
        return None
    try:
        return np.array(items)
    except OverflowError:  # too large: found one by one
        return None


def kind_of(value: Any) -> str:
    """What JSON calls a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    return {str: "a string", list: "a list", dict: "an object"}[type(value)]


def required(given: Mapping[str, Any], name: str, where: str = "") -> Any:
    """The value of a key that must be there."""
    if given.get(name) is None:
        raise invalid(f"{where}.{name}" if where else name, "is missing")
    return given[name]
