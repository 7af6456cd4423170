"""Which rows are held out: by a keyed hash of each row's identity, never by seed or position."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction


class Side(StrEnum):
    """A side of the split."""

    train = "train"
    eval = "eval"


@dataclass(frozen=True, slots=True)
class RowIdentity:
    """What decides the side of a row. All names carry their kind, as in `id:r17`."""

    key: str
    """Its group, its id, or its canonical content: rows with one key stay on one side."""
    content: str
    """Its canonical content, by which it is remembered where its key is new."""
    text: str
    """What it says, however it is written down: rows that say the same stay on one side."""

    @property
    def names(self) -> tuple[str, str, str]:
        """All of them, the one that decides first."""
        return self.key, self.content, self.text


@dataclass(frozen=True, slots=True)
class Split:
    """The two sides, and the assignments to remember."""

    train: tuple[int, ...]
    eval: tuple[int, ...]
    assignments: Mapping[str, Side]
    """Name of a row -> its side, for every row seen now or before."""


def eval_row_count(num_rows: int, *, fraction: float, min_rows: int, max_rows: int) -> int:
    """Rows to hold out: 0 below `min_rows`, else at most `max_rows`, in exact arithmetic.

    With the defaults 5 %, 8 and 512: 159 rows give 0, 160 give 8, 10 240 give 512.

    Args:
        num_rows: rows in all.
        fraction: share held out, taken as the decimal number that was written.
        min_rows: rows; a smaller share holds out nothing.
        max_rows: rows.
    """
    wanted = int(num_rows * Fraction(str(fraction)))
    return 0 if wanted < min_rows else min(wanted, max_rows)


def split_rows(
    rows: Sequence[RowIdentity], *, num_eval: int, remembered: Mapping[str, Side]
) -> Split:
    """The rows divided into train and eval.

    Rows linked by an equal key or equal text form a unit. A remembered row keeps its side, and
    new rows of its unit join it. The other units are taken in the order of a keyed hash, lowest
    first, into the eval side until it holds `num_eval` rows; a unit that would overshoot is passed
    over.

    Args:
        rows: identity of each row.
        num_eval: rows wanted on the eval side, remembered ones included.
        remembered: assignments of earlier runs over this dataset.
    """
    units = _linked_units(rows)
    sides: dict[int, Side] = {}
    fresh: list[list[int]] = []
    held_out = 0
    for unit in units:
        known = {index: remembered_side(rows[index], remembered) for index in unit}
        found = set(known.values()) - {None}
        if not found:
            fresh.append(unit)
            continue
        # A new row that links both sides goes to train: in eval it would flatter the score.
        joined = Side.eval if found == {Side.eval} else Side.train
        for index, side in known.items():
            sides[index] = side or joined
        held_out += sum(sides[index] is Side.eval for index in unit)
    for unit in sorted(fresh, key=lambda unit: min(_rank(rows[index].key) for index in unit)):
        side = Side.eval if held_out + len(unit) <= num_eval else Side.train
        sides.update(dict.fromkeys(unit, side))
        held_out += len(unit) if side is Side.eval else 0
    assignments = dict(remembered)
    for index, row in enumerate(rows):
        assignments.update(dict.fromkeys(row.names, sides[index]))
    return Split(
        train=tuple(index for index in range(len(rows)) if sides[index] is Side.train),
        eval=tuple(index for index in range(len(rows)) if sides[index] is Side.eval),
        assignments=assignments,
    )


def remembered_side(row: RowIdentity, remembered: Mapping[str, Side]) -> Side | None:
    """The side a row was given before: by its key, else by its content, else by its text."""
    return next((remembered[name] for name in row.names if name in remembered), None)


def _linked_units(rows: Sequence[RowIdentity]) -> list[list[int]]:
    """Row indices grouped so that equal keys and equal texts share a group (union-find)."""
    parent = list(range(len(rows)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    first_with: dict[tuple[str, str], int] = {}
    for index, row in enumerate(rows):
        for name in (("key", row.key), ("text", row.text)):
            other = first_with.setdefault(name, index)
            parent[root(index)] = root(other)
    units: dict[int, list[int]] = {}
    for index in range(len(rows)):
        units.setdefault(root(index), []).append(index)
    return list(units.values())


def _rank(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=16, key=b"tunebook-eval-split-1").digest()
