"""Runs a recipe from the command line: prepare, plan, train under a display, sum up.

A recipe hands over its `prepare` and `train`; nothing here knows an algorithm.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tunebook.backends.base import Backend
from tunebook.compose import as_dict, compose, hydra_main
from tunebook.config import RecipeConfig
from tunebook.display import StepProgress, make_console, progress_display, report_error
from tunebook.opening import build_backend
from tunebook.planning import check_plan_hash
from tunebook.preparation import PreparedRows, freeze_rows
from tunebook.runs import Preparation, RunDir, RunState, newest_checkpoint
from tunebook.types import StepReport, Workload

if TYPE_CHECKING:
    from types import FrameType

    from transformers import PreTrainedTokenizerBase

    from tunebook.render import RenderedRows


class RecipeTask(Protocol):
    """What every recipe's `prepare` returns, as far as launching it needs to know."""

    @property
    def config(self) -> RecipeConfig: ...
    @property
    def rows(self) -> PreparedRows: ...
    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...
    @property
    def train_data(self) -> RenderedRows: ...
    @property
    def summary(self) -> dict[str, Any]: ...
    @property
    def workload(self) -> Workload: ...


Prepare = Callable[[Any], Any]
Train = Callable[[Any, Backend, RunDir], Generator[StepReport]]

STOP_NOTE = "finishing this step, then saving; a second signal stops at once"


def main(recipe: str, prepare: Prepare, train: Train, argv: Sequence[str] | None) -> int:
    """Runs a recipe with the arguments of a command line; returns the exit code.

    0 = done, 1 = the run failed, 2 = something to correct in the config or the data, 130 and 143 =
    stopped by Ctrl-C or SIGTERM. `--debug` shows tracebacks; all else goes to Hydra.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [each for each in arguments if each != "--debug"]
    if {"--help", "-h"} & set(arguments):
        from tunebook.recipe_help import print_recipe_help

        print_recipe_help(recipe)
        return 0
    try:
        return hydra_main(recipe, lambda config: execute(recipe, config, prepare, train), arguments)
    except (Exception, KeyboardInterrupt) as error:
        return report_error(error, debug=debug)


def execute(recipe: str, config: RecipeConfig, prepare: Prepare, train: Train) -> int:
    """Prepares one config and, unless it is a dry run, trains it; returns the exit code."""
    from tunebook.report import render_plan

    console = make_console()
    started = time.monotonic()
    task: RecipeTask = prepare(config)
    check_plan_hash(config, task.summary)
    preparing_s = time.monotonic() - started
    with closing(build_backend(config)) as backend:
        if config.dry_run:
            if config.plan.probe:
                task.summary["estimate"] = asdict(backend.estimate(task.workload))
            render_plan(console, task.summary)
            run = start_run(recipe, task, preparing_s)
            console.print(
                f"Dry run: nothing was trained. The plan is {run.path / 'plan.json'}\n"
                f"To train exactly this: python -m recipes.{recipe} resume={run.path}",
                soft_wrap=True,
            )
            return 0
        render_plan(console, task.summary)
        run = start_run(recipe, task, preparing_s)
        return drive(task, train(task, backend, run), run)


def start_run(recipe: str, task: RecipeTask, preparing_s: float = 0.0) -> RunDir:
    """The run directory of a task, with config, plan, split and frozen rows in it.

    A resumed run keeps its directory; a plan that changed is recorded beside the former one.

    Args:
        recipe: name of the recipe.
        task: what its `prepare` returned.
        preparing_s: seconds that took.
    """
    config = replace(task.config, resume=None, dry_run=False)
    if task.config.resume is not None:
        run = RunDir.open(task.config.resume)
        before = run.read_plan()
        plan = {**task.summary, "data_fingerprint": before["data_fingerprint"]}
        if plan["hash"] == before["hash"]:
            plan = before
        if plan is not before or as_dict(config) != run.read_config():
            run.amend_plan(config, plan)
        return run
    run = RunDir.create(Path(config.runs_dir), recipe, config.name)
    run.set_preparation(Preparation.SNAPSHOTTING)
    run.write_config(config)
    fingerprint = freeze_rows(task.rows, run.data_dir)
    run.write_plan({**task.summary, "data_fingerprint": fingerprint})
    run.write_split(task.rows.split)
    run.set_preparation(Preparation.VERIFIED)
    run.add_time("preparing_s", preparing_s)
    return run


def drive(task: RecipeTask, reports: Generator[StepReport], run: RunDir) -> int:
    """Drains a training under a live display and prints what came of it; returns the exit code."""
    from tunebook.html_report import write_html_report
    from tunebook.report import render_summary, samples_table

    console = make_console()
    newest = newest_checkpoint(run.checkpoints())
    planned = int(task.summary["planned_steps"])
    try:
        with stop_signals() as stop:
            done = newest.step if newest else 0
            with progress_display(planned, done=done, console=console) as display:
                stop.on_request = lambda: display.note(STOP_NOTE)
                for report in reports:
                    show(report, display)
                    if stop.signal_number is not None:
                        reports.close()
    finally:
        samples = run.samples()
        if len(samples) > 1:
            before, after = min(samples), max(samples)
            console.print(f"Answers before training and at step {after}:")
            console.print(samples_table(samples[before], samples[after]))
        render_summary(console, run)
    write_html_report(run)
    if run.record.state is RunState.CANCELLED:
        return 128 + (stop.signal_number or signal.SIGINT)
    return 0


def show(report: StepReport, display: StepProgress) -> None:
    """Shows one step on the display."""
    display.step(
        report.step,
        loss=report.metrics.get("train/loss"),
        tokens=int(report.metrics["train/tokens"]),
        seconds=report.metrics["time/step_s"],
    )
    if report.evaluation is not None:
        display.evaluation(report.step, report.evaluation)


@dataclass
class StopRequest:
    """Whether somebody asked the run to stop."""

    signal_number: int | None = None
    """SIGINT or SIGTERM, once it came."""
    on_request: Callable[[], None] = lambda: None


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Turns the first SIGINT or SIGTERM into a request; the second one acts at once.

    A step is never torn: the loop looks at the request between steps. Outside the main thread
    signals stay as they are.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if request.signal_number is not None:
            raise KeyboardInterrupt
        request.signal_number = number
        request.on_request()

    before = {each: signal.signal(each, ask) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def inspect(
    recipe: str, overrides: Sequence[str], prepare: Prepare, *, html: Path | None, limit: int
) -> int:
    """Shows the rows of a config token by token, and lints them; returns 1 if a lint failed."""
    from tunebook.inspect import inspect_rendered

    task: RecipeTask = prepare(compose(recipe, overrides))
    return inspect_rendered(
        task.rows.train,
        task.train_data,
        task.tokenizer,
        limit=limit,
        html=html,
        console=make_console(),
    )
