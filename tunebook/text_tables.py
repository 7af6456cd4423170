"""Two-column tables of labels and text, for terminals, pipes and strings."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 100
"""Characters of a line where there is no terminal to ask."""


def two_columns() -> Table:
    """An empty table of labels and text."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    return table


def add_line(table: Table, label: str, text: Any, *, style: str = "") -> None:
    """Adds a line, unless there is no text."""
    if text:
        table.add_row(label, Text(str(text), style=style))


def as_text(table: Table, width: int) -> str:
    """The table as plain text without spaces at the ends of lines."""
    buffer = io.StringIO()
    console = Console(file=buffer, width=width, color_system=None, legacy_windows=False)
    console.print(table)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def print_table(console: Console, table: Table) -> None:
    """Prints a table: in colour on a terminal, as plain text into a file or pipe."""
    if console.is_terminal or console.is_jupyter:
        console.print(table)
    else:
        console.print(Text(as_text(table, PIPE_WIDTH)), soft_wrap=True, end="")


def count_text(value: Any) -> str:
    """A count with its thousands marked."""
    return f"{value:,}"
