"""Held-out evaluation, and the metric that picks the best checkpoint."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from tunebook.errors import ConfigError
from tunebook.types import Datum, Metrics

if TYPE_CHECKING:
    from tunebook.backends.base import Session
    from tunebook.config import EvalConfig

NLL_METRICS = ("eval/loss", "eval/perplexity")
"""Metrics of `evaluate_nll` that a monitor can name."""
IMPROVES_DOWN = ("loss", "nll", "perplexity", "kl", "error")
IMPROVES_UP = ("accuracy", "reward", "margin", "score")


@dataclass(frozen=True, slots=True)
class Monitor:
    """The metric that picks the best checkpoint."""

    metric: str
    lower_is_better: bool

    @property
    def direction(self) -> str:
        """`down` or `up`: the way it improves."""
        return "down" if self.lower_is_better else "up"


def choose_monitor(config: EvalConfig, *, available: Collection[str], default: str) -> Monitor:
    """The monitor that the config names, or the recipe's own.

    Raises:
        ConfigError: no such metric, or one whose direction must be stated.
    """
    metric = config.monitor or default
    if metric not in available:
        raise ConfigError(
            f"eval.monitor={metric}: there is no such metric. Available: {', '.join(available)}"
        )
    if config.direction is not None:
        return Monitor(metric, lower_is_better=config.direction.value == "down")
    words = metric.lower()
    if any(word in words for word in IMPROVES_DOWN):
        return Monitor(metric, lower_is_better=True)
    if any(word in words for word in IMPROVES_UP):
        return Monitor(metric, lower_is_better=False)
    raise ConfigError(
        f"eval.monitor={metric}: its name does not tell which way it improves; set "
        "eval.direction=down or eval.direction=up"
    )


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
    for batch in _batches(data, rows_per_call):
        for datum, logprobs in zip(batch, session.forward(batch).result(), strict=True):
            weights = np.asarray(datum.columns["token_weights"], dtype=np.float64)
            counted = weights != 0
            total_nll -= float(weights[counted] @ logprobs.double().cpu().numpy()[counted])
            total_weight += float(weights.sum())
            num_tokens += int(counted.sum())
    loss = total_nll / total_weight if total_weight else math.nan
    perplexity = math.exp(min(loss, 700.0)) if not math.isnan(loss) else math.nan
    return {"eval/loss": loss, "eval/perplexity": perplexity, "eval/num_tokens": float(num_tokens)}


def _batches(data: Iterable[Datum], size: int) -> Iterator[list[Datum]]:
    remaining = iter(data)
    while batch := list(islice(remaining, size)):
        yield batch
