"""Runs a recipe from the command line: prepare, plan, train under a display, sum up.

A recipe hands over its `prepare` and `train`; nothing here knows an algorithm.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tunebook.admission import check_limits, needs_estimate
from tunebook.backends.base import Backend
from tunebook.compose import Sweeping, compose, escaped, hydra_main
from tunebook.config import RecipeConfig
from tunebook.display import (
    StepProgress,
    headlines,
    make_console,
    progress_display,
    report_error,
)
from tunebook.errors import ConfigError
from tunebook.opening import build_backend
from tunebook.planning import check_plan_hash
from tunebook.preparation import PreparedRows, freeze, remember_split
from tunebook.processes import num_processes
from tunebook.runs import (
    RunDir,
    RunState,
    Started,
    newest_checkpoint,
    only_writer,
    redact_config,
    redacted_output,
    start,
    terminable,
)
from tunebook.runs.attempts import leased_seconds
from tunebook.runs.files import check_writable
from tunebook.runs.listing import flattened
from tunebook.runs.starting import ending_lease, next_commands, resume_text
from tunebook.types import StepReport, Workload

if TYPE_CHECKING:
    from types import FrameType

    from transformers import PreTrainedTokenizerBase

    from tunebook.evaluate import Monitor
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
    def eval_data(self) -> RenderedRows | None: ...
    @property
    def monitor(self) -> Monitor | None: ...
    @property
    def summary(self) -> dict[str, Any]: ...
    @property
    def workload(self) -> Workload: ...


Prepare = Callable[[Any], Any]
Train = Callable[[Any, Backend, RunDir], Generator[StepReport]]

DETACH = "--detach"
STOP_NOTE = "finishing this step, then saving; a second signal stops at once"


def main(recipe: str, prepare: Prepare, train: Train, argv: Sequence[str] | None) -> int:
    """Runs a recipe with the arguments of a command line; returns the exit code.

    0 = done, 1 = the run failed, 2 = something to correct in the config or the data, 130 and 143 =
    stopped by Ctrl-C or SIGTERM, 130 also by `tunebook runs cancel`. `--debug` shows tracebacks,
    `--detach` has a process in the background train; all else goes to Hydra. Where a launcher has
    started several processes, the first one runs the recipe and the others serve it.
    """
    if num_processes() > 1:
        from tunebook.backends.local.distributed import run_together

        return run_together(lambda: run_recipe(recipe, prepare, train, argv))
    return run_recipe(recipe, prepare, train, argv)


def run_recipe(recipe: str, prepare: Prepare, train: Train, argv: Sequence[str] | None) -> int:
    """As `main`, in this process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    in_background = DETACH in arguments
    run_one = detach if in_background else execute
    arguments = [each for each in arguments if each not in ("--debug", DETACH)]
    if {"--help", "-h"} & set(arguments):
        from tunebook.recipe_help import print_recipe_help

        print_recipe_help(recipe, arguments)
        return 0
    try:
        with terminable(), redacted_output():
            if in_background:
                check_detachable(arguments)
            return hydra_main(
                recipe,
                lambda config: run_one(recipe, config, prepare, train),
                arguments,
                sweep=sweep_of(recipe, prepare, train, arguments),
            )
    except (Exception, KeyboardInterrupt) as error:
        return report_error(error, debug=debug)


def sweep_of(
    recipe: str, prepare: Prepare, train: Train, arguments: Sequence[str]
) -> Sweeping | None:
    """What trains the runs of `--multirun` together; None = there is one run."""
    if not {"--multirun", "-m"} & set(arguments):
        return None
    from tunebook.sweeps.sweep import Sweep

    return Sweep(recipe, prepare, train)


def execute(recipe: str, config: RecipeConfig, prepare: Prepare, train: Train) -> int:
    """Prepares one config and, unless it is a dry run, trains it; returns the exit code."""
    with ending_lease(config.resume):
        task, preparing_s = prepared(config, prepare)
        console = make_console()
        with closing(build_backend(config)) as backend:
            admit(task, backend)
            if config.dry_run:
                console.print(dry_run_text(recipe, task, preparing_s), soft_wrap=True)
                return 0
            run = start_run(recipe, task, preparing_s)
            return drive(task, train(task, backend, run), run)


def detach(recipe: str, config: RecipeConfig, prepare: Prepare, train: Train) -> int:
    """Prepares one config and has it trained by a process in the background; returns 0."""
    if config.dry_run:
        return execute(recipe, config, prepare, train)
    refuse_secrets(config)
    task, preparing_s = prepared(config, prepare)
    with closing(build_backend(config)) as backend:
        admit(task, backend)
    started = start(start_run(recipe, task, preparing_s).path)
    make_console().print(detached_text(started), soft_wrap=True)
    return 0


def check_detachable(arguments: Sequence[str]) -> None:
    """Returns if a command line describes one run of one process.

    Raises:
        ConfigError: it does not.
    """
    if {"-m", "--multirun"} & set(arguments):
        raise ConfigError(f"{DETACH} starts one run, and --multirun makes several; leave one out")
    if num_processes() > 1:
        raise ConfigError(f"{DETACH} starts one process, and torchrun has started several")


def refuse_secrets(config: RecipeConfig) -> None:
    """Returns if another process can read the whole config from the run directory.

    Raises:
        ConfigError: it holds a secret, which is not written; names the keys.
    """
    plain = flattened(escaped(config))
    kept = flattened(redact_config(escaped(config), os.environ))
    hidden = [key for key in plain if plain[key] != kept.get(key)]
    if hidden:
        raise ConfigError(
            f"{', '.join(hidden)}: holds a secret, which no file of the run keeps, so a process in "
            f"the background would not have it. Take it from the environment, or leave out {DETACH}"
        )


def detached_text(started: Started) -> str:
    """What a person does next with a run that was started in the background."""
    run = RunDir.open(started.path)
    return (
        f"Run #{run.record.number} {run.record.id} goes on in the background (process "
        f"{started.attempt.pid}): {run.path}\n{next_commands(run)}"
    )


def admit(task: RecipeTask, backend: Backend) -> None:
    """Shows the plan of a task, and returns if the run may start.

    Raises:
        AdmissionError: it would exceed one of its limits.
    """
    from tunebook.report import render_plan

    if needs_estimate(task.config) and "estimate" not in task.summary:
        task.summary["estimate"] = asdict(backend.estimate(task.workload))
    render_plan(make_console(), task.summary)
    check_limits(task.config, task.summary)


def prepared(config: RecipeConfig, prepare: Prepare) -> tuple[Any, float]:
    """The task of a config, and the seconds that preparing it took."""
    started = time.monotonic()
    task: RecipeTask = prepare(config)
    check_plan_hash(config, task.summary)
    return task, time.monotonic() - started


def dry_run_text(recipe: str, task: RecipeTask, preparing_s: float) -> str:
    """What a dry run leaves: a run that can be started as it is; of a resumed run, nothing."""
    if task.config.resume is not None:
        return "Dry run: nothing was trained, and the run is as it was."
    run = plan_run(recipe, task, preparing_s)
    return (
        f"Dry run: nothing was trained. The plan is {run.path / 'plan.json'}\n"
        f"To train exactly this:\n  {resume_text(run, path=str(run.path))}"
    )


def start_run(recipe: str, task: RecipeTask, preparing_s: float | None = None) -> RunDir:
    """The run directory of a task that is about to be trained.

    A resumed run keeps its directory; a plan that changed is recorded beside the former one.

    Args:
        recipe: name of the recipe.
        task: what its `prepare` returned.
        preparing_s: seconds that took; None = not measured, and nothing is recorded.

    Raises:
        AdmissionError: it would exceed one of its limits, or not fit onto the disk.
        ConfigError: the run that is resumed is of another recipe.
        RunError: another process is training the run, or another run has fixed the split otherwise
            since this one was prepared.
    """
    check_limits(task.config, task.summary)
    if task.config.resume is None:
        remember_split(task.rows, task.config)
        return plan_run(recipe, task, preparing_s)
    run = RunDir.open(task.config.resume)
    if run.record.recipe != recipe:
        raise ConfigError(
            f"resume={run.path}: is a run of the recipe {run.record.recipe!r}, so {recipe!r} "
            "cannot go on with it; start_from takes its weights"
        )
    has_trained = newest_checkpoint(run.checkpoints()) is not None
    remember_split(task.rows, task.config, has_trained=has_trained)
    with only_writer(run):
        queued_s = leased_seconds(run.record)
        if queued_s is not None:
            run.add_time("queued_s", max(queued_s - (preparing_s or 0.0), 0.0))
        if preparing_s is not None:
            run.add_time("preparing_s", preparing_s)
        config = escaped(replace(task.config, resume=None))
        before = run.read_plan()
        plan = {**task.summary, "data_fingerprint": before["data_fingerprint"]}
        if plan["hash"] == before["hash"]:
            plan = before
        if plan is not before or config != run.read_config():
            run.amend_plan(config, plan)
    return run


def plan_run(recipe: str, task: RecipeTask, preparing_s: float | None) -> RunDir:
    """A new run directory with config, plan, split, and frozen rows and tokens in it."""
    from tunebook.reports.mask_sample import write_mask_sample

    config = replace(task.config, dry_run=False)
    run = RunDir.create(Path(config.runs_dir), recipe, config.name)
    with run.preparing():
        run.write_config(escaped(config))
        fingerprint = freeze(task.rows, run, train_data=task.train_data, eval_data=task.eval_data)
        run.write_plan({**task.summary, "data_fingerprint": fingerprint})
        run.write_split(task.rows.split)
        write_mask_sample(run, task.rows.train, task.train_data, task.tokenizer)
        if preparing_s is not None:
            run.add_time("preparing_s", preparing_s)
    return run


def drive(task: RecipeTask, reports: Generator[StepReport], run: RunDir) -> int:
    """Drains a training under a live display and prints what came of it; returns the exit code.

    However it ends, the training is closed on return, so that the backend may be closed.
    """
    from tunebook.report import render_summary, rollouts_table, samples_table
    from tunebook.reports.run_page import write_run_report

    console = make_console()
    newest = newest_checkpoint(run.checkpoints())
    planned = int(task.summary["planned_steps"])
    try:
        with stop_signals() as stop:
            done = newest.step if newest else 0
            with progress_display(planned, done=done, console=console) as display:
                stop.on_request = lambda: display.note(STOP_NOTE)
                with closing(reports):
                    for report in reports:
                        show(report, display)
                        if stop.signal_number is not None:
                            reports.close()
    except BaseException:
        console.print(failure_text(run), soft_wrap=True)
        raise
    rollouts = run.last_rollouts()
    if rollouts:
        first = [each for each in rollouts if each["prompt"] == rollouts[0]["prompt"]]
        console.print("What the last step was trained on, for the first of its prompts:")
        console.print(rollouts_table(first))
    samples = run.samples()
    if len(samples) > 1:
        before, after = min(samples), max(samples)
        console.print(f"Answers before training and at step {after}{_drawn(run)}:")
        console.print(samples_table(samples[before], samples[after]))
    render_summary(console, run)
    write_run_report(run)
    if run.record.state is RunState.CANCELLED:
        return 128 + (stop.signal_number or signal.SIGINT)
    return 0


def _drawn(run: RunDir) -> str:
    """How the answers of a run were drawn, to follow a comma; empty where its config has no say."""
    temperature = run.read_config()["samples"].get("temperature")
    if temperature is None:
        return ""
    return ", greedily" if temperature == 0 else f", drawn at temperature {temperature:g}"


def failure_text(run: RunDir) -> str:
    """What is left of a run that ended with an exception, and how to go on."""
    newest = newest_checkpoint(run.checkpoints())
    text = f"The run ended here. Its record is {run.path}"
    if newest is None:
        return f"{text}; no checkpoint was saved."
    return f"{text}\nTo go on from step {newest.step}:\n  {resume_text(run, path=str(run.path))}"


def show(report: StepReport, display: StepProgress) -> None:
    """Shows one step on the display."""
    display.step(
        report.step,
        loss=report.metrics.get("train/loss"),
        others=headlines(report.metrics, "train/"),
        tokens=int(report.metrics["train/tokens"]),
        seconds=report.metrics["time/step_s"],
    )
    if report.evaluation is not None:
        display.evaluation(report.step, report.evaluation)
    for note in report.notes:
        display.note(note)


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
            if number == signal.SIGTERM:
                raise SystemExit(128 + number)
            raise KeyboardInterrupt
        request.signal_number = number
        # It may have come within a print, which cannot be entered twice; the note is then lost, and
        # the step is not.
        with suppress(OSError, RuntimeError):
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
    """Shows the rows of a config token by token, and lints them; returns 1 if a lint failed.

    Raises:
        ConfigError: `html` cannot be written; said before anything is prepared.
    """
    from tunebook.inspect import inspect_rendered

    if html is not None:
        if html.is_dir():
            raise ConfigError(f"--html {html}: is a folder; name a file in it")
        check_writable(html.parent, f"--html {html}")
    task: RecipeTask = prepare(compose(recipe, overrides))
    if skipped := task.summary["rows_skipped"]:
        make_console().print(
            f"{skipped} of {task.summary['rows_read']} rows are not here: they cannot be used, and "
            "data.on_bad_row=skip leaves them out. Without it they are named",
            style="yellow",
            soft_wrap=True,
        )
    return inspect_rendered(
        task.rows.train,
        task.train_data,
        task.tokenizer,
        limit=limit,
        html=html,
        console=make_console(),
    )
