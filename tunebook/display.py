"""What a person sees while something runs: console, progress, errors."""

from __future__ import annotations

import io
import os
import shlex
import shutil
import sys
import textwrap
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
)
from rich.table import Column
from rich.text import Text

from tunebook.errors import TunebookError
from tunebook.notebook_progress import in_notebook, progress_for

LIVE_BAR_WIDTH = 10
"""Characters of the bar on a terminal; 80 then hold loss, evaluation and time left too."""
EXTRA_LINES = 15
"""Lines beyond one every `log_every` steps that progress without a terminal may take."""
SPEED_WINDOW = 20
"""Steps over which speed and time left are averaged."""
DEBUG_VARIABLE = "TUNEBOOK_DEBUG"
EXIT_INTERRUPTED = 130
HEADLINES = ("perplexity", "reward", "accuracy", "margin")
"""Metrics shown beside the loss, where there are any."""
COUNT_EVERY_S = 5.0
"""Seconds between plain lines of a count."""


class _LastingConsole(Console):
    """A console whose reader may go away: what is printed from then on is lost, and no more."""

    def on_broken_pipe(self) -> None:
        """Prints nothing more. Rich would end the process, in the middle of a step."""
        self.quiet = True
        _discard(self.file)


def _discard(stream: IO[str]) -> None:
    """Sends what a stream holds and will be given nowhere: nobody reads it any more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def make_console(stream: IO[str] | None = None) -> Console:
    """A console on a stream (None = standard output) that cannot fail on a character or a reader.

    Colours need a terminal and no `NO_COLOR`; characters the stream has no code for print as `?`.
    """
    file: IO[str] = sys.stdout if stream is None else stream
    if isinstance(file, io.TextIOWrapper):
        file.reconfigure(errors="replace")
    # In a notebook rich would make a display of every line, and its kernel asks for colours;
    # plain text goes into one output.
    terminal = False if in_notebook(file) else None
    return _LastingConsole(file=file, highlight=False, force_jupyter=False, force_terminal=terminal)


def is_live(console: Console) -> bool:
    """Whether what is shown can be drawn anew: on a terminal, and in a notebook."""
    return (console.is_terminal and not console.is_dumb_terminal) or in_notebook(console.file)


def can_draw(console: Console) -> bool:
    """Whether block and braille characters reach the reader; else draw in ASCII."""
    return console.encoding.lower().replace("-", "").startswith("utf")


def short_path(path: Path) -> str:
    """The path from where the person stands, if it lies below; else the whole path."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def tunebook_command() -> str:
    """What to type for `tunebook`: the shortest that runs the one of this Python.

    The name where it is on the PATH, else the path of the script, else `<python> -m tunebook.cli`.
    """
    return script_command("tunebook", module="tunebook.cli")


def script_command(name: str, *, module: str) -> str:
    """What to type for a script that is installed beside this Python.

    Args:
        name: of the script.
        module: does the same by `python -m`, where there is no such script.
    """
    python = Path(sys.executable or "python")
    script = shutil.which(name, path=str(python.parent))
    if script is None:
        return f"{_typed(python)} -m {module}"
    found = shutil.which(name)
    on_path = found is not None and Path(found).absolute() == Path(script).absolute()
    return name if on_path else _typed(Path(script))


def _typed(program: Path) -> str:
    """A program as typed into a shell; without a slash the shell would look on the PATH."""
    short = short_path(program)
    return shlex.quote(short if program.name != short else os.path.join(os.curdir, short))


class CountDisplay(Protocol):
    """Shows counts."""

    def count(self, what: str, done: int, total: int) -> None:
        """Shows how far something other than a step has come; `done == total` ends it."""
        ...


class StepProgress(CountDisplay, Protocol):
    """Shows how far a run has come."""

    def step(
        self,
        step: int,
        *,
        loss: float | None = None,
        others: Mapping[str, float] | None = None,
        tokens: int | None = None,
        seconds: float | None = None,
    ) -> None:
        """Shows a finished step.

        Args:
            step: optimizer steps made.
            loss: of the step; None = unknown.
            others: what else to show of the step, by name.
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
    if is_live(console):
        with _LiveProgress(total_steps, done, console) as live, displayed(live):
            yield live
        return
    lines = _PlainProgress(total_steps, done, log_every, console)
    try:
        with displayed(lines):
            yield lines
    finally:
        lines.close()


_displays: list[CountDisplay] = []
"""The displays of the blocks that are running, innermost last."""


@contextmanager
def displayed(display: CountDisplay) -> Iterator[None]:
    """A block in which counts are shown on a display that is on the screen."""
    _displays.append(display)
    try:
        yield
    finally:
        _displays.remove(display)


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

    lines = redact(text, os.environ).splitlines()
    if sys.stderr.isatty():
        width = min(make_console(sys.stderr).width, 100)
        lines = [
            textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
            for line in lines
        ]
    if trace is not None:
        lines.insert(0, redact(trace, os.environ).rstrip())
    try:
        print("\n".join(lines), file=sys.stderr, flush=True)
    except BrokenPipeError:  # the exit code still says it
        _discard(sys.stderr)


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


def headlines(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """The metrics that say most beside the loss, without the prefix of their names."""
    return {
        name: metrics[prefix + name] for name in HEADLINES if metrics.get(prefix + name) is not None
    }


def _evaluation_text(metrics: Mapping[str, float]) -> str:
    """Loss and headlines, where the metrics have any; else all of them but counts."""
    wanted = {"eval/loss", *(f"eval/{name}" for name in HEADLINES)}
    shown = {key: value for key, value in metrics.items() if key in wanted}
    shown = shown or {key: value for key, value in metrics.items() if "/num_" not in key}
    return _named_values(shown)


def _named_values(values: Mapping[str, float]) -> str:
    return "  ".join(f"{key} {value:.4f}" for key, value in values.items())


def _short_evaluation_text(metrics: Mapping[str, float]) -> str:
    """The loss, else the first metric: what fits beside a bar."""
    key = "eval/loss" if "eval/loss" in metrics else next(iter(metrics), None)
    return "" if key is None else _named_values({key: metrics[key]})


class _StateColumn(ProgressColumn):
    """Loss, evaluation, speed and time left, as far as they are known and fit into one line."""

    def __init__(self, console: Console) -> None:
        super().__init__(Column(no_wrap=True, overflow="ellipsis"))
        self._console = console

    def render(self, task: Task) -> Text:
        parts: dict[str, str] = task.fields["parts"]
        taken = len("step ") + 2 * len(f"{task.total:.0f}") + len("/ ") + LIVE_BAR_WIDTH + len(" ")
        shown = {name: part for name, part in parts.items() if part}
        for dispensable in ("speed", "left", "evaluation", "others"):
            if len("  ".join(shown.values())) <= self._console.width - taken:
                break
            shown.pop(dispensable, None)
        return Text("  ".join(shown.values()))


class _LiveProgress:
    def __init__(self, total_steps: int, done: int, console: Console) -> None:
        self._total = total_steps
        self._speed = _Speed()
        self._evaluation = ""
        self._loss = ""
        self._others = ""
        self._count: TaskID | None = None
        self._progress = progress_for(
            console,
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            BarColumn(bar_width=LIVE_BAR_WIDTH),
            _StateColumn(console),
        )
        self._task = self._progress.add_task("step", total=total_steps, completed=done, parts={})

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
        others: Mapping[str, float] | None = None,
        tokens: int | None = None,
        seconds: float | None = None,
    ) -> None:
        self._speed.add(tokens, seconds)
        self._loss = "" if loss is None else f"loss {loss:.4f}"
        self._others = _named_values(dict(list((others or {}).items())[:1]))
        self._show(step)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._evaluation = f"{_short_evaluation_text(metrics)} @ {step}"
        self._show(step)

    def count(self, what: str, done: int, total: int) -> None:
        if self._count is None:
            self._count = self._progress.add_task(what, parts={})
        self._progress.update(self._count, completed=done, total=total)
        if done >= total:
            self._progress.remove_task(self._count)
            self._count = None

    def note(self, text: str) -> None:
        self._progress.console.print(Text(text))

    def _show(self, step: int) -> None:
        parts = {
            "loss": self._loss,
            "others": self._others,
            "evaluation": self._evaluation,
            "speed": self._speed.tokens_text(),
            "left": self._speed.left_text(self._total - step),
        }
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
        self._counted_at = time.monotonic()

    def step(
        self,
        step: int,
        *,
        loss: float | None = None,
        others: Mapping[str, float] | None = None,
        tokens: int | None = None,
        seconds: float | None = None,
    ) -> None:
        self._speed.add(tokens, seconds)
        if step % self._log_every and step not in (self._first, self._total):
            return
        parts = (
            f"step {step}/{self._total}",
            "" if loss is None else f"loss {loss:.4f}",
            _named_values(others or {}),
            self._unshown,
            self._speed.tokens_text(),
            self._speed.left_text(self._total - step),
        )
        self._print("  ".join(part for part in parts if part))
        self._unshown = ""

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        text = _evaluation_text(metrics)
        if self._extra_left > 0 or step >= self._total:
            self._extra_left -= 1
            self._print(f"step {step}/{self._total}  {text}")
        else:
            self._unshown = f"{text} @ {step}"

    def count(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._counted_at >= COUNT_EVERY_S:
            self._print(f"{what} {done}/{total}")
            self._counted_at = now

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
    """A callback `(done, total)` for a block, shown as a bar on a terminal and nowhere else.

    Inside `progress_display` it is shown there, since a terminal has room for one display.
    """
    if _displays:
        display = _displays[-1]
        yield lambda done, total: display.count(what, done, total)
        return
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
