"""A sweep in pictures: the curves of its trials, what each setting did, and all on one page."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.curves import Point, smoothed
from tunebook.html_report import escaped, image, page, table_line
from tunebook.runs import RunDir
from tunebook.runs.files import replace_text
from tunebook.runs.metrics import finite, history
from tunebook.sweeps.compare import SweepTable, cell, compare_sweep
from tunebook.sweeps.record import SweepDir

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_LABELS = 12
"""Trials beyond these have a curve without a label."""
MOST_CHARACTERS = 60
"""Of a label."""
MOST_SETTINGS = 6
"""Settings that are drawn against the best value, the first of them."""
WIDE_RANGE = 20
"""Ratio of the largest to the smallest value of a setting from which its axis is logarithmic."""


def write_sweep_report(sweep: SweepDir) -> Path:
    """Writes `report.html` and `curves.png` of a sweep, and returns the path of the page."""
    table = compare_sweep(sweep)
    title = f"{sweep.recipe} sweep: {sweep.path.name}"
    picture = plot_sweep(sweep, table, sweep.path / "curves.png", title=title)
    headings = [key for key in (table.rows[0] if table.rows else {}) if key != "path"]
    lines = [table_line("th", headings)]
    for row in table.rows:
        cells = [f"<td>{escaped(cell(row[key]))}</td>" for key in headings]
        report = sweep.runs_dir / (row["path"] or "") / "report.html"
        if report.is_file():
            there = Path(os.path.relpath(report, sweep.path)).as_posix()
            link = f'<a href="{escaped(there)}">{escaped(row["run"])}</a>'
            cells[headings.index("run")] = f"<td>{link}</td>"
        lines.append(f"<tr>{''.join(cells)}</tr>")
    parts = [
        f"<h1>{escaped(title)}</h1>",
        f'<div style="overflow-x: auto"><table>{"".join(lines)}</table></div>',
        image(picture, words="metrics of all trials over steps, and against each setting"),
    ]
    path = sweep.path / "report.html"
    replace_text(path, page(title, parts))
    return path


def plot_sweep(sweep: SweepDir, table: SweepTable, path: Path, *, title: str) -> Path:
    """Writes a PNG of all trials, the best ones darkest; returns its path.

    Args:
        sweep: whose runs are drawn.
        table: of the sweep.
        path: the file to write.
        title: shown above.
    """
    from matplotlib.figure import Figure

    settings = numeric_settings(table)[:MOST_SETTINGS]
    rows_of_settings = math.ceil(len(settings) / 3)
    figure = Figure(figsize=(9, 6 + 2.6 * rows_of_settings), dpi=150, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    curves, *others = figure.subfigures(
        1 + (rows_of_settings > 0), 1, squeeze=False,
        height_ratios=[6, *([2.6 * rows_of_settings] if settings else [])],
    )[:, 0]  # fmt: skip
    top, bottom = curves.subplots(2, 1, sharex=True)
    _draw_curves(sweep, table, top, bottom)
    if settings:
        grid = others[0].subplots(rows_of_settings, 3, squeeze=False, sharey=True)
        for axes, key in zip(grid.flat, settings, strict=False):
            _draw_setting(table, key, axes)
        for axes in list(grid.flat)[len(settings) :]:
            axes.set_visible(False)
    for one in figure.get_axes():
        one.grid(alpha=0.25, linewidth=0.6)
        one.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def numeric_settings(table: SweepTable) -> list[str]:
    """The settings in which trials differ and that can be drawn on an axis."""

    def is_number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    return [
        key
        for key in table.settings
        if all(row[key] is None or is_number(row[key]) for row in table.rows)
    ]


def _draw_curves(sweep: SweepDir, table: SweepTable, top: Axes, bottom: Axes) -> None:
    from matplotlib import colormaps

    colours = colormaps["viridis"]
    runs: list[tuple[Mapping[str, Any], RunDir]] = []
    for row in table.rows:
        if row["path"] is not None:
            runs.append((row, RunDir.open(sweep.runs_dir / row["path"])))
    rewarded = any("train/reward" in one for _, run in runs for one in run.metrics())
    name = "reward" if rewarded else "loss"
    for place, (row, run) in enumerate(runs):
        colour = colours(0.9 * place / max(len(runs) - 1, 1))
        label = _label(table, row) if place < MOST_LABELS else None
        metrics = run.metrics()
        if table.metric is not None:
            _line(top, finite(history(metrics, table.metric)), colour, label, marker="o")
        trained = finite(history(metrics, f"train/{name}"))
        _line(bottom, smoothed(trained, max(len(trained) // 20, 1)), colour, None)
    top.set_ylabel(table.metric or "no evaluation")
    bottom.set_ylabel(f"train/{name}")
    bottom.set_xlabel("step")
    if table.metric is not None and runs:
        top.legend(frameon=False, fontsize=8, title="the best first", title_fontsize=8)


def _line(
    axes: Axes, points: Sequence[Point], colour: Any, label: str | None, marker: str = ""
) -> None:
    if points:
        style: dict[str, Any] = {"linewidth": 1.3, "marker": marker, "markersize": 3}
        axes.plot(*zip(*points, strict=True), color=colour, label=label, **style)


def _label(table: SweepTable, row: Mapping[str, Any]) -> str:
    settings = (f"{key.rpartition('.')[2]}={cell(row[key])}" for key in table.settings)
    return f"{row['trial']}  {' '.join(settings)}"[:MOST_CHARACTERS]


def _draw_setting(table: SweepTable, key: str, axes: Axes) -> None:
    """The best value of each trial against a setting."""
    points = [
        (row[key], row[table.best])
        for row in table.rows
        if row[key] is not None and row[table.best] is not None
    ]
    if points:
        axes.scatter(*zip(*points, strict=True), color="#1d4ed8", s=18)
        smallest, largest = min(one for one, _ in points), max(one for one, _ in points)
        if smallest > 0 and largest / smallest >= WIDE_RANGE:
            axes.set_xscale("log")
    axes.set_xlabel(key, fontsize=9)
    axes.set_ylabel(table.best, fontsize=9)
