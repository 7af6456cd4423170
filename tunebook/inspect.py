"""Shows rendered rows token by token with their loss weights, in a terminal and as a web page."""

from __future__ import annotations

import html as html_escape
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.config import OnLongRow
from tunebook.data.rows import Kind
from tunebook.render.cache import Rendered, RenderedRows, RenderReport
from tunebook.render.chat_template import template_hash
from tunebook.render.codec import Codec
from tunebook.render.lints import LintFinding, Severity, lint_rows
from tunebook.render.pairs import SIDES

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text
    from transformers import PreTrainedTokenizerBase

    from tunebook.data.rows import Row

LINTED_ROWS = 2000
SHOWN_FINDINGS = 20
VISIBLE = str.maketrans({"\n": "↵\n", " ": "·", "\t": "⇥", "\r": "␍", "\u00a0": "⍽"})
INCOMPLETE = "\ufffd"
PLAIN: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}
LONGEST_CHARACTER = 4


@dataclass(frozen=True, slots=True)
class Piece:
    """One token, or the few tokens that make one character."""

    ids: tuple[int, ...]
    position: int
    """Of the first token in its sequence."""
    text: str
    weight: float
    special: bool


def pieces_of(rendered: Rendered, codec: Codec, *, limit: int | None = None) -> list[Piece]:
    """A datum as pieces of readable text, each with its position and weight.

    Args:
        rendered: the datum.
        codec: of its tokenizer.
        limit: tokens after which to stop; None = at the end.
    """
    weights = [0.0, *rendered.mask.tolist()]
    ids = rendered.tokens.tolist()[:limit]
    pieces: list[Piece] = []
    start = 0
    while start < len(ids):
        stop = start + 1
        text = _text_after(codec, ids[:start], ids[start:stop])
        while text.endswith(INCOMPLETE) and stop < min(len(ids), start + LONGEST_CHARACTER):
            longer = _text_after(codec, ids[:start], ids[start : stop + 1])
            stop += 1
            text = longer
        if text.endswith(INCOMPLETE):
            stop, text = start + 1, _text_after(codec, ids[:start], ids[start : start + 1])
        special = text.strip() in codec.special_texts
        pieces.append(Piece(tuple(ids[start:stop]), start, text, weights[stop - 1], special))
        start = stop
    return pieces


def _text_after(codec: Codec, before: list[int], ids: list[int]) -> str:
    """What the ids add to the text of the token before them."""
    context = before[-1:]
    lead = codec.decode(context) if context else ""
    whole = codec.decode([*context, *ids])
    return whole[len(lead) :] if whole.startswith(lead) else codec.decode(ids)


def inspect_rendered(
    rows: Sequence[Row],
    rendered: RenderedRows,
    tokenizer: PreTrainedTokenizerBase,
    *,
    limit: int,
    html: Path | None,
    console: Console,
) -> int:
    """0 when no lint finds an error, else 1, having shown the first rows and what was found.

    Args:
        rows: those that `rendered` was made from.
        limit: rows to show; lints look at all rows, or at 2000 spread over them.
        html: write the rows as a page to this file instead; the console gets only the summary.
    """
    findings = lint_rows(rows, rendered, tokenizer, limit=LINTED_ROWS)
    if html is None:
        _print_rows(rows, rendered, Codec(tokenizer), console, limit=limit)
    _print_summary(rows, rendered, findings, console)
    if html is not None:
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(html_page(rows, rendered, tokenizer, findings, limit=limit), "utf-8")
        console.print(f"Wrote {html}", **PLAIN)
    return int(any(finding.severity is Severity.error for finding in findings))


def _print_rows(
    rows: Sequence[Row], rendered: RenderedRows, codec: Codec, console: Console, *, limit: int
) -> None:
    for row, data in shown_rows(rendered, limit):
        for datum in data:
            item = rendered[datum]
            heading = "  ".join(heading_of(rows[row], datum, rendered, item))
            console.print(heading, style="bold", **PLAIN)
            console.print(_terminal_text(pieces_of(item, codec), console), soft_wrap=True)
            console.print()


def shown_rows(rendered: RenderedRows, limit: int) -> list[tuple[int, range]]:
    """The first rows that are trained on, each with its data."""
    return [(row, rendered.data_of_row(row)) for row in rendered.report.kept_rows[:limit]]


def heading_of(row: Row, datum: int, rendered: RenderedRows, item: Rendered) -> tuple[str, str]:
    """Where a datum is from, and how much of it is trained."""
    where = f"{row.file}:{row.line}"
    if row.kind is Kind.prompt:
        return where, f"a prompt of {len(item.tokens)} tokens"
    if row.kind is Kind.preference:
        where = f"{where} {SIDES[datum - rendered.data_of_row(item.row)[0]]}"
    supervised = int(rendered.supervised[datum])
    cut = ", truncated" if item.truncated else ""
    return where, f"{supervised} of {len(item.tokens)} tokens carry loss{cut}"


def visible(text: str) -> str:
    """The text with white space made visible; a line break stays one too."""
    return text.translate(VISIBLE)


def _terminal_text(pieces: list[Piece], console: Console) -> Text:
    """Trained tokens stand out by colour, or between « and » where there is none."""
    from rich.text import Text

    text = Text()
    colourless = console.color_system is None
    trained = False
    for i, piece in enumerate(pieces):
        if colourless and (piece.weight != 0) != trained:
            text.append("»" if trained else "«")
            trained = not trained
        text.append(visible(piece.text), style=_style(piece, underline=i % 2 == 1))
        if piece.weight not in (0.0, 1.0):
            text.append(f"({piece.weight:g})", style="dim")
    if trained:
        text.append("»")
    return text


def _style(piece: Piece, *, underline: bool) -> str:
    """Every second token is underlined, which shows where tokens begin."""
    style = "dim" if piece.weight == 0 else "green" if piece.weight == 1 else "yellow"
    return style + " bold" * piece.special + " underline" * underline


def _print_summary(
    rows: Sequence[Row],
    rendered: RenderedRows,
    findings: list[LintFinding],
    console: Console,
) -> None:
    for line in summary_lines(rows, rendered, findings):
        console.print(line, **PLAIN)
    for finding in findings[:SHOWN_FINDINGS]:
        style = "red" if finding.severity is Severity.error else "yellow"
        console.print(str(finding), style=style, **PLAIN)
    if len(findings) > SHOWN_FINDINGS:
        console.print(f"and {len(findings) - SHOWN_FINDINGS} more findings", **PLAIN)


def summary_lines(
    rows: Sequence[Row], rendered: RenderedRows, findings: list[LintFinding]
) -> list[str]:
    """What was rendered and what the lints say, a sentence a line."""
    report = rendered.report
    warnings = [*report.warnings, *_truncation(report)]
    dropped = ", ".join(f"{count} {reason}" for reason, count in report.dropped.items())
    lines = [
        f"{len(report.kept_rows)} of {report.num_rows} rows, {report.num_data} data, "
        f"{report.num_tokens} tokens, {report.num_supervised} carry loss, "
        f"{report.truncated} truncated{', left out: ' + dropped if dropped else ''}",
        *report.notes,
        *(f"Warning: {warning}" for warning in warnings),
        *(str(problem) for problem in report.problems),
    ]
    linted = min(len(rows), LINTED_ROWS)
    errors = sum(finding.severity is Severity.error for finding in findings)
    num_warnings = len(findings) - errors + len(warnings)
    clean = not errors and not num_warnings
    verdict = "no findings" if clean else f"{errors} errors, {num_warnings} warnings"
    lines.append(f"Lints over {linted} of {len(rows)} rows: {verdict}")
    return lines


def _truncation(report: RenderReport) -> list[str]:
    if not report.truncated:
        return []
    what = "1 datum was" if report.truncated == 1 else f"{report.truncated} data were"
    if report.settings["on_long_row"] == OnLongRow.truncate_prompt:
        return [f"{what} cut to max_seq_len, so the beginning of the prompt is never seen"]
    return [f"{what} cut at max_seq_len, so what comes after it is never trained"]


# The web page: one file, no script, nothing fetched.

STYLE = """
:root { color-scheme: light dark; --back: #fff; --ink: #1d1f21; --faint: #767b80;
  --line: #dfe2e5; --on: #d3f2dc; --on-ink: #0c4a22; --part: #fdeeb8; --part-ink: #5c4300;
  --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --back: #16181b; --ink: #e4e6e8; --faint: #8b9298;
  --line: #34383d; --on: #123d22; --on-ink: #a6f0be; --part: #453606; --part-ink: #ffdf85;
  --bad: #ff8a80; } }
body { background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: .95rem; font-weight: 600; margin: 0 0 .5rem; }
ul { padding-left: 1.2rem; } .bad { color: var(--bad); } small { color: var(--faint); }
section { border: 1px solid var(--line); border-radius: 8px; padding: 1rem; margin: 1rem 0; }
pre { font: 13px/1.7 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  margin: 0; color: var(--faint); }
b { font-weight: inherit; border-radius: 3px; } b:hover { outline: 1px solid currentColor; }
.on { background: var(--on); color: var(--on-ink); }
.part { background: var(--part); color: var(--part-ink); }
.special { font-weight: 700; } i { font-style: normal; opacity: .45; }
"""


def html_page(
    rows: Sequence[Row],
    rendered: RenderedRows,
    tokenizer: PreTrainedTokenizerBase,
    findings: list[LintFinding],
    *,
    limit: int,
) -> str:
    """A self-contained page of the first rows, their lints and how they were rendered."""
    codec = Codec(tokenizer)
    given = rendered.report.settings.items()
    settings = ", ".join(f"{key}={value}" for key, value in given if value is not None)
    name = f"{tokenizer.name_or_path}, template {template_hash(tokenizer)}"
    lines = "".join(f"<li>{_escape(line)}</li>" for line in summary_lines(rows, rendered, findings))
    problems = "".join(f'<li class="bad">{_escape(str(finding))}</li>' for finding in findings)
    sections = [
        _html_section(rows[row], datum, rendered, codec)
        for row, data in shown_rows(rendered, limit)
        for datum in data
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Rendered rows</title><style>{STYLE}</style></head><body>\n"
        f"<h1>Rendered rows</h1><p>{_escape(name)}<br><small>{_escape(settings)}</small></p>\n"
        f"<ul>{lines}{problems}</ul>\n"
        '<p><b class="on">trained</b> <b class="part">trained with another weight</b> '
        "<small>not trained; hover over a token for its id, position and weight</small></p>\n"
        f"{''.join(sections)}</body></html>\n"
    )


def _html_section(row: Row, datum: int, rendered: RenderedRows, codec: Codec) -> str:
    item = rendered[datum]
    heading = _escape(" · ".join(heading_of(row, datum, rendered, item)))
    tokens = "".join(html_piece(piece) for piece in pieces_of(item, codec))
    return f"<section><h2>{heading}</h2><pre>{tokens}</pre></section>\n"


def html_piece(piece: Piece) -> str:
    """A token as HTML, of class `on` where it is trained, `part` where by another weight than 1."""
    kinds = ["" if piece.weight == 0 else "on" if piece.weight == 1 else "part"]
    kinds.append("special" if piece.special else "")
    classes = " ".join(kind for kind in kinds if kind)
    ids = ", ".join(str(token_id) for token_id in piece.ids)
    title = f"id {ids} · position {piece.position} · weight {piece.weight:g}"
    return f'<b class="{classes}" title="{title}">{_html_text(piece.text)}</b>'


def _html_text(text: str) -> str:
    marked = "".join(
        f"<i>{visible(char).rstrip()}</i>" + ("\n" if char == "\n" else "")
        if ord(char) in VISIBLE
        else _escape(char)
        for char in text
    )
    return marked or "<i>∅</i>"


def _escape(text: str) -> str:
    return html_escape.escape(text, quote=True)
