"""The columns of rows as services take them. Legend: T scored tokens of a row."""

from __future__ import annotations

import numpy as np

from tunebook.errors import BackendError
from tunebook.types import Column, Datum, FloatArray


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
