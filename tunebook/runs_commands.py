"""`tunebook run` and `tunebook runs`: start runs, look at them, and wait for or stop them.

Exit codes of the commands that act on a run:

    0    done; for `wait` and `follow`: the run succeeded
    1    the run failed
    2    something to correct in what was typed, in the config or in the data
    3    the run was cancelled
    4    the run was interrupted: its process is gone
    5    `cancel` is refused: the run writes its model already
    124  `wait` has reached its --timeout; nothing was cancelled
    130  Ctrl-C, or a run in the foreground was cancelled; 143 = SIGTERM
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tunebook.runs import RunDir, RunStatus, Started

PASS_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
}
EXIT_CANCELLED, EXIT_INTERRUPTED_RUN = 3, 4

runs_app = typer.Typer(
    help="Look at runs, wait for them, stop them, try them again.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Root = Annotated[Path, typer.Option("--root", help="Folder of the runs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ONE_RUN = "Run directory, number (12 or #12) or id."
OneRun = Annotated[str, typer.Argument(metavar="RUN", help=ONE_RUN)]
Poll = Annotated[float, typer.Option(help="Seconds between two looks.", min=0.01)]
Detach = Annotated[bool, typer.Option("--detach", help="Train in a process in the background.")]


def add_run_commands(app: typer.Typer, recipe_module: Callable[[str], Any]) -> None:
    """Adds `run` and `runs` to an application.

    Args:
        app: takes the commands.
        recipe_module: the module of a recipe, by its name.
    """
    app.add_typer(runs_app, name="runs")

    @app.command("run", context_settings=PASS_ON, options_metavar="[--detach] [KEY=VALUE]...")
    def _run(
        context: typer.Context,
        recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="sft, dpo, grpo, ...")],
    ) -> None:
        """Run a recipe; --detach trains in the background and survives the terminal."""
        _exit_with(lambda: recipe_module(recipe).main(list(context.args)))

    @runs_app.command(
        "resume",
        context_settings={**PASS_ON, "allow_interspersed_args": True},
        options_metavar="[OPTIONS] [KEY=VALUE]...",
    )
    def _resume(
        context: typer.Context, run: OneRun, root: Root = Path("runs"), detach: Detach = False
    ) -> None:
        """Go on with a run exactly where it is; KEY=VALUE may make its plan longer."""
        from tunebook.runs import find_run
        from tunebook.runs.starting import override_line, require_command

        found = find_run(root, run)
        require_command(found)
        arguments = [override_line("resume", str(found.path)), *context.args]
        recipe = recipe_module(found.record.recipe)
        _exit_with(lambda: recipe.main([*arguments, *(["--detach"] if detach else [])]))

    @runs_app.command("retry")
    def _retry(
        run: OneRun,
        root: Root = Path("runs"),
        resume: Annotated[
            bool,
            typer.Option("--resume", help="Go on from its newest checkpoint."),
        ] = False,
        idempotency_key: Annotated[
            str | None, typer.Option(help="The same key a second time starts nothing.")
        ] = None,
        detach: Detach = False,
    ) -> None:
        """Train a failed or cancelled run again: same arguments, same frozen data, new attempt."""
        from tunebook.runs import find_run, retry
        from tunebook.runs.starting import (
            lease_retry,
            next_commands,
            override_line,
            require_command,
        )

        found = find_run(root, run)
        require_command(found)
        begin = retry if detach else lease_retry
        started = begin(found.path, resume=resume, idempotency_key=idempotency_key)
        print(_started_text(started, found))
        if not started.is_new:
            return
        if detach:
            print(next_commands(found))
            return
        recipe = recipe_module(found.record.recipe)
        _exit_with(lambda: recipe.main([override_line("resume", str(found.path))]))


@runs_app.command("list")
def _list(
    root: Root = Path("runs"),
    as_json: AsJson = False,
    page: Annotated[bool, typer.Option("--page", help="Only one page of them.")] = False,
    limit: Annotated[
        int | None, typer.Option(help="With --page: runs of a page, 25 unless told, 100 at most.")
    ] = None,
    cursor: Annotated[
        str | None, typer.Option(help="With --page: what the page before ended with.")
    ] = None,
) -> None:
    """List the runs of a folder; a narrow terminal gets fewer columns, a pipe all of them."""
    from tunebook.errors import ConfigError
    from tunebook.runs import list_runs, page_runs
    from tunebook.runs.listing import DEFAULT_PAGE

    if not page:
        if limit is not None or cursor is not None:
            raise ConfigError("--limit and --cursor are about pages: add --page")
        _print_runs(list_runs(root), root, as_json=as_json)
        return
    found = page_runs(root, limit=DEFAULT_PAGE if limit is None else limit, cursor=cursor)
    if as_json:
        rows = [_record_json(run) for run in found.runs]
        _print_json({"runs": rows, "total": found.total, "next_cursor": found.next_cursor})
        return
    _print_runs(found.runs, root, as_json=False)
    print(f"{len(found.runs)} of {found.total} runs.")
    if found.next_cursor is not None:
        print(f"More with --page --cursor {found.next_cursor}")


@runs_app.command("show")
def _show(run: OneRun, root: Root = Path("runs"), as_json: AsJson = False) -> None:
    """Show what a run did, with its loss curve."""
    from tunebook.display import make_console
    from tunebook.report import render_summary
    from tunebook.runs import find_run, run_status

    found = find_run(root, run)
    if as_json:
        _print_json(_status_json(run_status(found.path)))
        return
    render_summary(make_console(), found)


@runs_app.command("wait")
def _wait(
    run: OneRun,
    root: Root = Path("runs"),
    poll: Poll = 2.0,
    timeout: Annotated[
        float | None,
        typer.Option(help="Seconds after which to stop waiting; the run goes on.", min=0),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Wait until a run has ended, and exit by how it did.

    0 = it succeeded, 1 = failed, 3 = cancelled, 4 = its process is gone, 124 = --timeout is over
    and the run goes on. Ctrl-C asks the run to cancel, and says whether that is confirmed.
    """
    from tunebook.report import state_text
    from tunebook.runs import RunDir, find_run, wait

    path = find_run(root, run).path
    status = _interruptible(lambda: wait(path, poll_s=poll, timeout_s=timeout))
    if as_json:
        _print_json(_status_json(status))
    else:
        print(f"#{status.record.number} {status.record.id} {state_text(RunDir.open(path))}")
    raise typer.Exit(exit_code_of(status))


@runs_app.command("follow")
def _follow(
    run: OneRun,
    root: Root = Path("runs"),
    after: Annotated[int, typer.Option(help="Only events with a higher seq.", min=0)] = 0,
    poll: Poll = 2.0,
    as_json: AsJson = False,
) -> None:
    """Print the events of a run as they come, until it has ended; exits as `wait` does.

    With --json one event a line. Ctrl-C asks the run to cancel, and says whether that is confirmed.
    """
    from tunebook.runs import find_run, follow, run_status
    from tunebook.runs.files import to_json

    path = find_run(root, run).path

    def print_events() -> RunStatus:
        for event in follow(path, after=after, poll_s=poll):
            head = {"seq": event.seq, "attempt": event.attempt, "time": event.time}
            if as_json:
                line = to_json({**head, "type": event.type, **event.fields})
            else:
                told = "  ".join(f"{key}={value}" for key, value in event.fields.items())
                line = f"{event.seq:>4}  {event.time}  {event.type}  {told}".rstrip()
            print(line, flush=True)
        return run_status(path)

    raise typer.Exit(exit_code_of(_interruptible(print_events, cancel_path=path)))


@runs_app.command("cancel")
def _cancel(
    run: OneRun,
    root: Root = Path("runs"),
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait for the end of the run.", min=0)
    ] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Ask a run to end: it finishes its step, saves, promotes its best checkpoint, and stops.

    0 = it is cancelled, or has been asked and ends after its step; 5 = it writes its model already
    and is not interrupted.
    """
    from tunebook.display import tunebook_command
    from tunebook.runs import cancel, find_run

    path = find_run(root, run).path
    outcome = cancel(path, wait_s=timeout)
    record = outcome.status.record
    if as_json:
        _print_json({**_status_json(outcome.status), "confirmed": outcome.confirmed})
    elif outcome.confirmed:
        model = "with" if record.model_available else "without"
        print(f"#{record.number} {record.id} is cancelled, {model} a model.")
    elif outcome.status.done:
        print(f"#{record.number} {record.id} has {record.state} meanwhile.")
    else:
        print(
            f"#{record.number} {record.id} is asked to cancel; the step in flight ends first. "
            f"`{tunebook_command()} runs wait {record.number}` tells when it has."
        )


def _interruptible(act: Callable[[], Any], *, cancel_path: Path | None = None) -> Any:
    """What `act` returns; Ctrl-C asks the run to cancel and exits with 130."""
    from tunebook.runs.control import cancellation_text

    try:
        return act()
    except KeyboardInterrupt as interrupt:
        notes = getattr(interrupt, "__notes__", [])
        notes = notes if cancel_path is None else [*notes, cancellation_text(cancel_path)]
        print("\n".join(notes), file=sys.stderr)
        raise typer.Exit(130) from None


def exit_code_of(status: RunStatus) -> int:
    """What a command that waited for a run exits with."""
    from tunebook.runs import RunState
    from tunebook.runs.status import INTERRUPTED, shown

    if shown(status.record) == INTERRUPTED:
        return EXIT_INTERRUPTED_RUN
    if status.record.state is RunState.CANCELLED:
        return EXIT_CANCELLED
    return 0 if status.succeeded else 1


def _exit_with(main: Callable[[], int | None]) -> None:
    try:
        code = main()
    except KeyboardInterrupt as error:
        from tunebook.display import report_error

        code = report_error(error)
    raise typer.Exit(code or 0)


def _started_text(started: Started, run: RunDir) -> str:
    attempt = started.attempt
    begins = (
        f"goes on from step {attempt.resumed_from_step}"
        if attempt.resumed_from_step
        else "begins at step 0"
    )
    said = "new" if started.is_new else f"known by its key: {attempt.state}"
    return f"#{run.record.number} {run.record.id} attempt {attempt.number} ({said}) {begins}."


def _record_json(run: RunDir) -> dict[str, Any]:
    """What `run.json` holds, as it is now; reads nothing else, for long lists."""
    from tunebook.runs.record import record_to_json
    from tunebook.runs.status import observed, shown

    record = observed(run)
    return {**record_to_json(record), "path": str(run.path), "shown_state": shown(record)}


def _status_json(status: RunStatus) -> dict[str, Any]:
    from tunebook.runs.record import record_to_json
    from tunebook.runs.status import shown

    return {
        **record_to_json(status.record),
        "path": str(status.path),
        "shown_state": shown(status.record),
        "steps": status.steps,
        "planned_steps": status.planned_steps,
        "total_s": status.total_s,
    }


def _print_runs(runs: Sequence[RunDir], root: Path, *, as_json: bool) -> None:
    from tunebook.display import make_console
    from tunebook.runs.status import shown_state
    from tunebook.text_tables import columns_fit, print_columns

    if as_json:
        _print_json([_record_json(run) for run in runs])
        return
    if not runs:
        print(f"No runs in {root.absolute()}.")
        return
    columns = {
        "number": [f"#{run.record.number}" for run in runs],
        "id": [run.record.id for run in runs],
        "run": [f"{run.record.recipe}/{run.path.name}" for run in runs],
        "state": [shown_state(run) for run in runs],
        "steps": [_steps_cell(run) for run in runs],
        "best": [_best_cell(run) for run in runs],
        "model": ["yes" if run.record.model_available else "no" for run in runs],
    }
    layouts = [columns, {**columns, "best": [_short_best_cell(run) for run in runs]}]
    for heading in ("best", "model", "steps", "id", "state"):
        layouts.append({key: cells for key, cells in layouts[-1].items() if key != heading})
    console = make_console()
    fitting = next((one for one in layouts if columns_fit(console, one)), layouts[-1])
    print_columns(console, fitting)


def _print_json(value: Any) -> None:
    from tunebook.runs.files import to_json

    sys.stdout.write(to_json(value, indent=2) + "\n")


def _steps_cell(run: RunDir) -> str:
    from tunebook.runs.status import run_status

    outcome = run.record.outcome
    if outcome is not None:
        return f"{outcome.steps}/{outcome.planned_steps}"
    if not run.record.attempts:
        return ""
    status = run_status(run.path)
    return f"{status.steps}/{status.planned_steps}"


def _best_cell(run: RunDir) -> str:
    evaluation = run.record.evaluation
    if evaluation is None or evaluation.best is None:
        return ""
    return f"{evaluation.metric} {evaluation.best:.4f} @ {evaluation.best_step}"


def _short_best_cell(run: RunDir) -> str:
    evaluation = run.record.evaluation
    return "" if evaluation is None else _best_cell(run).removeprefix(f"{evaluation.metric} ")
