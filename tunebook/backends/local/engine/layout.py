"""How the rows of several operations stand in one stream of tokens. Pure functions of tokens.

Consecutive rows that begin with the same tokens form a group: the shared beginning (a prompt) is
laid out once, then what each row has of its own. Groups are never split, so what is computed for a
row does not depend on what else is in the stream.
Legend: N tokens of the stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tunebook.types import IntArray

SIZE_STEP = 32
"""Rows of products that are filled up come in multiples of it. Below a few rows, products take
other code and other bits; and every size that is new costs a compiled product and its share of the
heap, which would grow for hundreds of steps."""
MIN_PREFIX = 16
"""Tokens; shorter beginnings cost more to take apart than to compute twice."""


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of one operation that are laid out together."""

    rows: tuple[int, ...]
    """Indices into the rows of the operation."""
    prefix: int
    """Tokens at the beginning of every row that are laid out once; 0 for a row alone."""
    num_tokens: int
    """Tokens in the stream."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `start` to `stop` of a stream."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens that see each other causally."""

    tokens: Span
    shared: Span | None
    """The beginning of the row, which each of them sees besides; None = they are all of it."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Stream:
    """Rows of several operations as one sequence of tokens."""

    tokens: IntArray
    """`[N]`"""
    positions: IntArray
    """`[N]`, of each token in its row."""
    segments: tuple[Segment, ...]
    """Shared beginnings, and what rows have of their own."""
    members: tuple[Span, ...]
    """Tokens of each operation, in their order; operations without rows here have an empty span."""
    groups: tuple[tuple[Span, ...], ...]
    """Tokens of each group of each operation."""
    rows: tuple[tuple[int, ...], ...]
    """Rows of each operation that are here, in ascending order."""
    places: tuple[tuple[IntArray, ...], ...]
    """For each operation and row, `[T]`: where in the stream each of its input tokens stands."""

    @property
    def num_tokens(self) -> int:
        """N"""
        return len(self.tokens)


def groups_of(
    rows: Sequence[IntArray],
    *,
    rows_per_unit: int,
    max_tokens: int,
    share: bool,
    min_prefix: int = MIN_PREFIX,
) -> list[Group]:
    """The rows of an operation as groups, in order.

    Rows join the group before them while that saves tokens. Units are never taken apart.

    Args:
        rows: input tokens of each row, `[T]`.
        rows_per_unit: consecutive rows that must stay together; it divides their number.
        max_tokens: of a group of several units.
        share: compute a shared beginning once.
        min_prefix: see `MIN_PREFIX`.
    """
    groups: list[Group] = []
    for first in range(0, len(rows), rows_per_unit):
        unit = _group(rows, tuple(range(first, first + rows_per_unit)), share, min_prefix)
        if groups and share:
            joined = _group(rows, groups[-1].rows + unit.rows, share, min_prefix)
            apart = groups[-1].num_tokens + unit.num_tokens
            if joined.num_tokens < apart and joined.num_tokens <= max_tokens:
                groups[-1] = joined
                continue
        groups.append(unit)
    return groups


def _group(
    rows: Sequence[IntArray], members: tuple[int, ...], share: bool, min_prefix: int
) -> Group:
    total = sum(len(rows[row]) for row in members)
    prefix = common_prefix([rows[row] for row in members]) if share and len(members) > 1 else 0
    if prefix < min_prefix:
        prefix = 0
    return Group(members, prefix, total - prefix * (len(members) - 1))


def common_prefix(rows: Sequence[IntArray]) -> int:
    """Tokens with which all rows begin."""
    length = min(len(row) for row in rows)
    first = rows[0]
    for row in rows[1:]:
        differing = np.flatnonzero(first[:length] != row[:length])
        if len(differing):
            length = int(differing[0])
    return length


def pack(sizes: Sequence[int], *, max_size: int) -> list[list[int]]:
    """Items distributed over as few bins of about equal size as keep the limit.

    An item over the limit has a bin of its own. Largest first, each to the emptiest bin.

    Args:
        sizes: of the items.
        max_size: of a bin.

    Returns:
        Item indices of each bin, in ascending order; the fullest bin first.
    """
    oversized = [[item] for item, size in enumerate(sizes) if size > max_size]
    others = sorted(
        (item for item, size in enumerate(sizes) if size <= max_size), key=lambda i: -sizes[i]
    )
    if not others:
        return oversized
    num_bins = -(-sum(sizes[item] for item in others) // max_size)
    while True:
        bins: list[list[int]] = [[] for _ in range(num_bins)]
        loads = [0] * num_bins
        for item in others:
            emptiest = loads.index(min(loads))
            bins[emptiest].append(item)
            loads[emptiest] += sizes[item]
        if max(loads) <= max_size:
            break
        num_bins += 1
    packed = oversized + [sorted(found) for found in bins if found]
    return sorted(packed, key=lambda found: -sum(sizes[item] for item in found))


def lay_out(operations: Sequence[Sequence[IntArray]], groups: Sequence[Sequence[Group]]) -> Stream:
    """The stream of some groups of each operation.

    Args:
        operations: input tokens of each row of each operation.
        groups: of each operation, those to lay out.
    """
    tokens: list[IntArray] = []
    positions: list[IntArray] = []
    segments: list[Segment] = []
    members: list[Span] = []
    group_spans: list[tuple[Span, ...]] = []
    row_numbers: list[tuple[int, ...]] = []
    places: list[tuple[IntArray, ...]] = []
    cursor = 0

    def put(piece: IntArray, beginning: Span | None) -> Span:
        nonlocal cursor
        tokens.append(piece)
        first = 0 if beginning is None else beginning.length
        positions.append(np.arange(first, first + len(piece), dtype=np.int32))
        span = Span(cursor, cursor + len(piece))
        cursor = span.stop
        if span.length:
            segments.append(Segment(span, beginning if beginning and beginning.length else None))
        return span

    for rows, chosen in zip(operations, groups, strict=True):
        start = cursor
        spans: list[Span] = []
        found: dict[int, IntArray] = {}
        for group in chosen:
            group_start = cursor
            shared = put(rows[group.rows[0]][: group.prefix], None)
            for row in group.rows:
                own = put(rows[row][group.prefix :], shared)
                found[row] = np.concatenate(
                    [np.arange(shared.start, shared.stop), np.arange(own.start, own.stop)]
                ).astype(np.int32)
            spans.append(Span(group_start, cursor))
        members.append(Span(start, cursor))
        group_spans.append(tuple(spans))
        row_numbers.append(tuple(sorted(found)))
        places.append(tuple(found[row] for row in sorted(found)))
    return Stream(
        tokens=np.concatenate(tokens).astype(np.int32),
        positions=np.concatenate(positions),
        segments=tuple(segments),
        members=tuple(members),
        groups=tuple(group_spans),
        rows=tuple(row_numbers),
        places=tuple(places),
    )
