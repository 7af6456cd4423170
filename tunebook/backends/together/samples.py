"""Rows as the service takes them. Legend: T scored tokens of a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunebook.types import Datum, FloatArray

INLINE_TOKENS = 8
"""Tokens of a row in the body of a request whose rows were uploaded: the service only checks it."""


def sample_of(datum: Datum, columns: Mapping[str, FloatArray]) -> dict[str, Any]:
    """One row: the tokens that are predicted from, the targets, and columns, all `[T]`.

    Args:
        datum: the row.
        columns: name of the service -> `[T]`.
    """
    inputs: dict[str, Any] = {
        "target_tokens": {"data": datum.tokens[1:].tolist(), "dtype": "int64"},
    }
    for name, column in columns.items():
        inputs[name] = {"data": column.tolist(), "dtype": "float32"}
    return {"model_input": model_input(datum.tokens[:-1].tolist()), "loss_fn_inputs": inputs}


def model_input(tokens: list[int]) -> dict[str, Any]:
    """Tokens as the service takes them."""
    return {"chunks": [{"encoded_text": {"tokens": tokens}}]}


def shortened(body: Any) -> Any:
    """The body with every list of numbers cut, as it is sent beside an upload."""
    if isinstance(body, dict):
        return {key: shortened(value) for key, value in body.items()}
    if isinstance(body, list):
        if body and isinstance(body[0], int | float):
            return body[:INLINE_TOKENS]
        return [shortened(value) for value in body]
    return body
