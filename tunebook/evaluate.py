"""Held-out evaluation, and the metric that picks the best checkpoint."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from tunebook.columns import required_columns
from tunebook.config import Direction, EvalConfig
from tunebook.errors import ConfigError
from tunebook.types import Datum, Metrics

if TYPE_CHECKING:
    from torch import Tensor

    from tunebook.backends.base import LossFn, Session

T = TypeVar("T")
NLL_METRICS = ("eval/loss", "eval/perplexity")
"""Metrics of `evaluate_nll` that a monitor can name."""
IMPROVES_DOWN = {"loss", "nll", "perplexity", "kl", "error"}
IMPROVES_UP = {"accuracy", "reward", "margin", "score"}
"""Words of a metric's name that tell which way it improves."""


@dataclass(frozen=True, slots=True)
class Monitor:
    """The metric that picks the best checkpoint."""

    metric: str
    lower_is_better: bool

    @property
    def direction(self) -> str:
        """`down` or `up`: the way it improves."""
        return "down" if self.lower_is_better else "up"


def choose_monitor(
    config: EvalConfig,
    *,
    available: Collection[str],
    default: str,
    directions: Mapping[str, Direction] | None = None,
) -> Monitor:
    """The monitor that the config names, or the recipe's own.

    Args:
        config: the `eval` section.
        available: metrics of the recipe.
        default: the recipe's own monitor.
        directions: of metrics whose names are a person's and tell nothing; any other is inferred
            from the whole words of its name.

    Raises:
        ConfigError: no such metric, or one whose direction must be stated.
    """
    metric = config.monitor or default
    if metric not in available:
        raise ConfigError(
            f"eval.monitor={metric}: there is no such metric. Available: {', '.join(available)}"
        )
    direction = config.direction or (directions or {}).get(metric) or _direction_of(metric)
    if direction is None:
        raise ConfigError(
            f"eval.monitor={metric}: its name does not tell which way it improves; set "
            "eval.direction=down or eval.direction=up"
        )
    return Monitor(metric, lower_is_better=direction is Direction.down)


def _direction_of(metric: str) -> Direction | None:
    words = set(re.findall(r"[a-z]+", metric.lower()))
    down, up = not words.isdisjoint(IMPROVES_DOWN), not words.isdisjoint(IMPROVES_UP)
    if down == up or "rejected" in words:  # the reward of what is rejected should fall
        return None
    return Direction.down if down else Direction.up


def evaluate_nll(session: Session, data: Iterable[Datum], *, rows_per_call: int) -> Metrics:
    """Mean negative log-likelihood per supervised token over the whole split, forward only.

    Token-weighted, so the batch size cannot change it: data of 1, 3 and 6 tokens at 4, 2 and 1 nats
    give 1.6.

    Args:
        session: the policy.
        data: with `token_weights` holding the mask; fractional weights count as such.
        rows_per_call: data per `forward` call; bounds memory, changes nothing else.
    """
    total_nll = total_weight = 0.0
    num_tokens = 0
    for batch in batches(data, rows_per_call):
        for datum, logprobs in zip(batch, session.forward(batch).result(), strict=True):
            weights = np.asarray(datum.columns["token_weights"], dtype=np.float64)
            counted = weights != 0
            total_nll -= float(weights[counted] @ logprobs.double().cpu().numpy()[counted])
            total_weight += float(weights.sum())
            num_tokens += int(counted.sum())
    loss = total_nll / total_weight if total_weight else math.nan
    perplexity = math.exp(min(loss, 700.0)) if not math.isnan(loss) else math.nan
    return {"eval/loss": loss, "eval/perplexity": perplexity, "eval/num_tokens": float(num_tokens)}


def evaluate_loss(
    session: Session, data: Iterable[Datum], loss_fn: LossFn, *, rows_per_call: int
) -> Metrics:
    """The loss function and its metrics over the whole split, forward only, by their own names.

    They are summed over calls in float64; every divisor is in the columns, so the batch size cannot
    change them.

    Args:
        session: the policy.
        data: with every column that the loss reads.
        loss_fn: see `LossFn`.
        rows_per_call: data per `forward` call, a multiple of the rows that belong together.
    """
    import torch

    totals: Metrics = {}
    for batch in batches(data, rows_per_call):
        found = session.forward(batch).result()
        logprobs_BT = torch.zeros(len(batch), max(datum.num_scored for datum in batch)).double()
        for row, (datum, logprobs) in enumerate(zip(batch, found, strict=True)):
            counted = torch.from_numpy(np.asarray(datum.columns["token_weights"]) != 0)
            logprobs_BT[row, : datum.num_scored][counted] = logprobs.double().cpu()[counted]
        with torch.no_grad():
            loss, metrics = loss_fn(logprobs_BT, **_columns(batch, required_columns(loss_fn)))
        for name, value in {"loss": loss, **metrics}.items():
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def _columns(batch: Sequence[Datum], names: Sequence[str]) -> dict[str, Tensor]:
    """The named columns in float64: `[B, T]` padded with 0, or `[B]` for plain floats."""
    import torch

    longest = max(datum.num_scored for datum in batch)
    columns: dict[str, Tensor] = {}
    for name in names:
        values = [np.asarray(datum.columns[name], dtype=np.float64) for datum in batch]
        if values[0].ndim:
            values = [np.pad(value, (0, longest - len(value))) for value in values]
        columns[name] = torch.from_numpy(np.stack(values))
    return columns


def batches(data: Iterable[T], size: int) -> Iterator[list[T]]:
    """The items in lists of at most `size`, in order."""
    remaining = iter(data)
    while batch := list(islice(remaining, size)):
        yield batch
