"""Groups, packing and streams: every row once, shared beginnings once. Pure functions."""

import numpy as np
import pytest

from tunebook.backends.local.engine.layout import Group, Span, groups_of, lay_out, pack


def row(prefix: int, own: int, *, mark: int) -> np.ndarray:
    """`prefix` tokens that all rows have, then `own` of this one."""
    return np.concatenate([np.arange(prefix), np.full(own, mark)]).astype(np.int32)


def test_rows_join_while_it_saves_tokens() -> None:
    """Two rows of 40 share 30; a third shares only 20 with them: 2 x 20 saved against 30."""
    rows = [row(30, 10, mark=900), row(30, 10, mark=901), row(20, 20, mark=902)]
    groups = groups_of(rows, rows_per_unit=1, max_tokens=1000, share=True)
    assert groups == [Group((0, 1, 2), 20, 20 + 20 + 20 + 20)]
    rows[2] = row(16, 24, mark=902)
    groups = groups_of(rows, rows_per_unit=1, max_tokens=1000, share=True)
    assert groups == [Group((0, 1, 2), 16, 88)]
    rows.insert(2, row(30, 10, mark=903))
    groups = groups_of(rows, rows_per_unit=1, max_tokens=1000, share=True)
    assert groups == [Group((0, 1, 2), 30, 60), Group((3,), 0, 40)]


def test_a_short_beginning_is_computed_twice() -> None:
    """15 shared tokens are below the least that pays."""
    rows = [row(15, 10, mark=900), row(15, 10, mark=901)]
    groups = groups_of(rows, rows_per_unit=1, max_tokens=1000, share=True)
    assert [group.prefix for group in groups] == [0, 0]


def test_units_stay_together_and_groups_keep_their_limit() -> None:
    rows = [row(30, 10, mark=900 + number) for number in range(6)]
    groups = groups_of(rows, rows_per_unit=2, max_tokens=60, share=True)
    assert [group.rows for group in groups] == [(0, 1), (2, 3), (4, 5)]
    unshared = groups_of(rows, rows_per_unit=2, max_tokens=1000, share=False)
    assert [group.num_tokens for group in unshared] == [80, 80, 80]


@pytest.mark.parametrize("max_size", [7, 20, 100])
def test_packing_holds_every_item_once_within_the_limit(max_size: int) -> None:
    sizes = np.random.default_rng(0).integers(1, 12, 40).tolist()
    bins = pack(sizes, max_size=max_size)
    assert sorted(item for found in bins for item in found) == list(range(40))
    loads = [sum(sizes[item] for item in found) for found in bins]
    assert loads == sorted(loads, reverse=True)
    for found, load in zip(bins, loads, strict=True):
        assert load <= max_size or len(found) == 1


def test_bins_are_of_about_equal_size() -> None:
    """16 of 10 with room for 100: two bins of 80, not 100 and 60."""
    assert [len(found) for found in pack([10] * 16, max_size=100)] == [8, 8]


def test_a_stream_holds_a_beginning_once_and_each_row_in_its_places() -> None:
    rows = [row(20, 3, mark=900), row(20, 0, mark=0), row(20, 5, mark=901)]
    groups = groups_of(rows, rows_per_unit=1, max_tokens=1000, share=True)
    stream = lay_out([[], rows], [[], groups])
    assert stream.num_tokens == 20 + 3 + 5
    for number, places in zip(stream.rows[1], stream.places[1], strict=True):
        assert stream.tokens[places].tolist() == rows[number].tolist()
        assert stream.positions[places].tolist() == list(range(len(rows[number])))
    assert [segment.tokens for segment in stream.segments] == [
        Span(0, 20), Span(20, 23), Span(23, 28),
    ]  # fmt: skip
    assert [segment.shared for segment in stream.segments] == [None, Span(0, 20), Span(0, 20)]
    assert stream.members == (Span(0, 0), Span(0, 28))
