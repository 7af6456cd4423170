"""The execution plan of a batch: which rows are computed together. Pure functions of lengths.

This is the one place that decides how the rows of an operation are laid out on the device. Nothing
else in the backend looks at the token budget.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tunebook.errors import BackendError


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows that the model sees at once, padded to the longest of them."""

    rows: tuple[int, ...]
    """Indices into the data of the operation; the rows of a unit stay together and in order."""
    num_columns: int
    """Tokens of the longest row."""

    @property
    def padded_tokens(self) -> int:
        """Tokens computed, padding included."""
        return len(self.rows) * self.num_columns


def micro_batches(
    lengths: Sequence[int], *, rows_per_unit: int, max_tokens: int
) -> list[MicroBatch]:
    """Micro-batches that hold every row once, longest first.

    Units are sorted by their longest row, so rows of similar length meet and little is padded, and
    the largest allocation comes first. A unit that exceeds the budget by itself is a micro-batch of
    its own.

    Args:
        lengths: tokens of each row that go through the model.
        rows_per_unit: consecutive rows that must meet in one micro-batch.
        max_tokens: budget for the tokens of a micro-batch, padding included.

    Raises:
        BackendError: the rows are not a whole number of units.
    """
    check_units(len(lengths), rows_per_unit=rows_per_unit)
    units = [
        tuple(range(first, first + rows_per_unit))
        for first in range(0, len(lengths), rows_per_unit)
    ]
    longest = [max(lengths[row] for row in unit) for unit in units]
    # Sorting is stable: units of equal length keep their order, so the plan is deterministic.
    order = sorted(range(len(units)), key=lambda unit: -longest[unit])

    plan: list[MicroBatch] = []
    rows: list[int] = []
    num_columns = 0
    for unit in order:
        if rows and (len(rows) + rows_per_unit) * num_columns > max_tokens:
            plan.append(MicroBatch(tuple(rows), num_columns))
            rows = []
        if not rows:
            num_columns = longest[unit]
        rows.extend(units[unit])
    if rows:
        plan.append(MicroBatch(tuple(rows), num_columns))
    return plan


def check_units(num_rows: int, *, rows_per_unit: int) -> None:
    """Returns if rows are a whole number of units.

    Raises:
        BackendError: they are not.
    """
    if rows_per_unit < 1 or num_rows % rows_per_unit:
        raise BackendError(
            f"{num_rows} rows cannot be split into units of {rows_per_unit} rows "
            "(rows_per_unit must be at least 1 and divide the number of rows)"
        )


def padded_tokens(lengths: Sequence[int], *, rows_per_unit: int, max_tokens: int) -> int:
    """Tokens computed for rows of these lengths, padding included."""
    plan = micro_batches(lengths, rows_per_unit=rows_per_unit, max_tokens=max_tokens)
    return sum(batch.padded_tokens for batch in plan)
