"""For notebooks: trains under a bar that updates in place, shows tokens and curves."""

from __future__ import annotations

import html
import tempfile
import warnings
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tunebook.curves import plot_curves
from tunebook.display import progress_display
from tunebook.inspect import pieces_of, visible
from tunebook.launch import show
from tunebook.render.codec import Codec
from tunebook.types import StepReport

if TYPE_CHECKING:
    from tunebook.launch import RecipeTask
    from tunebook.runs import RunDir

# transformers brings tqdm, which asks for widgets that nothing here needs.
warnings.filterwarnings("ignore", message="IProgress not found")

DPI = 80
"""Of curves: a notebook keeps them in its file."""
STYLE = """
.tunebook-tokens pre { white-space: pre-wrap; line-height: 1.7; margin: 0 0 1em; }
.tunebook-tokens b { font-weight: inherit; background: rgba(46, 160, 67, .3); border-radius: 3px; }
.tunebook-tokens span, .tunebook-tokens b { outline: 1px solid rgba(128, 128, 128, .25); }
.tunebook-tokens span { opacity: .7; }
"""


@dataclass(frozen=True, slots=True, repr=False)
class Page:
    """A piece of HTML that a notebook shows, and its text for everywhere else."""

    html: str
    text: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Picture:
    """A PNG that a notebook shows."""

    png: bytes = field(repr=False)

    def _repr_png_(self) -> bytes:
        return self.png


def watched(reports: Generator[StepReport]) -> Generator[StepReport]:
    """Yields the reports of a training, each shown on a bar (in a file or pipe: as lines).

    Closing it closes the training, which then saves, promotes its best checkpoint and ends.

    Args:
        reports: what `train` of a recipe returned.
    """
    with closing(reports), ExitStack() as stack:
        display = None
        for report in reports:
            if display is None:
                done = report.step - 1
                display = stack.enter_context(progress_display(report.planned_steps, done=done))
            show(report, display)
            yield report


def show_tokens(task: RecipeTask, rows: Sequence[int] = (0, 1, 2)) -> Page:
    """Training rows token by token; those that carry loss stand out.

    Point at a token to see its id and weight. As text, what is trained stands between « and ».

    Args:
        task: what `prepare` of a recipe returned.
        rows: positions among the rows that are trained on.
    """
    codec = Codec(task.tokenizer)
    kept = task.train_data.report.kept_rows
    parts, lines = [f"<style>{STYLE}</style>"], []
    for datum in (one for row in rows for one in task.train_data.data_of_row(kept[row])):
        marked, text, trained = "", "", False
        for piece in pieces_of(task.train_data[datum], codec):
            shown = visible(piece.text)
            title = f"id {', '.join(map(str, piece.ids))}, weight {piece.weight:g}"
            tag = "b" if piece.weight else "span"
            marked += f'<{tag} title="{title}">{html.escape(shown)}</{tag}>'
            if trained != bool(piece.weight):
                text += "»" if trained else "«"
                trained = not trained
            text += shown
        parts.append(f"<pre>{marked}</pre>")
        lines.append(text + "»" * trained)
    return Page(f'<div class="tunebook-tokens">{"".join(parts)}</div>', "\n".join(lines))


def show_curves(run: RunDir) -> Picture:
    """Loss, reward or accuracy, and learning rate of a run over its steps, the best step marked."""
    with tempfile.TemporaryDirectory() as folder:
        path = plot_curves(
            run.metrics(),
            Path(folder) / "curves.png",
            title=f"{run.record.recipe} #{run.record.number}",
            evaluation=run.record.evaluation,
            dpi=DPI,
        )
        return Picture(path.read_bytes())
