"""Which process computes which rows of an operation. Pure functions of lengths.

Every process knows all lengths, so each of them finds the same slices without asking.
"""

from collections.abc import Sequence

from tunebook.backends.local.execution import MicroBatch, micro_batches


def row_slices(
    lengths: Sequence[int], *, rows_per_unit: int, num_slices: int
) -> list[tuple[int, ...]]:
    """Indices of the rows of each slice, in order: whole units, about as many tokens in each.

    The longest unit first, each to the slice that has the fewest tokens so far.

    Args:
        lengths: tokens of each row; the rows are a whole number of units.
        rows_per_unit: consecutive rows that stay together.
        num_slices: some may stay empty.
    """
    firsts = range(0, len(lengths), rows_per_unit)
    tokens = {first: sum(lengths[first : first + rows_per_unit]) for first in firsts}
    totals = [0] * num_slices
    slices: list[list[int]] = [[] for _ in range(num_slices)]
    for first in sorted(firsts, key=lambda first: -tokens[first]):
        target = totals.index(min(totals))
        totals[target] += tokens[first]
        slices[target].extend(range(first, first + rows_per_unit))
    return [tuple(sorted(rows)) for rows in slices]


def sliced_micro_batches(
    lengths: Sequence[int], *, rows_per_unit: int, max_tokens: int, num_slices: int
) -> list[list[MicroBatch]]:
    """The micro-batches of each slice, their rows as indices into the whole."""
    plans = []
    for rows in row_slices(lengths, rows_per_unit=rows_per_unit, num_slices=num_slices):
        plan = micro_batches(
            [lengths[row] for row in rows], rows_per_unit=rows_per_unit, max_tokens=max_tokens
        )
        plans.append(
            [
                MicroBatch(tuple(rows[index] for index in batch.rows), batch.num_columns)
                for batch in plan
            ]
        )
    return plans
