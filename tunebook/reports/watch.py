"""A run or a sweep in the terminal, drawn anew as it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from tunebook.curves import curve_of_run
from tunebook.display import can_draw, duration_text, headlines
from tunebook.reports.charts import throughput
from tunebook.runs.control import events
from tunebook.runs.directory import RunDir
from tunebook.runs.status import run_status, shown
from tunebook.sweeps.compare import compare_sweep
from tunebook.sweeps.record import SweepDir
from tunebook.sweeps.trial import TrialState
from tunebook.text_tables import add_line, as_text, two_columns

CURVE_WIDTH, CURVE_HEIGHT = 100, 12
RECENT_STEPS = 20
"""Whose median is the speed."""
RECENT_EVENTS = 3
BAR = 30


def watch_run(path: Path, console: Console, *, poll_s: float) -> None:
    """Shows a run until it has ended; Ctrl-C stops watching, and the run goes on."""
    _watch(console, poll_s, lambda: (run_view(path, console), run_status(path).done))


def watch_sweep(path: Path, console: Console, *, poll_s: float) -> None:
    """Shows a sweep until none of its trials is waited for; Ctrl-C stops watching."""
    _watch(console, poll_s, lambda: (sweep_view(path), _is_over(SweepDir.open(path))))


def run_view(path: Path, console: Console) -> RenderableType:
    """How a run stands: progress, curve, newest metrics and events."""
    status, run = run_status(path), RunDir.open(path)
    record, rows, unicode = status.record, run.metrics(), can_draw(console)
    table = two_columns()
    add_line(table, "run", f"#{record.number} {record.recipe}/{path.name}", style="bold")
    done = (
        f"step {status.steps}"
        if status.planned_steps is None
        else _progress(status.steps, status.planned_steps, unicode=unicode)
    )
    add_line(table, shown(record), done)
    speeds = sorted(speed for _, speed in throughput(rows)[-RECENT_STEPS:])
    seconds = sorted(r["time/step_s"] for r in rows[-RECENT_STEPS:] if r.get("time/step_s"))
    if seconds:
        parts = [f"{speeds[len(speeds) // 2]:,.0f} tokens/s"] if speeds else []
        median = seconds[len(seconds) // 2]
        parts.append(f"{median:.3g} s a step")
        if not status.done and status.planned_steps is not None:
            left = (status.planned_steps - status.steps) * median
            parts.append(f"about {duration_text(left)} left")
        add_line(table, "speed", ", ".join(parts))
    if rows:
        newest = rows[-1]
        loss = newest.get("train/loss")
        values = ({} if loss is None else {"loss": loss}) | headlines(newest, "train/")
        add_line(table, "train", "  ".join(f"{name} {v:.4f}" for name, v in values.items()))
    evaluation = record.evaluation
    if evaluation is not None and evaluation.best is not None:
        best = f"{evaluation.metric} {evaluation.best:.4f} @ {evaluation.best_step}"
        times = "evaluation" if evaluation.count == 1 else "evaluations"
        add_line(table, "best", f"{best}, {evaluation.count} {times}")
    if record.failure is not None:
        add_line(table, "why", record.failure.message, style="red")
    for number, event in enumerate(events(path)[-RECENT_EVENTS:]):
        told = "  ".join(f"{key}={value}" for key, value in event.fields.items())
        add_line(table, "" if number else "events", f"{event.time[11:19]} {event.type}  {told}")
    width = min(console.width, CURVE_WIDTH)
    curve = curve_of_run(rows, width=width, height=CURVE_HEIGHT, unicode=unicode) if rows else ""
    return Group(table, Text(f"\n{curve}" if curve else ""))


def sweep_view(path: Path) -> RenderableType:
    """How the trials of a sweep stand, the best first."""
    sweep = SweepDir.open(path)
    labels = {each.number: each.label for each in sweep.trials}
    compared = compare_sweep(sweep)
    table = two_columns()
    table.add_column(no_wrap=True)
    table.add_row("sweep", Text(path.name, style="bold"), "")
    for row in compared.rows:
        best = row[compared.best]
        state = row["state"] + ("" if best is None else f"  {best:.4f} @ {row['best step']}")
        table.add_row(f"trial {row['trial']}", Text(labels[row["trial"]]), Text(state))
    return table


def _watch(
    console: Console, poll_s: float, look: Callable[[], tuple[RenderableType, bool]]
) -> None:
    view, over = look()
    if not console.is_terminal or console.is_dumb_terminal:
        _watch_plainly(console, poll_s, look)
        return
    with Live(view, console=console, auto_refresh=False) as live:
        while not over:
            time.sleep(poll_s)
            view, over = look()
            live.update(view, refresh=True)


def _watch_plainly(
    console: Console, poll_s: float, look: Callable[[], tuple[RenderableType, bool]]
) -> None:
    """Where nothing can be drawn over: every view that differs from the one before."""
    before = ""
    while True:
        view, over = look()
        text = as_text(view, CURVE_WIDTH)
        if text != before:
            console.print(Text(text), soft_wrap=True)
        if over or console.quiet:  # quiet: its reader has gone away
            return
        before = text
        time.sleep(poll_s)


def _progress(steps: int, planned: int, *, unicode: bool) -> str:
    share = min(steps / planned, 1.0) if planned else 1.0
    full, empty = ("█", "░") if unicode else ("#", ".")
    filled = round(share * BAR)
    return f"{full * filled}{empty * (BAR - filled)} step {steps} of {planned}, {share:.0%}"


def _is_over(sweep: SweepDir) -> bool:
    """Whether no trial runs, and none waits for a process that drives the sweep."""
    states = {sweep.current(each).state for each in sweep.trials}
    if TrialState.RUNNING in states:
        return False
    return TrialState.PENDING not in states or not sweep.is_driven()
