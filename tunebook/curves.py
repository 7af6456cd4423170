"""Curves of a run: in the terminal as text, and as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tunebook.runs.metrics import finite, history

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from tunebook.runs.record import Evaluation

Point: TypeAlias = tuple[int, float]

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*#@"
_BRAILLE = 0x2800
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bit of the braille dot at [column][row] of a character cell."""
LEARNING_RATE = "train/learning_rate"
ABOVE: dict[str, Any] = {
    "loc": "lower right",
    "bbox_to_anchor": (1, 1),
    "ncols": 4,
    "borderaxespad": 0.1,
    "frameon": False,
    "fontsize": 9,
}
"""A legend that covers no point of a metric that may be anywhere between 0 and 1."""
SECOND_METRICS = ("reward", "accuracy")
"""What is drawn beside the loss, where it was recorded."""
SIDES = ("train", "start", "eval")
"""What stands before the name of a metric: where it was measured."""
LONGEST_TITLE, LONGEST_LABEL = 76, 30
"""Characters that fit into a picture."""


def sparkline(values: Sequence[float], *, width: int = 40, unicode: bool = True) -> str:
    """The values as one line of blocks from 0 to their maximum, resampled to at most `width`."""
    if not values:
        return ""
    marks = BLOCKS if unicode else ASCII_BLOCKS
    count = min(width, len(values))
    picked = [values[index * (len(values) - 1) // max(count - 1, 1)] for index in range(count)]
    top = max(picked)
    if top <= 0:
        return marks[0] * count
    return "".join(marks[round(max(value, 0.0) / top * (len(marks) - 1))] for value in picked)


def loss_curve(
    train: Sequence[Point],
    evals: Sequence[Point] = (),
    *,
    width: int = 72,
    height: int = 12,
    unicode: bool = True,
    name: str = "loss",
    is_mean: bool = False,
) -> str:
    """A chart of loss over steps in text: train as a line, evaluations as marks.

    Args:
        train: `(step, loss)` in order; non-finite values are left out.
        evals: the same, of the evaluations.
        width: characters of the whole chart.
        height: lines of the drawing, without axis and legend.
        unicode: braille dots and lines; else ASCII.
        name: what is drawn, if it is not the loss.
        is_mean: the train side is a running mean, which the legend then says.
    """
    train, evals = finite(train), finite(evals)
    points = [*train, *evals]
    if not points:
        return f"no {name} has been recorded"
    low, high = _range([value for _, value in points])
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    labels = [f"{high:.3g}", f"{(low + high) / 2:.3g}", f"{low:.3g}"]
    margin = max(len(label) for label in labels)
    columns = max(width - margin - 2, 8)
    # Braille has 2 x 4 dots in a character; ASCII one.
    across, down = (2, 4) if unicode else (1, 1)

    def place(point: tuple[float, float]) -> tuple[int, int]:
        x = (point[0] - first) / max(last - first, 1) * (columns * across - 1)
        y = (high - point[1]) / (high - low) * (height * down - 1)
        return round(x), round(y)

    line = [place(point) for point in averaged(train, columns * across)]
    dots = {
        dot for start, end in zip(line, line[1:] or line, strict=False) for dot in _line(start, end)
    }
    cells = _braille(dots) if unicode else dict.fromkeys(dots, "*")
    mark = "●" if unicode else "o"
    cells |= {(x // across, y // down): mark for x, y in map(place, evals)}
    rows = ["".join(cells.get((x, y), " ") for x in range(columns)) for y in range(height)]
    return "\n".join(
        [
            *_with_labels(rows, labels, margin, unicode),
            *_step_axis(first, last, margin, columns, unicode),
            _legend(
                name,
                bool(train),
                bool(evals),
                indent=margin + 2,
                width=width,
                unicode=unicode,
                is_mean=is_mean,
            ),
        ]
    )


def curve_of_run(rows: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """`loss_curve` of the metrics of a run, the train side a running mean; with its options.

    Where rewards were recorded they are drawn: the loss of a policy says little.
    """
    plain = [dict(row) for row in rows]
    name = "reward" if any("train/reward" in row for row in plain) else "loss"
    train = finite(history(plain, f"train/{name}"))
    window = max(len(train) // 10, 1)
    evals = [*history(plain, f"start/{name}"), *history(plain, f"eval/{name}")]
    calm = smoothed(train, window)
    return loss_curve(calm, evals, name=name, is_mean=window > 1, **options)


def plot_curves(
    rows: Sequence[Mapping[str, Any]],
    path: Path,
    *,
    title: str,
    evaluation: Evaluation | None = None,
    dpi: int = 150,
) -> Path:
    """Writes a PNG of loss, reward or accuracy, and learning rate over steps; returns its path.

    What was monitored is drawn too, and the best of it marked.

    Args:
        rows: metrics of a run, one dict a step.
        path: the file to write.
        title: shown above.
        evaluation: what the evaluations of the run said; None = nothing is marked.
        dpi: pixels of an inch; the picture is 8 inches wide.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    figure_of_curves(rows, title=title, evaluation=evaluation, dpi=dpi).savefig(path, format="png")
    return path


def figure_of_curves(
    rows: Sequence[Mapping[str, Any]], *, title: str, evaluation: Evaluation | None, dpi: int
) -> Figure:
    """What `plot_curves` writes, as a figure of Matplotlib."""
    from matplotlib.figure import Figure

    plain = [dict(row) for row in rows]
    rates = finite(history(plain, LEARNING_RATE))
    names = ["loss", *second_metrics(plain, evaluation)]
    heights = [3, *[2] * (len(names) - 1), *([1] if rates else [])]
    figure = Figure(figsize=(8, 3 + 2 * len(names)), dpi=dpi, layout="constrained")
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    per_token = any("eval/perplexity" in row for row in plain)
    for one, name in zip(axes, names, strict=False):
        train = finite(history(plain, f"train/{name}"))
        evals = finite([*history(plain, f"start/{name}"), *history(plain, f"eval/{name}")])
        _draw(one, name, train, evals, best_step_of(name, evaluation))
        if name != "loss":
            one.legend(**ABOVE)
        is_loss = name == "loss" and per_token
        one.set_ylabel("loss (nats per token)" if is_loss else label_text(name, LONGEST_LABEL))
    axes[0].set_title(label_text(title, LONGEST_TITLE), loc="left", fontsize=10, fontweight="bold")
    if rates:
        axes[-1].plot(
            *zip(*rates, strict=True), color="#6b7280", linewidth=1.4, marker=lone_marker(rates)
        )
        axes[-1].set_ylabel("learning rate")
        axes[-1].ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
        axes[-1].set_ylim(bottom=0)
    for one in axes:
        one.ticklabel_format(axis="y", useOffset=False)
        one.grid(alpha=0.25, linewidth=0.6)
        one.spines[["top", "right"]].set_visible(False)
    mark_steps(axes[-1])
    axes[-1].set_xlabel("step")
    return figure


def second_metrics(rows: Sequence[Mapping[str, Any]], evaluation: Evaluation | None) -> list[str]:
    """What is drawn of a run beside its loss: rewards, accuracy, and what was monitored."""
    recorded = {key for row in rows for key in row if row[key] is not None}
    monitored = [] if evaluation is None else [evaluation.metric.removeprefix("eval/")]
    names = dict.fromkeys((*SECOND_METRICS, *monitored))
    return [
        name
        for name in names
        if name != "loss" and any(f"{side}/{name}" in recorded for side in SIDES)
    ]


def best_step_of(name: str, evaluation: Evaluation | None) -> int | None:
    """The step of the best evaluation, if that is what was monitored."""
    if evaluation is None or evaluation.metric != f"eval/{name}":
        return None
    return evaluation.best_step


def label_text(text: str, most: int) -> str:
    """A text for a picture: of at most so many characters, its middle left out; no formula."""
    if len(text) > most:
        kept = most - 1
        text = f"{text[: kept - kept // 2]}…{text[len(text) - kept // 2 :]}"
    return text.replace("$", r"\$")


def lone_marker(points: Sequence[object]) -> str | None:
    """What is drawn of a line of one point, which has no length."""
    return "o" if len(points) == 1 else None


def mark_steps(axes: Axes) -> None:
    """Marks the steps below an axis, which are whole."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(
        MaxNLocator(nbins=7, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)
    )


def smoothed(points: Sequence[Point], window: int) -> list[Point]:
    """Each point's value averaged over itself and the `window - 1` points before it."""
    values = [value for _, value in points]
    return [
        (step, math.fsum(values[max(0, i - window + 1) : i + 1]) / min(i + 1, window))
        for i, (step, _) in enumerate(points)
    ]


def _draw(
    axes: Axes, name: str, train: list[Point], evals: list[Point], best_step: int | None
) -> None:
    """Draws what a metric was in training and in evaluations, the best of them marked."""
    shown = label_text(name, LONGEST_LABEL)
    if train:
        axes.plot(
            *zip(*train, strict=True),
            color="#93c5fd",
            linewidth=1.0,
            marker=lone_marker(train),
            label=f"train {shown}",
        )
    if len(train) >= 20:
        calm = smoothed(train, max(len(train) // 20, 2))
        axes.plot(*zip(*calm, strict=True), color="#1d4ed8", linewidth=1.6, label="train, smoothed")
    if evals:
        axes.plot(
            *zip(*evals, strict=True),
            color="#ea580c",
            linewidth=1.4,
            marker="o",
            markersize=5,
            label=f"eval {shown}",
        )
    best = [(step, value) for step, value in evals if step == best_step]
    if best:
        axes.plot(
            *zip(*best, strict=True),
            color="#15803d",
            linestyle="none",
            marker="*",
            markersize=14,
            label=f"best eval, {best[0][1]:.4g} at step {best_step}",
        )
    if train or evals:
        axes.legend(frameon=False, fontsize=9)


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low == high:
        pad = abs(low) * 0.1 or 1.0
        return low - pad, high + pad
    return low, high


def averaged(points: Sequence[tuple[float, float]], columns: int) -> list[tuple[float, float]]:
    """At most about `columns` points: means of equally many neighbours."""
    size = math.ceil(len(points) / columns) if points else 1
    chunks = [points[start : start + size] for start in range(0, len(points), size)]
    return [
        (chunk[len(chunk) // 2][0], math.fsum(value for _, value in chunk) / len(chunk))
        for chunk in chunks
    ]


def _line(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    count = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    return [
        (
            round(start[0] + (end[0] - start[0]) * i / count),
            round(start[1] + (end[1] - start[1]) * i / count),
        )
        for i in range(count + 1)
    ]


def _braille(dots: set[tuple[int, int]]) -> dict[tuple[int, int], str]:
    bits: dict[tuple[int, int], int] = {}
    for x, y in dots:
        cell = (x // 2, y // 4)
        bits[cell] = bits.get(cell, 0) | _DOTS[x % 2][y % 4]
    return {cell: chr(_BRAILLE | value) for cell, value in bits.items()}


def _with_labels(rows: list[str], labels: list[str], margin: int, unicode: bool) -> list[str]:
    at = {0: labels[0], (len(rows) - 1) // 2: labels[1], len(rows) - 1: labels[2]}
    bar, tick = ("│", "┤") if unicode else ("|", "+")
    return [
        f"{at.get(y, ''):>{margin}} {tick if y in at else bar}{row}".rstrip()
        for y, row in enumerate(rows)
    ]


def _step_axis(first: int, last: int, margin: int, columns: int, unicode: bool) -> list[str]:
    corner, dash = ("└", "─") if unicode else ("+", "-")
    left, right = f"step {first}", str(last)
    gap = " " * max(columns - len(left) - len(right), 1)
    indent = " " * (margin + 1)
    return [f"{indent}{corner}{dash * columns}", f"{indent} {left}{gap}{right}"]


def _legend(
    name: str, train: bool, evals: bool, *, indent: int, width: int, unicode: bool, is_mean: bool
) -> str:
    """What the marks are; without the name of what is drawn where the line would be too long."""
    line, mark = ("⠒⠒", "●") if unicode else ("**", "o")
    mean = ", smoothed" if is_mean else ""
    text = ""
    for each in (f" {name}", ""):
        parts = [f"{line} train{each}{mean}"] if train else []
        parts += [f"{mark} eval{each}"] if evals else []
        text = " " * indent + "   ".join(parts)
        if len(text) <= width:
            break
    return text
