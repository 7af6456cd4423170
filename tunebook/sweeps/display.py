"""What a person sees of several trials at once: a live line each, or plain lines."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from tunebook.display import LIVE_BAR_WIDTH, displayed, headlines, is_live
from tunebook.notebook_progress import progress_for
from tunebook.runs import redact
from tunebook.sweeps.trial import Trial
from tunebook.types import StepReport

PLAIN_LINES = 10
"""Lines that a trial may take without a terminal, besides those of evaluations and its end."""
MIN_LABEL = 20


class SweepDisplay:
    """A `Watch` that shows trials."""

    def __init__(self, console: Console, num_trials: int) -> None:
        self._console = console
        self._live = is_live(console)
        self._evaluations: dict[int, str] = {}
        self._lines: dict[int, TaskID] = {}
        label = Column(
            no_wrap=True, overflow="ellipsis", max_width=max(MIN_LABEL, console.width // 3)
        )
        self._progress = progress_for(
            console,
            TextColumn("{task.description}", table_column=label),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            BarColumn(bar_width=LIVE_BAR_WIDTH),
            TextColumn(
                "{task.fields[state]}", table_column=Column(no_wrap=True, overflow="ellipsis")
            ),
            disable=not self._live,
        )
        self._over = 0
        self._total = num_trials

    @contextmanager
    def shown(self) -> Iterator[None]:
        """A block in which it is on the screen, and shows what is logged."""
        logger, handler = logging.getLogger("tunebook"), _Shown(self)
        logger.addHandler(handler)
        try:
            with self._progress, displayed(self):
                yield
        finally:
            logger.removeHandler(handler)

    def began(self, trial: Trial) -> None:
        """Gives a trial its line."""
        assert trial.task is not None and trial.run is not None
        total = int(trial.task.summary["planned_steps"])
        if self._live:
            self._lines[trial.number] = self._progress.add_task(
                redact(trial.name, os.environ), total=total, state=""
            )
        else:
            self.note(f"{trial.name}: begins, {total} steps, {trial.run.path}")

    def stepped(self, trial: Trial, report: StepReport) -> None:
        """Shows a step of a trial."""
        values: dict[str, float] = {}
        if report.metrics.get("train/loss") is not None:
            values["loss"] = report.metrics["train/loss"]
        values |= headlines(report.metrics, "train/")
        if report.evaluation is not None:
            assert trial.task is not None
            monitor = trial.task.monitor
            value = None if monitor is None else report.evaluation.get(monitor.metric)
            if monitor is not None and value is not None:
                self._evaluations[trial.number] = f"{monitor.metric} {value:.4f} @ {report.step}"
        parts = [f"{name} {value:.4f}" for name, value in list(values.items())[:2]]
        text = "  ".join([*parts, self._evaluations.get(trial.number, "")]).rstrip()
        for note in report.notes:
            self.note(f"{trial.name}: {note}")
        if self._live:
            self._progress.update(self._lines[trial.number], completed=report.step, state=text)
            return
        every = max(report.planned_steps // PLAIN_LINES, 1)
        if report.evaluation is not None or report.step % every == 0 or report.step == 1:
            self.note(f"{trial.name}: step {report.step}/{report.planned_steps}  {text}")

    def ended(self, trial: Trial) -> None:
        """Takes the line of a trial away and says how it ended."""
        self._over += 1
        line = self._lines.pop(trial.number, None)
        if line is not None:
            self._progress.remove_task(line)
        best = "" if trial.value is None else f", best {trial.value:.4f}"
        why = "" if trial.why is None else f": {trial.why}"
        self.note(f"{trial.name}: {trial.state.value}{best} ({self._over}/{self._total}){why}")

    def note(self, text: str) -> None:
        """Shows a sentence without disturbing the rest."""
        self._progress.console.print(Text(redact(text, os.environ)), soft_wrap=True)
        self._console.file.flush()

    def count(self, what: str, done: int, total: int) -> None:
        """Shows nothing: several trials may count at once."""


class _Shown(logging.Handler):
    """Shows warnings, and of which trial they are: it is the name of its thread."""

    def __init__(self, display: SweepDisplay) -> None:
        super().__init__(logging.WARNING)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        self._display.note(f"{record.threadName}: {record.getMessage()}")
