"""From rows and epochs to optimizer steps, and which rows each step takes.

Everything here is a pure function of its arguments, so the data state of a run is one integer: the
number of steps done.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class MixedRows:
    """The train rows of one source, by index, and how often each appears in an epoch."""

    indices: tuple[int, ...]
    weight: float
    """Appearances of each row per epoch: 1 = once, 2 = twice, 0.5 = every other epoch."""

    @property
    def rows_per_epoch(self) -> int:
        """Positions in one epoch: rows times weight, halves rounded up, at least 1."""
        exact = Fraction(str(self.weight)) * len(self.indices)
        return max(math.floor(exact + Fraction(1, 2)), 1) if exact > 0 else 0


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps of a run."""

    batch_size: int
    """Rows per optimizer step."""
    train_rows: int
    """Rows of one epoch."""
    steps_per_epoch: int
    planned_steps: int
    unused_rows_per_epoch: int
    """Rows of the partial last batch that `drop_last` leaves out."""
    by_max_steps: bool
    """Whether the length came from `max_steps` rather than `epochs`."""

    @property
    def epochs(self) -> float:
        """Passes over the train rows, as planned."""
        return self.planned_steps / self.steps_per_epoch


def make_plan(
    train_rows: int,
    *,
    batch_size: int,
    epochs: float | None,
    max_steps: int | None,
    drop_last: bool,
) -> Plan:
    """The plan for `train_rows` rows an epoch.

    `steps_per_epoch = ceil(train_rows / batch_size)` (a partial last batch is a step), and
    `planned_steps = ceil(steps_per_epoch * epochs)`, in exact arithmetic.

    Args:
        train_rows: rows of one epoch.
        batch_size: rows per optimizer step.
        epochs: passes, may be fractional; exactly one of `epochs` and `max_steps`.
        max_steps: optimizer steps.
        drop_last: leave out the partial last batch of each epoch.

    Raises:
        ValueError: a setting out of range, both or neither length, or a plan without a step.
    """
    if batch_size < 1:
        raise ValueError(f"plan.batch_size={batch_size}: must be at least 1")
    if (epochs is None) == (max_steps is None):
        raise ValueError(
            f"plan.epochs={epochs} and plan.max_steps={max_steps}: set exactly one of them; "
            "the other must be null (for example plan.epochs=null plan.max_steps=100)"
        )
    if epochs is not None and not (epochs > 0 and math.isfinite(epochs)):
        raise ValueError(f"plan.epochs={epochs}: must be above 0")
    if max_steps is not None and max_steps < 1:
        raise ValueError(f"plan.max_steps={max_steps}: must be at least 1")
    whole, rest = divmod(train_rows, batch_size)
    steps_per_epoch = whole if drop_last else whole + (rest > 0)
    if steps_per_epoch == 0:
        raise ValueError(
            f"{train_rows} usable train rows and plan.batch_size={batch_size} with "
            f"plan.drop_last={str(drop_last).lower()} make no step at all: lower the batch size, "
            "keep the partial batch, or add rows"
        )
    planned = max_steps or math.ceil(steps_per_epoch * Fraction(str(epochs)))
    return Plan(
        batch_size=batch_size,
        train_rows=train_rows,
        steps_per_epoch=steps_per_epoch,
        planned_steps=planned,
        unused_rows_per_epoch=rest if drop_last else 0,
        by_max_steps=max_steps is not None,
    )


def checkpoint_steps(planned_steps: int, *, checkpoint_every: int) -> tuple[int, ...]:
    """The steps after which a run evaluates and saves, always including the last.

    Args:
        planned_steps: optimizer steps of the run.
        checkpoint_every: steps; 0 = only at the end.
    """
    regular = range(checkpoint_every, planned_steps, checkpoint_every) if checkpoint_every else ()
    return (*regular, planned_steps)


def epoch_rows(sources: tuple[MixedRows, ...], *, seed: int, epoch: int) -> tuple[int, ...]:
    """The rows of one epoch in the order they are trained.

    Each source is an endless walk through its own shuffled passes, of which an epoch takes the next
    `rows_per_epoch`; so over time every row of a source is seen equally often, whatever its weight.
    """
    taken: list[int] = []
    for number, source in enumerate(sources):
        count = source.rows_per_epoch
        for position in range(epoch * count, (epoch + 1) * count):
            pass_number, offset = divmod(position, len(source.indices))
            taken.append(
                source.indices[
                    _shuffled(len(source.indices), f"{seed}/{number}/{pass_number}")[offset]
                ]
            )
    return tuple(taken[position] for position in _shuffled(len(taken), f"{seed}/{epoch}"))


def step_rows(
    plan: Plan, sources: tuple[MixedRows, ...], *, seed: int, step: int
) -> tuple[int, ...]:
    """The rows of one step: a pure function of seed, epoch and position.

    Args:
        plan: the plan.
        sources: rows by source.
        seed: order of the rows.
        step: 1 for the first step; may lie beyond the plan.
    """
    epoch, position = divmod(step - 1, plan.steps_per_epoch)
    order = _cached_epoch_rows(sources, seed, epoch)
    return order[position * plan.batch_size : (position + 1) * plan.batch_size]


def steps(
    plan: Plan, sources: tuple[MixedRows, ...], *, seed: int, done: int
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The steps left after `done` steps, each with its rows: the tail of the unbroken run's."""
    for step in range(done + 1, plan.planned_steps + 1):
        yield step, step_rows(plan, sources, seed=seed, step=step)


def stream_rows(
    sources: tuple[MixedRows, ...], *, seed: int, start: int, count: int
) -> tuple[int, ...]:
    """`count` rows of the endless stream of epochs, from position `start` on.

    For steps that take as many rows as they need: the data state of a run is then the number of
    rows taken. Without a partial last batch it is the same order as that of `step_rows`.

    Args:
        sources: rows by source.
        seed: order of the rows.
        start: rows taken before.
        count: rows to take.
    """
    per_epoch = sum(source.rows_per_epoch for source in sources)
    positions = (divmod(position, per_epoch) for position in range(start, start + count))
    return tuple(_cached_epoch_rows(sources, seed, epoch)[offset] for epoch, offset in positions)


def mix(
    rows: Sequence[int], row_sources: Sequence[int], weights: Sequence[float]
) -> tuple[MixedRows, ...]:
    """The rows grouped by source, sources without a row left out.

    Args:
        rows: indices of the rows that can be trained.
        row_sources: the source of each of them.
        weights: the weight of each source.
    """
    grouped: list[list[int]] = [[] for _ in weights]
    for row, source in zip(rows, row_sources, strict=True):
        grouped[source].append(row)
    return tuple(
        MixedRows(tuple(indices), weight)
        for indices, weight in zip(grouped, weights, strict=True)
        if indices
    )


@lru_cache(maxsize=4)
def _cached_epoch_rows(sources: tuple[MixedRows, ...], seed: int, epoch: int) -> tuple[int, ...]:
    return epoch_rows(sources, seed=seed, epoch=epoch)


@lru_cache(maxsize=16)
def _shuffled(count: int, key: str) -> tuple[int, ...]:
    """`range(count)` ordered by a keyed hash: the same on every machine and Python version."""

    def rank(position: int) -> bytes:
        return hashlib.blake2b(f"{key}/{position}".encode(), digest_size=16).digest()

    return tuple(sorted(range(count), key=rank))
