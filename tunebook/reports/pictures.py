"""Charts as PNG files, of the size of a column in a paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.curves import label_text, lone_marker, mark_steps
from tunebook.reports.charts import OTHER, Chart, Series, Style, keys_of
from tunebook.reports.svg import log_ticks, number_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES = "figures"
SETTINGS: dict[Any, Any] = {"font.size": 8, "axes.linewidth": 0.6}
"""Of Matplotlib."""
WIDTH_INCHES, HEIGHT_INCHES = 3.4, 2.4
DPI = 300
COLOURS = ("#1d4ed8", "#c2410c", "#15803d", "#6d28d9", "#0e7490", "#be185d", "#a16207", "#475569")
OTHER_COLOUR = "#c3c9d1"
MOST_INSIDE, LONGEST_INSIDE = 4, 24
"""Keys of a legend that stands among the curves, and their characters; beyond, it is below."""
LONGEST_KEY, LONGEST_X, LONGEST_Y = 54, 48, 34
"""Characters that fit into the picture; a longer text loses its middle."""
KEY_INCHES = 0.145
"""Height of a line of a legend."""


def write_pictures(charts: Sequence[Chart], folder: Path) -> list[Path]:
    """Writes every chart to `<folder>/<name>.png`, and returns the paths."""
    from matplotlib import rc_context

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{chart.name}.png" for chart in charts]
    with rc_context(SETTINGS):
        for chart, path in zip(charts, paths, strict=True):
            figure_of(chart).savefig(path, format="png")
    return paths


def figure_of(chart: Chart) -> Figure:
    """A chart as a figure of Matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    keys = keys_of(chart) if len(chart.series) > 1 else []
    longest = max((len(text) for text, _ in keys), default=0)
    is_below = len(keys) > MOST_INSIDE or longest > LONGEST_INSIDE
    height = HEIGHT_INCHES + (KEY_INCHES * len(keys) if is_below else 0.0)
    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    for series in chart.series:
        x_values, y_values = zip(*series.points, strict=True)
        axes.plot(x_values, y_values, **_looks(series))
    axes.set_xlabel(label_text(chart.x_label, LONGEST_X))
    axes.set_ylabel(label_text(chart.y_label, LONGEST_Y))
    if chart.x_is_log:
        axes.set_xscale("log")
        marked = log_ticks(*axes.get_xlim())
        axes.set_xticks(marked, [number_text(value) for value in marked])
        axes.set_xticks([], minor=True)
    elif chart.x_label == "step":
        mark_steps(axes)
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    lines = [Line2D([], [], **_looks(series)) for _, series in keys]
    texts = [label_text(text, LONGEST_KEY) for text, _ in keys]
    if is_below:
        figure.legend(lines, texts, frameon=False, fontsize=7, loc="outside lower center")
    elif keys:
        axes.legend(lines, texts, frameon=False, fontsize=7)
    return figure


def _looks(series: Series) -> dict[str, Any]:
    """How Matplotlib draws a series."""
    looks: dict[str, Any] = {
        Style.LINE: {"linewidth": 1.2},
        Style.FAINT: {"linewidth": 0.7, "alpha": 0.4},
        Style.MARKED: {"linewidth": 1.2, "marker": "o", "markersize": 3},
        Style.DOTS: {"linestyle": "none", "marker": "o", "markersize": 4},
        Style.STAR: {"linestyle": "none", "marker": "*", "markersize": 9},
    }[series.style]
    colour = OTHER_COLOUR if series.colour == OTHER else COLOURS[series.colour % len(COLOURS)]
    return {"color": colour, "marker": lone_marker(series.points), **looks}
