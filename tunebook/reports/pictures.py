"""Charts as PNG files, of the size of a column in a paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tunebook.reports.charts import Chart, Series, Style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURES = "figures"
SIZE_INCHES = (3.4, 2.4)
DPI = 300
COLOURS = ("#1d4ed8", "#c2410c", "#15803d", "#6d28d9", "#0e7490", "#be185d", "#a16207", "#475569")
OTHER = "#c3c9d1"
MOST_NAMED = 8
"""Series above which a picture has no legend."""


def write_pictures(charts: Sequence[Chart], folder: Path) -> list[Path]:
    """Writes every chart to `<folder>/<name>.png`, and returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    return [_draw(chart, folder / f"{chart.name}.png") for chart in charts]


def _draw(chart: Chart, path: Path) -> Path:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.size": 8, "axes.linewidth": 0.6}):
        figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
        axes = figure.subplots()
        for series in chart.series:
            _plot(axes, series)
        axes.set_xlabel(chart.x_label)
        axes.set_ylabel(chart.y_label)
        if chart.x_is_log:
            axes.set_xscale("log")
        if chart.from_zero:
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25, linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
        if 1 < len(chart.series) <= MOST_NAMED:
            axes.legend(frameon=False, fontsize=7)
        figure.savefig(path, format="png")
    return path


def _plot(axes: Axes, series: Series) -> None:
    colour = COLOURS[series.colour % len(COLOURS)] if series.colour >= 0 else OTHER
    looks = {
        Style.LINE: {"linewidth": 1.2},
        Style.FAINT: {"linewidth": 0.7, "alpha": 0.4},
        Style.MARKED: {"linewidth": 1.2, "marker": "o", "markersize": 3},
        Style.DOTS: {"linestyle": "none", "marker": "o", "markersize": 4},
        Style.STAR: {"linestyle": "none", "marker": "*", "markersize": 9},
    }[series.style]
    if len(series.points) == 1:
        looks = {"marker": "o", **looks}
    x_values, y_values = zip(*series.points, strict=True)
    axes.plot(x_values, y_values, color=colour, label=series.name, **looks)  # pyright: ignore[reportArgumentType]
