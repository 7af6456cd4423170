"""Two-column tables of labels and text, for terminals, pipes and strings."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from tunebook.runs.redaction import redact

Columns: TypeAlias = Mapping[str, Sequence[str]]
"""Heading -> a cell a row; all columns are equally long."""

PIPE_WIDTH = 100
"""Characters of a line where there is no terminal to ask."""
UNLIMITED_WIDTH = 100_000
"""Characters of a line that is never wrapped."""
LABEL_WIDTH = 10
"""Characters that labels take at least, so that tables below each other align."""


def two_columns() -> Table:
    """An empty table of labels and text."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim", min_width=LABEL_WIDTH)
    table.add_column(overflow="fold")
    return table


def add_line(table: Table, label: str, text: Any, *, style: str = "") -> None:
    """Adds a line with its text redacted, unless there is none."""
    if text:
        table.add_row(label, Text(redact(str(text), os.environ), style=style))


def lines_of(table: Table) -> list[tuple[str, str]]:
    """The labels and texts of a table that `two_columns` made; "" = as the label before."""
    labels, texts = (list(column.cells) for column in table.columns)
    return [(str(label), str(text)) for label, text in zip(labels, texts, strict=True)]


def as_text(table: RenderableType, width: int) -> str:
    """A table, or what else rich can draw, as plain text without spaces at the ends of lines."""
    buffer = io.StringIO()
    console = Console(
        file=buffer, width=width, color_system=None, legacy_windows=False, force_jupyter=False
    )
    console.print(table)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def print_table(console: Console, table: Table) -> None:
    """Prints a table: in colour on a terminal, as plain text into a file or pipe."""
    if console.is_terminal:
        console.print(table)
    else:
        console.print(Text(as_text(table, PIPE_WIDTH)), soft_wrap=True, end="")


def columns_fit(console: Console, columns: Columns) -> bool:
    """Whether no line would be wider than the terminal; in a file or pipe there is no limit."""
    if not console.is_terminal:
        return True
    return _width(console, _column_table(console, columns)) <= console.width


def print_columns(console: Console, columns: Columns) -> None:
    """Prints columns under their headings; no cell is ever broken, however long the lines."""
    table = _column_table(console, columns)
    options = console.options.update(width=_width(console, table))
    for line in console.render_lines(table, options, pad=False):
        text = Text.assemble(*((part.text, part.style or "") for part in line))
        text.rstrip()
        console.print(text, soft_wrap=True)


def _column_table(console: Console, columns: Columns) -> Table:
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    for heading in columns:
        table.add_column(heading, no_wrap=True)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, cells))
    return table


def _width(console: Console, table: Table) -> int:
    return console.measure(table, options=console.options.update(width=UNLIMITED_WIDTH)).maximum


def count_text(value: Any) -> str:
    """A count with its thousands marked."""
    return f"{value:,}"
