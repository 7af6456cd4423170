"""The execution plan: a pure function of lengths."""

import numpy as np
import pytest

from tunebook.backends.local.execution import MicroBatch, micro_batches, padded_tokens
from tunebook.errors import BackendError


def test_longest_rows_come_first_and_the_padded_size_keeps_the_budget() -> None:
    """Lengths 3, 10, 4, 9 with 20 tokens: [10, 9] is 2 x 10 = 20, then [4, 3] is 2 x 4 = 8."""
    plan = micro_batches([3, 10, 4, 9], rows_per_unit=1, max_tokens=20)
    assert plan == [MicroBatch(rows=(1, 3), num_columns=10), MicroBatch(rows=(2, 0), num_columns=4)]
    assert padded_tokens([3, 10, 4, 9], rows_per_unit=1, max_tokens=20) == 28


def test_the_budget_counts_padding() -> None:
    """10 + 1 + 1 are 12 real tokens, but 30 padded ones, so 20 holds two of the rows."""
    assert [
        len(batch.rows) for batch in micro_batches([10, 1, 1], rows_per_unit=1, max_tokens=20)
    ] == [
        2,
        1,
    ]


def test_rows_of_a_unit_stay_together_and_in_order() -> None:
    """Pairs (1, 9), (5, 5), (2, 3) with 10 tokens: one pair each, by its longest row."""
    plan = micro_batches([1, 9, 5, 5, 2, 3], rows_per_unit=2, max_tokens=10)
    assert [batch.rows for batch in plan] == [(0, 1), (2, 3), (4, 5)]
    assert [batch.num_columns for batch in plan] == [9, 5, 3]


def test_a_unit_over_the_budget_is_alone() -> None:
    plan = micro_batches([50, 50, 2, 2], rows_per_unit=2, max_tokens=10)
    assert [batch.rows for batch in plan] == [(0, 1), (2, 3)]


def test_every_row_once_within_budget() -> None:
    random = np.random.default_rng(0)
    for rows_per_unit in (1, 2, 3):
        lengths = random.integers(1, 60, 30).tolist()
        plan = micro_batches(lengths, rows_per_unit=rows_per_unit, max_tokens=128)
        assert sorted(row for batch in plan for row in batch.rows) == list(range(30))
        for batch in plan:
            assert batch.num_columns == max(lengths[row] for row in batch.rows)
            assert batch.padded_tokens <= 128 or len(batch.rows) == rows_per_unit
            for first in range(0, len(batch.rows), rows_per_unit):
                unit = batch.rows[first : first + rows_per_unit]
                assert unit[0] % rows_per_unit == 0
                assert list(unit) == list(range(unit[0], unit[0] + rows_per_unit))


def test_no_rows_no_batches() -> None:
    assert micro_batches([], rows_per_unit=1, max_tokens=10) == []


def test_rows_that_do_not_fill_a_unit_are_refused() -> None:
    with pytest.raises(BackendError, match="3 rows cannot be split into units of 2"):
        micro_batches([1, 2, 3], rows_per_unit=2, max_tokens=10)
