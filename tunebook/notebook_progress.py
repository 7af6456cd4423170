"""Progress in a notebook: one output of text that is replaced, which a saved notebook keeps.

That of rich would be a widget, which needs another package and which GitHub does not show.
"""

from __future__ import annotations

import io
import time
from typing import IO, Any

from rich.console import Console
from rich.progress import Progress, TaskID

REDRAW_EVERY_S = 0.2
"""Seconds between two drawings of a bar."""


class NotebookProgress(Progress):
    """Progress in one output of a cell, which is replaced when something changes."""

    _drawn_at = 0.0
    _handle = None

    def start(self) -> None:
        """Makes the output."""
        from IPython.display import display

        if not self.disable:
            self._handle = display(self._drawing(), raw=True, display_id=True)

    def stop(self) -> None:
        """Draws how it ended."""
        self._draw()

    def refresh(self) -> None:
        """Draws, unless it did so just now."""
        if time.monotonic() - self._drawn_at >= REDRAW_EVERY_S:
            self._draw()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """As for every progress; there is no thread that would draw later."""
        super().update(task_id, **changes)
        self.refresh()

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        if self._handle is not None:
            self._handle.update(self._drawing(), raw=True)

    def _drawing(self) -> dict[str, str]:
        text = io.StringIO()
        console = Console(
            file=text, width=self.console.width, force_jupyter=False, force_terminal=False
        )
        console.print(self.get_renderable())
        return {"text/plain": "\n".join(line.rstrip() for line in text.getvalue().splitlines())}


def in_notebook(stream: IO[str]) -> bool:
    """Whether what is written goes to the outputs of a cell."""
    return type(stream).__module__ == "ipykernel.iostream"


def progress_for(console: Console, *columns: Any, disable: bool = False) -> Progress:
    """A live progress for a terminal, or one that a notebook can show and keep."""
    kind = NotebookProgress if in_notebook(console.file) else Progress
    return kind(*columns, console=console, refresh_per_second=8, disable=disable)
