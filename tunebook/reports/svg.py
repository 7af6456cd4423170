"""Draws a chart as SVG for a web page, which gives its classes their colours."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tunebook.curves import averaged
from tunebook.reports.charts import Chart, Series, Style

WIDTH, HEIGHT = 460, 260
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 40
MOST_POINTS = 400
"""Of a line; a longer one is drawn as means of neighbours."""
NUM_COLOURS = 8
MOST_TRIED, ROOM = 6, 44
"""Values of a swept key that are marked on its axis themselves, so far apart at least."""


@dataclass(frozen=True, slots=True)
class _Axis:
    """Where values of one direction lie on the drawing."""

    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False

    def place(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.is_log:
            low, high, at = math.log10(low), math.log10(high), math.log10(value)
        return self.begin + (at - low) / (high - low) * (self.end - self.begin)

    def ticks(self, *, whole: bool = False) -> list[float]:
        if self.is_log:
            return log_ticks(self.low, self.high)
        found = _ticks(self.low, self.high)
        return [value for value in found if not whole or value == round(value)]


def svg_of(chart: Chart) -> str:
    """A chart as an `<svg>` element that fills the width it is given."""
    points = [point for series in chart.series for point in series.points]
    assert points, "a chart without points is not drawn"
    x_values, y_values = zip(*points, strict=True)
    is_scatter = all(series.style is Style.DOTS for series in chart.series)
    room = 0.06 if is_scatter else 0.0
    x_axis = _axis(x_values, LEFT, WIDTH - RIGHT, pad=room, is_log=chart.x_is_log)
    floor = (0.0,) if chart.from_zero else ()
    y_axis = _axis((*y_values, *floor), HEIGHT - BOTTOM, TOP, pad=0.04)
    tried = sorted(set(x_values))
    marked = (
        tried
        if is_scatter and len(tried) <= MOST_TRIED and _have_room(tried, x_axis)
        else x_axis.ticks(whole=chart.x_label == "step")
    )
    parts = [*_grid(x_axis, y_axis, marked), *_titles(chart)]
    for series in chart.series:
        parts += _series(series, x_axis, y_axis, chart.x_label)
    label = html.escape(f"{chart.y_label} over {chart.x_label}", quote=True)
    box = f"0 0 {WIDTH} {HEIGHT}"
    return f'<svg viewBox="{box}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _have_room(values: Sequence[float], axis: _Axis) -> bool:
    """Whether numbers below an axis would not run into each other."""
    places = [axis.place(value) for value in values]
    return all(after - one >= ROOM for one, after in itertools.pairwise(places))


def number_text(value: float) -> str:
    """A number as short as four digits allow."""
    if value and (abs(value) < 1e-3 or abs(value) >= 1e6):
        mantissa, _, exponent = f"{value:.3g}".partition("e")
        return f"{mantissa}e{int(exponent)}" if exponent else mantissa
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def tick_texts(values: Sequence[float]) -> list[str]:
    """Numbers beside an axis, as short as tells them apart."""
    apart = min((after - one for one, after in itertools.pairwise(values)), default=math.inf)
    texts = [number_text(value) for value in values]
    shown = [float(text.replace(",", "")) for text in texts]
    decimals = 0
    while any(abs(one - value) > apart / 20 for one, value in zip(shown, values, strict=True)):
        texts = [f"{value:,.{decimals}f}" for value in values]
        shown = [round(value, decimals) for value in values]
        decimals += 1
    return texts


def _axis(
    values: Sequence[float], begin: float, end: float, *, pad: float = 0.0, is_log: bool = False
) -> _Axis:
    low, high = min(values), max(values)
    if is_log:
        return _Axis(low / 1.3, high * 1.3, begin, end, is_log=True)
    if low == high:
        room = abs(low) * 0.1 or 1.0
        return _Axis(low if low == 0 else low - room, high + room, begin, end)
    room = (high - low) * pad
    return _Axis(low if low == 0 else low - room, high + room, begin, end)


def _ticks(low: float, high: float, *, about: int = 4) -> list[float]:
    """Round numbers between two, about so many."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((factor * power for factor in (1, 2, 2.5, 5, 10)), key=lambda s: abs(s - rough))
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between two, for an axis of ratios."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [10.0**power for power in decades if low <= 10.0**power <= high]
    if len(found) >= 2:
        return found
    finer = [factor * 10.0**power for power in decades for factor in (1, 2, 5)]
    return [value for value in finer if low <= value <= high]


def _grid(x_axis: _Axis, y_axis: _Axis, x_ticks: Sequence[float]) -> list[str]:
    parts: list[str] = []
    y_ticks = y_axis.ticks()
    for value, text in zip(y_ticks, tick_texts(y_ticks), strict=True):
        y = y_axis.place(value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" class="end">{text}</text>')
    for value, text in zip(x_ticks, tick_texts(x_ticks), strict=True):
        x = x_axis.place(value)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" class="mid">{text}</text>')
    bottom = HEIGHT - BOTTOM
    parts.append(
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>'
    )
    return parts


def _titles(chart: Chart) -> list[str]:
    x = (LEFT + WIDTH - RIGHT) / 2
    return [
        f'<text x="{x:.0f}" y="{HEIGHT - 6}" class="mid faint">{html.escape(chart.x_label)}</text>'
    ]


def _series(series: Series, x_axis: _Axis, y_axis: _Axis, x_label: str) -> list[str]:
    colour = f"c{series.colour % NUM_COLOURS}" if series.colour >= 0 else "other"
    parts: list[str] = []
    if series.style in (Style.LINE, Style.FAINT, Style.MARKED):
        line = averaged(series.points, MOST_POINTS)
        placed = " ".join(f"{x_axis.place(x):.1f},{y_axis.place(y):.1f}" for x, y in line)
        title = html.escape(series.name)
        parts.append(
            f'<polyline class="{colour} {series.style}" points="{placed}"><title>{title}</title>'
            "</polyline>"
        )
    lone = len(series.points) == 1
    if series.style in (Style.MARKED, Style.DOTS, Style.STAR) or lone:
        radius = 6 if series.style is Style.STAR else 3.5
        for number, (x, y) in enumerate(series.points):
            what = f"{series.name}, {x_label} {number_text(x)}: {number_text(y)}"
            title = html.escape(series.labels[number] if series.labels else what)
            parts.append(
                f'<circle class="{colour} {series.style}" cx="{x_axis.place(x):.1f}" '
                f'cy="{y_axis.place(y):.1f}" r="{radius}"><title>{title}</title></circle>'
            )
    return parts
