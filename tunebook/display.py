"""What a person sees while something runs: console, progress, errors."""

from __future__ import annotations

import io
import os
import sys
import textwrap
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
)
from rich.text import Text

from tunebook.errors import TunebookError

EXTRA_LINES = 15
"""Lines beyond one every `log_every` steps that progress without a terminal may take."""
SPEED_WINDOW = 20
"""Steps over which speed and time left are averaged."""
DEBUG_VARIABLE = "TUNEBOOK_DEBUG"
EXIT_INTERRUPTED = 130


def make_console(stream: IO[str] | None = None) -> Console:
    """A console on a stream (None = standard output) that cannot fail on a character.

    Colours need a terminal and no `NO_COLOR`; characters the stream has no code for print as `?`.
    """
    stream = sys.stdout if stream is None else stream
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    return Console(file=stream, highlight=False)


def can_draw(console: Console) -> bool:
    """Whether block and braille characters reach the reader; else draw in ASCII."""
    return console.encoding.lower().replace("-", "").startswith("utf")


class StepProgress(Protocol):
    """Shows how far a run has come."""

    def step(
        self,
        step: int,
        *,
        loss: float | None = None,
        tokens: int | None = None,
        seconds: float | None = None,
    ) -> None:
        """Shows a finished step.

        Args:
            step: optimizer steps made.
            loss: of the step; None = unknown.
            tokens: tokens of the step, for the speed.
            seconds: of the step; None = measured between calls.
        """
        ...

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the metrics of an evaluation after a step."""
        ...

    def note(self, text: str) -> None:
        """Shows a sentence without disturbing the rest."""
        ...


@contextmanager
def progress_display(
    total_steps: int, *, done: int = 0, log_every: int = 10, console: Console | None = None
) -> Iterator[StepProgress]:
    """Progress for a block: a live bar on a terminal or in a notebook, plain lines elsewhere.

    Args:
        total_steps: planned optimizer steps.
        done: steps made before, by an earlier attempt.
        log_every: steps between plain lines.
        console: None = standard output.
    """
    console = make_console() if console is None else console
    if (console.is_terminal and not console.is_dumb_terminal) or console.is_jupyter:
        with _LiveProgress(total_steps, done, console) as live:
            yield live
        return
    lines = _PlainProgress(total_steps, done, log_every, console)
    try:
        yield lines
    finally:
        lines.close()


def report_error(error: BaseException, *, debug: bool = False) -> int:
    """Prints an error to standard error and returns the exit code it means.

    An error that a person can act on is one paragraph; the traceback shows in debug mode, and for
    an error nobody expected.

    Args:
        error: what ended the command.
        debug: show the traceback; the environment variable `TUNEBOOK_DEBUG=1` does so too.
    """
    debug = debug or os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")
    if isinstance(error, KeyboardInterrupt):
        _print_error("interrupted", None)
        return EXIT_INTERRUPTED
    expected = isinstance(error, TunebookError)
    trace = "".join(traceback.format_exception(error)) if debug or not expected else None
    message = str(error) if expected else f"unexpected {type(error).__name__}: {error}"
    notes = getattr(error, "__notes__", [])
    _print_error("error: " + "\n".join([message, *notes]), trace)
    return error.exit_code if isinstance(error, TunebookError) else 1


def duration_text(seconds: float) -> str:
    """A duration for people, for example `1 h 05 min`, `3 min 20 s`, `4.2 s`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _print_error(text: str, trace: str | None) -> None:
    from tunebook.runs.redaction import redact

    text = redact(text, os.environ)
    width = min(make_console(sys.stderr).width, 100)
    lines = [
        textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) or ""
        for line in text.splitlines()
    ]
    if trace is not None:
        print(redact(trace, os.environ).rstrip(), file=sys.stderr)
    print("\n".join(lines), file=sys.stderr)


class _Speed:
    """Seconds a step and tokens a second over the last steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=SPEED_WINDOW)
        self._last = time.monotonic()

    def add(self, tokens: int | None, seconds: float | None) -> None:
        now = time.monotonic()
        self._steps.append((now - self._last if seconds is None else seconds, tokens or 0))
        self._last = now

    def tokens_text(self) -> str:
        seconds = sum(one for one, _ in self._steps)
        tokens = sum(one for _, one in self._steps)
        return f"{tokens / seconds:,.0f} tokens/s" if tokens and seconds > 0 else ""

    def left_text(self, steps: int) -> str:
        if not self._steps or steps <= 0:
            return ""
        seconds = sum(one for one, _ in self._steps) / len(self._steps)
        return f"{duration_text(seconds * steps)} left"


def _evaluation_text(step: int, metrics: Mapping[str, float]) -> str:
    shown = {key: value for key, value in metrics.items() if "/num_" not in key}
    values = "  ".join(f"{key} {value:.4f}" for key, value in shown.items())
    return f"{values} @ {step}"


class _StateColumn(ProgressColumn):
    """Loss, evaluation, speed and time left, as far as they are known."""

    def render(self, task: Task) -> Text:
        return Text("  ".join(part for part in task.fields["parts"] if part))


class _LiveProgress:
    def __init__(self, total_steps: int, done: int, console: Console) -> None:
        self._total = total_steps
        self._speed = _Speed()
        self._evaluation = ""
        self._loss = ""
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            _StateColumn(),
            console=console,
            refresh_per_second=8,
        )
        self._task = self._progress.add_task("", total=total_steps, completed=done, parts=())

    def __enter__(self) -> _LiveProgress:
        self._progress.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._progress.stop()

    def step(
        self,
        step: int,
        *,
        loss: float | None = None,
        tokens: int | None = None,
        seconds: float | None = None,
    ) -> None:
        self._speed.add(tokens, seconds)
        self._loss = "" if loss is None else f"loss {loss:.4f}"
        self._show(step)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._evaluation = _evaluation_text(step, metrics)
        self._show(step)

    def note(self, text: str) -> None:
        self._progress.console.print(Text(text))

    def _show(self, step: int) -> None:
        parts = (
            self._loss,
            self._evaluation,
            self._speed.tokens_text(),
            self._speed.left_text(self._total - step),
        )
        self._progress.update(self._task, completed=step, parts=parts)


class _PlainProgress:
    def __init__(self, total_steps: int, done: int, log_every: int, console: Console) -> None:
        self._total = total_steps
        self._first = done + 1
        self._log_every = max(log_every, 1)
        self._console = console
        self._speed = _Speed()
        self._extra_left = EXTRA_LINES
        self._unshown = ""

    def step(
        self,
        step: int,
        *,
        loss: float | None = None,
        tokens: int | None = None,
        seconds: float | None = None,
    ) -> None:
        self._speed.add(tokens, seconds)
        if step % self._log_every and step not in (self._first, self._total):
            return
        parts = (
            f"step {step}/{self._total}",
            "" if loss is None else f"loss {loss:.4f}",
            self._unshown,
            self._speed.tokens_text(),
            self._speed.left_text(self._total - step),
        )
        self._print("  ".join(part for part in parts if part))
        self._unshown = ""

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        text = _evaluation_text(step, metrics)
        if self._extra_left > 0 or step >= self._total:
            self._extra_left -= 1
            self._print(f"step {step}/{self._total}  {text}")
        else:
            self._unshown = text

    def note(self, text: str) -> None:
        self._print(text)

    def close(self) -> None:
        if self._unshown:
            self._print(self._unshown)

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)
        self._console.file.flush()


@contextmanager
def counting(what: str, *, console: Console | None = None) -> Iterator[Callable[[int, int], None]]:
    """A callback `(done, total)` for a block, shown as a bar on a terminal and nowhere else."""
    console = make_console(sys.stderr) if console is None else console
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
