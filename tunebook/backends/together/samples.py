"""Rows as the service takes them. Legend: T scored tokens of a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tunebook.errors import BackendError
from tunebook.types import Column, Datum, FloatArray

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


def marks_of(datum: Datum) -> FloatArray:
    """`[T]`, 1 where the token's log-prob is wanted."""
    weights = datum.columns.get("token_weights")
    if weights is None:
        return np.ones(datum.num_scored, np.float32)
    return (np.asarray(weights) != 0).astype(np.float32)


def marked_column(datum: Datum, name: str, row: int) -> FloatArray:
    """`[T]` of a column, 0 where the token does not count, whatever stands there (NaN too).

    Raises:
        BackendError: the row has no such column for every token, or one that is no number.
    """
    if name not in datum.columns:
        raise BackendError(f"the loss reads the column {name!r}, which row {row} lacks")
    column: Column = datum.columns[name]
    if isinstance(column, int | float):
        raise BackendError(f"row {row}: the column {name!r} has to be one number per token")
    chosen = np.where(marks_of(datum) != 0, column, 0).astype(np.float32)
    if not np.isfinite(chosen).all():
        raise BackendError(f"row {row}: the column {name!r} holds NaN or an infinite value")
    return chosen


def shortened(body: Any) -> Any:
    """The body with every list of numbers cut, as it is sent beside an upload."""
    if isinstance(body, dict):
        return {key: shortened(value) for key, value in body.items()}
    if isinstance(body, list):
        if body and isinstance(body[0], int | float):
            return body[:INLINE_TOKENS]
        return [shortened(value) for value in body]
    return body
