"""`tunebook report` and `tunebook runs watch`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunebook.runs_commands import Poll, Root, exit_code_of, runs_app

if TYPE_CHECKING:
    from tunebook.runs import RunDir
    from tunebook.sweeps.record import SweepDir

RUN_OR_SWEEP = "Run directory, number (12 or #12) or id; or the folder of a sweep, or its name."
RunOrSweep = Annotated[str, typer.Argument(metavar="RUN | SWEEP", help=RUN_OR_SWEEP)]


def add_report_commands(app: typer.Typer) -> None:
    """Adds `report` to an application."""
    app.command("report")(_report)


def _report(
    what: RunOrSweep,
    root: Root = Path("runs"),
    png: Annotated[
        bool, typer.Option("--png", help="Draw every chart as figures/<name>.png too.")
    ] = False,
) -> None:
    """Write report.html of a run or a sweep anew, and with --png its charts for a paper."""
    from tunebook.reports.charts import run_charts
    from tunebook.reports.pictures import FIGURES, write_pictures
    from tunebook.reports.run_page import write_run_report
    from tunebook.reports.sweep_page import sweep_charts, write_sweep_report
    from tunebook.sweeps.compare import compare_sweep
    from tunebook.sweeps.record import SweepDir

    found = _found(root, what)
    if isinstance(found, SweepDir):
        for trial in found.trials:
            run = found.run_of(trial)
            if run is not None and run.metrics():
                write_run_report(run)
        print(write_sweep_report(found))
        charts = sweep_charts(found, compare_sweep(found)) if png else []
    else:
        print(write_run_report(found))
        evaluation = found.record.evaluation
        charts = run_charts(found.metrics(), evaluation=evaluation) if png else []
    for path in write_pictures(charts, found.path / FIGURES) if png else []:
        print(path)


@runs_app.command("watch")
def _watch(what: RunOrSweep, root: Root = Path("runs"), poll: Poll = 1.0) -> None:
    """Watch a run or a sweep in the terminal until it has ended; exits as `wait` does.

    Ctrl-C stops watching and nothing else.
    """
    from tunebook.display import make_console
    from tunebook.reports.watch import watch_run, watch_sweep
    from tunebook.runs import run_status
    from tunebook.sweeps.record import SweepDir

    found = _found(root, what)
    try:
        if isinstance(found, SweepDir):
            watch_sweep(found.path, make_console(), poll_s=poll)
            return
        watch_run(found.path, make_console(), poll_s=poll)
    except KeyboardInterrupt:
        print("It goes on.")
        raise typer.Exit(130) from None
    raise typer.Exit(exit_code_of(run_status(found.path)))


def _found(root: Path, text: str) -> RunDir | SweepDir:
    from tunebook.runs import find_run
    from tunebook.sweeps.record import SWEEP_FILE, SWEEPS, SweepDir

    for path in (Path(text).expanduser(), root / SWEEPS / text):
        if (path / SWEEP_FILE).is_file():
            return SweepDir.open(path)
    return find_run(root, text)
