"""What is drawn of runs and sweeps, as data: `svg` draws it for a page, `pictures` for paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

from tunebook.curves import best_step_of, second_metrics, smoothed
from tunebook.runs.metrics import finite, history
from tunebook.runs.record import Evaluation

Row: TypeAlias = Mapping[str, Any]
"""The metrics of a step."""

FEWEST_SMOOTHED = 20
"""Points of a line below which its running mean says no more than itself."""
OTHERS = (
    ("grad_norm", "gradient norm"),
    ("entropy", "entropy (nats per token)"),
    ("kl", "KL from the start (nats)"),
    ("truncated_share", "share of truncated completions"),
)
"""Metrics of training that get a chart of their own where they were recorded."""


class Style(StrEnum):
    """How a series is drawn."""

    LINE = "line"
    FAINT = "faint"
    MARKED = "marked"
    """A line with a mark at every point."""
    DOTS = "dots"
    STAR = "star"


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one colour."""

    name: str
    points: Sequence[tuple[float, float]]
    style: Style
    colour: int
    """Index into the colours of the drawing."""
    labels: Sequence[str] = ()
    """What a point is, one each; else its numbers."""


@dataclass(frozen=True, slots=True)
class Chart:
    """One drawing."""

    name: str
    """Of its file."""
    y_label: str
    series: Sequence[Series] = field(default_factory=tuple)
    x_label: str = "step"
    x_is_log: bool = False
    from_zero: bool = False
    caption: str = ""
    """What stands above it on a page, where that is more than `y_label`."""


OTHER = -1
"""Colour of series that are not told apart."""


def keys_of(chart: Chart) -> list[tuple[str, Series]]:
    """The legend of a chart, as texts and a series of their look; one text for all others."""
    own = [(each.name, each) for each in chart.series if each.colour != OTHER]
    others = [(each.name, each) for each in chart.series if each.colour == OTHER]
    if len(others) > 1:
        others = [(f"the other {len(others)}", others[0][1])]
    return [(text, series) for text, series in (*own, *others) if text]


def run_charts(rows: Sequence[Row], *, evaluation: Evaluation | None = None) -> list[Chart]:
    """The charts of a run: reward where there is one, loss, learning rate, throughput and others.

    Args:
        rows: metrics, one dict a step.
        evaluation: what the evaluations of the run said; None = nothing is marked.
    """
    plain = [dict(row) for row in rows]
    recorded = {key for row in plain for key in row if row[key] is not None}
    per_token = "eval/perplexity" in recorded
    labels = {"loss": "loss (nats per token)"} if per_token else {}
    names = ["loss", *second_metrics(plain, evaluation)]
    if "reward" in names:  # the loss of a policy says little
        names = ["reward", *(name for name in names if name != "reward")]
    charts = [
        _sides(plain, name, labels.get(name, name), best_step_of(name, evaluation))
        for name in names
    ]
    rates = finite(history(plain, "train/learning_rate"))
    charts.append(_single("learning_rate", "learning rate", rates, from_zero=True))
    charts.append(_single("throughput", "tokens per second", throughput(plain), from_zero=True))
    for name, label in OTHERS:
        charts.append(_single(name, label, finite(history(plain, f"train/{name}"))))
    return [chart for chart in charts if chart.series]


def throughput(rows: Sequence[Row]) -> list[tuple[int, float]]:
    """`(step, tokens per second)` of the steps whose tokens and seconds are known."""
    return [
        (row["step"], row["train/tokens"] / row["time/step_s"])
        for row in rows
        if row.get("train/tokens") is not None and row.get("time/step_s")
    ]


def _sides(rows: list[dict[str, Any]], name: str, label: str, best_step: int | None) -> Chart:
    """A metric in training and in evaluations, the best of them marked."""
    train = finite(history(rows, f"train/{name}"))
    evals = finite([*history(rows, f"start/{name}"), *history(rows, f"eval/{name}")])
    best = [point for point in evals if point[0] == best_step]
    calm = smoothed(train, max(len(train) // 20, 2)) if len(train) >= FEWEST_SMOOTHED else []
    series = [
        Series(f"train {name}", train, Style.FAINT if calm else Style.LINE, 0),
        Series("train, smoothed", calm, Style.LINE, 0),
        Series(f"eval {name}", evals, Style.MARKED, 1),
        Series(f"best eval, step {best_step}", best, Style.STAR, 2),
    ]
    return Chart(name, label, [each for each in series if each.points])


def _single(
    name: str, label: str, points: Sequence[tuple[float, float]], *, from_zero: bool = False
) -> Chart:
    series = [Series(label, points, Style.LINE, 3)] if points else []
    return Chart(name, label, series, from_zero=from_zero)
