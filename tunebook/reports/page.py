"""The parts of a page that needs nothing but itself: no script, no file beside it, no network."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tunebook.reports.charts import Chart, Style, keys_of
from tunebook.reports.svg import NUM_COLOURS, svg_of
from tunebook.runs.files import without_surrogates

_LIGHT = ("#2563eb", "#ea580c", "#15803d", "#7c3aed", "#0891b2", "#be185d", "#a16207", "#475569")
_DARK = ("#7aa7ff", "#ff9d5c", "#5fd38a", "#b79bff", "#4fd0e6", "#ff8fc0", "#e6c35c", "#a9b6c8")

STYLE = (
    """
:root { color-scheme: light dark; --back: #fff; --ink: #1b1e22; --faint: #656c75; --line: #dde1e6;
  --soft: #f5f6f8; --on: #d3f2dc; --on-ink: #0c4a22; --part: #fdeeb8; --part-ink: #5c4300;
  --good: #15703a; --bad: #b3261e; --warn: #8a5a00; --other: #c3c9d1; """
    + " ".join(f"--c{n}: {colour};" for n, colour in enumerate(_LIGHT))
    + """ }
@media (prefers-color-scheme: dark) { :root { --back: #15171b; --ink: #e3e6ea; --faint: #98a1ab;
  --line: #32373e; --soft: #1e2126; --on: #123d22; --on-ink: #a6f0be; --part: #453606;
  --part-ink: #ffdf85; --good: #6fdc97; --bad: #ff8a80; --warn: #f0c060; --other: #4a515b; """
    + " ".join(f"--c{n}: {colour};" for n, colour in enumerate(_DARK))
    + """ } }
* { box-sizing: border-box; }
body { background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  max-width: 68rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.35rem; line-height: 1.3; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.5rem 0 .75rem; padding-bottom: .3rem;
  border-bottom: 1px solid var(--line); }
h3 { font-size: .95rem; margin: 1.5rem 0 .5rem; }
p { margin: .5rem 0; } a { color: var(--c0); } .small, figcaption { font-size: .85rem; }
.faint, small { color: var(--faint); } .good { color: var(--good); } .bad { color: var(--bad); }
.warn { color: var(--warn); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem;
  margin: 1.25rem 0; }
.card { background: var(--soft); border-radius: 8px; padding: .6rem .8rem; }
.card b { display: block; font-size: 1.2rem; line-height: 1.35; font-weight: 600;
  overflow-wrap: anywhere; }
.card small { display: block; line-height: 1.35; overflow-wrap: anywhere; }
.charts { display: grid; gap: 1.5rem 2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
figure { margin: 0; min-width: 0; } figcaption { overflow-wrap: anywhere; }
figcaption b { font-weight: 600; font-size: .95rem; }
svg { display: block; width: 100%; height: auto; overflow: visible;
  font: 12.5px system-ui, sans-serif; }
svg text { fill: var(--faint); } .end { text-anchor: end; } .mid { text-anchor: middle; }
.grid { stroke: var(--line); stroke-width: .8; } .axis { stroke: var(--faint); stroke-width: 1; }
polyline { fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
polyline.faint { stroke-width: 1; opacity: .4; } polyline.other { stroke-width: 1; }
.key { display: inline-block; overflow-wrap: anywhere; margin-right: .9rem; color: var(--faint); }
.key i { display: inline-block; width: .8rem; height: .8rem; border-radius: 3px;
  margin-right: .35rem; vertical-align: -.1rem; }
.key i.faint { opacity: .45; } .key i.star { border-radius: 50%; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { border-bottom: 1px solid var(--line); padding: .4rem .7rem .4rem 0; text-align: left;
  vertical-align: top; }
th { color: var(--faint); font-weight: 600; white-space: nowrap; }
td { overflow-wrap: break-word; } .texts td { white-space: pre-wrap; min-width: 8rem;
  overflow-wrap: anywhere; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
table.short { width: auto; } .short th, .short td { padding-right: 2rem; }
.plain td { overflow-wrap: normal; white-space: nowrap; } .plain td.long { white-space: normal;
  min-width: 12rem; }
dl { display: grid; grid-template-columns: minmax(6rem, max-content) 1fr; gap: .2rem 1.2rem;
  margin: .5rem 0; font-size: .9rem; }
dt { color: var(--faint); } dd { margin: 0; overflow-wrap: anywhere; white-space: pre-wrap; }
pre { background: var(--soft); border-radius: 8px; padding: .8rem; margin: .5rem 0;
  overflow-x: auto;  font: 12.5px/1.55 ui-monospace, monospace; }
.tokens { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.8; color: var(--faint); }
.tokens b { font-weight: inherit; border-radius: 3px; } .on { background: var(--on);
  color: var(--on-ink); } .part { background: var(--part); color: var(--part-ink); }
.tokens .special { font-weight: 700; } .tokens i { font-style: normal; opacity: .45; }
summary { cursor: pointer; color: var(--faint); margin: .5rem 0; }
.bars td { border: 0; padding: .1rem .6rem .1rem 0; white-space: nowrap; }
.bars td:last-child { width: 100%; }
.bar { display: inline-block; height: .8rem; background: var(--c0); border-radius: 2px;
  min-width: 1px; vertical-align: -.08rem; margin-right: .4rem; }
@media (max-width: 34rem) { .texts td { min-width: 4.6rem; }
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .5rem; } }
"""
    + "".join(
        f".c{n} {{ stroke: var(--c{n}); }} circle.c{n} {{ fill: var(--c{n}); }}\n"
        f".key i.c{n} {{ background: var(--c{n}); }}\n"
        for n in range(NUM_COLOURS)
    )
    + ".other { stroke: var(--other); } .key i.other { background: var(--other); }\n"
    "circle.other { fill: var(--other); }\n"
)


def page(title: str, parts: Iterable[str]) -> str:
    """A whole page of parts that are HTML already; empty ones are left out."""
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escaped(title)}</title><style>{STYLE}</style>'
        f"</head><body>\n{body}\n</body></html>\n"
    )


def section(heading: str, *parts: str) -> str:
    """Parts under a heading; nothing if all are empty."""
    body = "".join(parts)
    return f"<section><h2>{escaped(heading)}</h2>{body}</section>" if body else ""


def cards(named: Mapping[str, tuple[str, str]]) -> str:
    """Figures to be seen first: label -> the figure, and a few words below it."""
    return (
        '<div class="cards">'
        + "".join(
            f'<div class="card"><small>{escaped(label)}</small><b>{escaped(value)}</b>'
            f"<small>{escaped(below)}</small></div>"
            for label, (value, below) in named.items()
        )
        + "</div>"
    )


def figures(charts: Sequence[Chart]) -> str:
    """Charts beside each other, as many as fit."""
    return f'<div class="charts">{"".join(map(_figure, charts))}</div>' if charts else ""


def _figure(chart: Chart) -> str:
    heading = chart.caption or chart.y_label
    keys = "".join(
        f'<span class="key"><i class="{_colour(each.colour)}'
        f'{f" {each.style}" if each.style in (Style.FAINT, Style.STAR) else ""}"></i>'
        f"{escaped(text)}</span>"
        for text, each in keys_of(chart)
        if len(chart.series) > 1 or text != heading
    )
    return (
        f"<figure><figcaption><b>{escaped(heading)}</b></figcaption>{svg_of(chart)}"
        f"<figcaption>{keys}</figcaption></figure>"
    )


def _colour(number: int) -> str:
    return f"c{number % NUM_COLOURS}" if number >= 0 else "other"


def table(columns: Mapping[str, Sequence[Any]], *, kind: str = "", long: Sequence[str] = ()) -> str:
    """Heading -> a cell a row; numbers stand right, HTML stays as it is (see `Markup`).

    Args:
        columns: all equally long.
        kind: class of the table: `texts` keeps line breaks, `plain` never breaks a cell.
        long: headings of columns of a plain table that may break.
    """
    if not columns:
        return ""
    right = [
        all(isinstance(cell, (int, float)) or cell is None for cell in cells)
        and any(cell is not None for cell in cells)
        for cells in columns.values()
    ]
    head = "".join(
        f"<th{' class=number' if numeric else ''}>{escaped(name)}</th>"
        for name, numeric in zip(columns, right, strict=True)
    )
    classes = [
        "number" if n else "long" if c in long else "" for c, n in zip(columns, right, strict=True)
    ]
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{f' class={name}' if name else ''}>{_cell(cell)}</td>"
            for cell, name in zip(cells, classes, strict=True)
        )
        + "</tr>"
        for cells in zip(*columns.values(), strict=True)
    )
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def pairs(lines: Iterable[tuple[str, str]]) -> str:
    """Labels and what they say; an empty label goes on with the one before."""
    body = "".join(f"<dt>{escaped(label)}</dt><dd>{escaped(text)}</dd>" for label, text in lines)
    return f"<dl>{body}</dl>" if body else ""


def details(summary: str, body: str) -> str:
    """A body that is hidden until somebody wants it."""
    return f"<details><summary>{escaped(summary)}</summary>{body}</details>" if body else ""


class Markup(str):
    """Text of a table that is HTML already."""


class Count(int):
    """A number of things in a table, with its thousands marked."""


def link(text: str, target: str) -> Markup:
    """A link to a file."""
    from urllib.parse import quote

    return Markup(f'<a href="{escaped(quote(target))}">{escaped(text)}</a>')


def escaped(text: Any) -> str:
    """Text as HTML."""
    return html.escape(without_surrogates("" if text is None else str(text)), quote=True)


def _cell(value: Any) -> str:
    if isinstance(value, Markup):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Count):
        return f"{value:,d}"
    return escaped(f"{value:,.6g}" if isinstance(value, float) else value)
