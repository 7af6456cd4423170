"""One sweep: prepares all its trials, trains them together, and keeps a record of each."""

from __future__ import annotations

import json
import os
import shlex
import signal
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from tunebook.admission import check_limits, check_sweep_cost, needs_estimate
from tunebook.backends.base import Backend
from tunebook.compose import as_dict, compose, resumed_config
from tunebook.config import RecipeConfig, SweepConfig
from tunebook.display import make_console, short_path, tunebook_command
from tunebook.errors import ConfigError, TunebookError
from tunebook.launch import Prepare, Train, prepared, stop_signals
from tunebook.opening import LOCAL, build_backend
from tunebook.preparation import sharing_rows
from tunebook.reports.run_page import write_run_report
from tunebook.reports.sweep_page import write_sweep_report
from tunebook.runs import Preparation, redact
from tunebook.runs.starting import typed_override
from tunebook.sweeps.display import SweepDisplay
from tunebook.sweeps.driving import train_trials
from tunebook.sweeps.halving import Halving, check_halving
from tunebook.sweeps.record import (
    SWEEP_FILE,
    SweepDir,
    check_unchanged,
    claim_sweep,
    public_overrides,
    recorded_overrides,
)
from tunebook.sweeps.trial import FINAL, Trial, TrialState, labels, raise_all
from tunebook.text_tables import print_columns
from tunebook.types import StepReport

STOP_NOTE = "finishing the steps that are under way, then saving; a second signal stops at once"


class Sweep:
    """See `tunebook.compose.Sweeping`."""

    def __init__(self, recipe: str, prepare: Prepare, train: Train) -> None:
        self._recipe = recipe
        self._prepare = prepare
        self._train = train
        self._console = make_console()
        self._folder: Path | None = None
        self._resumed: SweepDir | None = None
        self._sweep: SweepDir | None = None
        self._lock = ExitStack()
        self._trials: list[Trial] = []
        self._halving: Halving | None = None
        self._begun = False
        self._dry_run = False

    def begin(self, config: DictConfig | RecipeConfig) -> Path:
        """The folder of the sweep: a new one, or that of the sweep which goes on."""
        if config.sweep.resume is not None:
            found = SweepDir.open(config.sweep.resume)
            self._lock.enter_context(found.only_writer())
            self._resumed = self._sweep = SweepDir.open(found.path)  # nobody writes it any more
            self._folder = found.path
        else:
            runs_dir = Path(os.path.expanduser(config.runs_dir))
            self._folder = claim_sweep(runs_dir, config.name or self._recipe)
        return self._folder

    def overrides(self, jobs: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
        """The jobs, or those of the sweep that goes on where nothing else is said."""
        aside = ("sweep.", "dry_run=")
        given = [each for job in jobs for each in job if not each.startswith(aside)]
        if self._resumed is None or given:
            return jobs
        return [[*each, *jobs[0]] for each in recorded_overrides(self._resumed)]

    def train(
        self, jobs: Sequence[tuple[Sequence[str], RecipeConfig]], *, first: int, whole: bool
    ) -> list[float | None]:
        """Prepares all jobs, then trains those that are not over yet."""
        settings = jobs[0][1].sweep
        if any(config.sweep != settings for _, config in jobs):
            raise ConfigError("sweep.* is about all runs together, so it cannot differ among them")
        trials = [
            self._trial(number, overrides, config)
            for number, (overrides, config) in enumerate(jobs, first)
        ]
        if self._resumed is not None:
            check_unchanged(self._resumed, self._recipe, trials, whole=whole)
            self._check_halving_unchanged(settings)
            self._take_over(self._resumed, trials)
        self._trials += trials
        texts = labels([public_overrides(trial.overrides) for trial in self._trials])
        for trial, text in zip(self._trials, texts, strict=True):
            trial.label = text
        missing = [trial for trial in trials if trial.state not in FINAL]
        self._prepare_all(missing)
        if settings.halving.rungs:
            self._prepare_halving(settings, trials, missing)
        self._show_plan(trials, missing)
        self._admit_all(missing, settings)
        if self._dry_run:
            return [None] * len(trials)
        self._record(trials, settings)
        self._train_all(missing, settings)
        return [trial.value for trial in trials]

    def end(self) -> int:
        """Shows what became of the trials; returns 1 unless all are over as they should, else 0."""
        self._lock.close()
        if self._folder is not None:
            # Hydra writes the command line there as it is, secrets too; ours is in the record.
            (self._folder / "multirun.yaml").unlink(missing_ok=True)
            if not (self._folder / SWEEP_FILE).exists():
                for folder in (self._folder, *list(self._folder.parents)[:2]):
                    with suppress(OSError):  # not empty: it holds other sweeps or runs
                        folder.rmdir()
        if self._sweep is None or not self._begun:
            return 0
        self._show_states(self._sweep)
        write_sweep_report(self._sweep)
        return 0 if all(trial.state in FINAL for trial in self._trials) else 1

    def _trial(self, number: int, overrides: Sequence[str], config: RecipeConfig) -> Trial:
        self._dry_run, config.dry_run = config.dry_run, False
        config.sweep = SweepConfig()  # a run is the same whatever sweep it belongs to
        if self._resumed is not None:
            config.runs_dir = str(self._resumed.runs_dir)
        kept = (each for each in overrides if not each.startswith(UNRECORDED))
        return Trial(number=number, overrides=tuple(kept), config=config)

    def _take_over(self, sweep: SweepDir, trials: Sequence[Trial]) -> None:
        """Gives trials the state and the run that they had when the sweep ended before."""
        known = {each.number: each for each in sweep.trials}
        for trial in trials:
            record = sweep.current(known[trial.number])
            trial.run = sweep.run_of(record)
            trial.plan_hash, trial.why = record.plan_hash, record.why
            trial.state = record.state if record.state in FINAL else TrialState.PENDING

    def _prepare_all(self, trials: Sequence[Trial]) -> None:
        """Prepares trials; what is wrong with any of them is said before anything is trained."""
        problems: dict[str, TunebookError] = {}
        with sharing_rows():
            for trial in trials:
                try:
                    self._prepare_one(trial)
                except TunebookError as error:
                    problems[trial.name] = error
        raise_all(problems)

    def _prepare_one(self, trial: Trial) -> None:
        config = trial.config
        if trial.run is not None:
            if trial.run.record.preparation is Preparation.VERIFIED:
                config = resumed_config(self._recipe, str(trial.run.path), [], {})
            else:  # it was cut off before it was whole
                trial.run = None
        task, trial.preparing_s = prepared(config, self._prepare)
        found = task.summary["hash"]
        if trial.plan_hash is not None and found != trial.plan_hash:
            raise ConfigError(
                f"its plan is now {found}, and was {trial.plan_hash} when the sweep began: the "
                "rows, their tokens or the model have changed. Put them back as they were, or "
                "begin a new sweep"
            )
        trial.task, trial.plan_hash = task, found

    def _admit_all(self, trials: Sequence[Trial], settings: SweepConfig) -> None:
        """Returns if all may start: each alone within its limits, together within the sweep's."""
        problems: dict[str, TunebookError] = {}
        for group in groups(trials):
            with closing(build_backend(group[0].config)) as backend:
                for trial in group:
                    assert trial.task is not None
                    config, summary = trial.task.config, trial.task.summary
                    asked = needs_estimate(config) or settings.max_cost is not None
                    if asked and "estimate" not in summary:
                        summary["estimate"] = asdict(backend.estimate(trial.task.workload))
                    try:
                        check_limits(config, summary)
                    except TunebookError as error:
                        problems[trial.name] = error
        raise_all(problems)
        if settings.max_cost is not None:
            tasks = [trial.task for trial in trials if trial.task is not None]
            check_sweep_cost(settings.max_cost, [task.summary["estimate"] for task in tasks])

    def _prepare_halving(
        self, settings: SweepConfig, trials: Sequence[Trial], missing: Sequence[Trial]
    ) -> None:
        if not missing:
            return
        monitor = check_halving(settings.halving, missing)
        if self._halving is None:
            self._halving = Halving(settings.halving, monitor)
        for trial in trials:
            if trial.run is not None:
                self._halving.remember(trial, trial.run)

    def _check_halving_unchanged(self, settings: SweepConfig) -> None:
        assert self._resumed is not None
        before = self._resumed.head["halving"]
        if _plain_halving(settings) != before:
            raise ConfigError(
                f"sweep.halving differs from that of {self._resumed.path} ({json.dumps(before)}); "
                "leave out everything but sweep.resume to go on with it"
            )

    def _record(self, trials: Sequence[Trial], settings: SweepConfig) -> None:
        """Writes the trials down, before the first of them begins."""
        self._begun = True
        if self._sweep is None:
            assert self._folder is not None
            halving = _plain_halving(settings)
            self._sweep = SweepDir.create(self._folder, self._recipe, halving=halving)
            self._lock.enter_context(self._sweep.only_writer())
        for trial in trials:
            # Of a trial that is over and whose run was deleted, the record is all there is.
            if trial.run is not None or trial.state not in FINAL:
                self._sweep.note(trial)

    def _train_all(self, trials: Sequence[Trial], settings: SweepConfig) -> None:
        assert self._sweep is not None
        display = SweepDisplay(self._console, len(trials))
        watch = _Recorder(self._sweep, display)
        with stop_signals() as stop, display.shown():
            stop.on_request = lambda: display.note(STOP_NOTE)
            for group in groups(trials):
                with closing(build_backend(group[0].config)) as backend:
                    train_trials(
                        self._recipe,
                        group,
                        backend,
                        train=self._train,
                        at_once=trials_at_once(group, backend, settings),
                        watch=watch,
                        stop=stop,
                        judge=self._halving,
                    )
        if stop.signal_number == signal.SIGINT:
            raise KeyboardInterrupt
        if stop.signal_number is not None:
            raise SystemExit(128 + stop.signal_number)

    def _show_plan(self, trials: Sequence[Trial], missing: Sequence[Trial]) -> None:
        over = len(trials) - len(missing)
        done = f", {over} of them over already" if over else ""
        self._say(f"{len(trials)} trials of {self._recipe}{done}:")
        tasks = [trial.task for trial in missing if trial.task is not None]
        summaries = [task.summary for task in tasks]
        if summaries:
            print_columns(
                self._console,
                {
                    "trial": [str(trial.number) for trial in missing],
                    "differs in": [trial.label for trial in missing],
                    "steps": [str(each["planned_steps"]) for each in summaries],
                    "rows": [str(each["train"]["rows"]) for each in summaries],
                    "trained": [_count(each["trainable_parameters"]) for each in summaries],
                    "plan": [each["hash"] for each in summaries],
                },
            )
        for warning in dict.fromkeys(text for each in summaries for text in each["warnings"]):
            self._say(redact(f"warning: {warning}", os.environ))
        if self._dry_run:
            self._say("Dry run: nothing was trained.")

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False)

    def _show_states(self, sweep: SweepDir) -> None:
        columns = {
            "trial": [str(trial.number) for trial in self._trials],
            "differs in": [trial.label for trial in self._trials],
            "state": [trial.state.value for trial in self._trials],
            "best": ["" if (v := trial.value) is None else f"{v:.4f}" for trial in self._trials],
            "run": [trial.run.path.name if trial.run else "" for trial in self._trials],
        }
        print_columns(self._console, columns)
        for trial in self._trials:
            if trial.why is not None:
                self._say(f"{trial.name}: {trial.why}")
        command = tunebook_command()
        where = short_path(sweep.path)
        lines = [
            f"The sweep is {where}, on one page in report.html there",
            f"  {command} runs compare {shlex.quote(where)}",
        ]
        left = [trial for trial in self._trials if trial.state not in FINAL]
        if left:
            lines += [
                "To train the one that is missing:"
                if len(left) == 1
                else f"To train the {len(left)} that are missing:",
                f"  {command} {self._recipe} --multirun {typed_override('sweep.resume', where)}",
            ]
        self._say("\n".join(lines))


def run_sweep(
    recipe: str, prepare: Prepare, train: Train, jobs: Sequence[Sequence[str]]
) -> SweepDir:
    """Trains jobs together, as `--multirun` does; returns the sweep, which has what became of each.

    Args:
        recipe: name of the recipe.
        prepare: of the recipe.
        train: of the recipe.
        jobs: override lines of each, for example `["lora.rank=4", "plan.epochs=2"]`.

    Raises:
        TunebookError: any of them cannot run; then none is trained.
    """
    configs = [compose(recipe, lines) for lines in jobs]
    sweep = Sweep(recipe, prepare, train)
    try:
        folder = sweep.begin(configs[0])
        sweep.train(list(zip(jobs, configs, strict=True)), first=0, whole=True)
    finally:
        sweep.end()
    return SweepDir.open(folder)


def _count(parameters: int | None) -> str:
    """A number of parameters; a service does not say it before it trains."""
    return "unknown" if parameters is None else f"{parameters:,}"


UNRECORDED = ("sweep.resume=", "sweep.max_at_once=", "sweep.max_cost=", "dry_run=")
"""Overrides that may differ between the starts of a sweep."""


class _Recorder:
    """A `Watch` that keeps the record and tells the display."""

    def __init__(self, sweep: SweepDir, display: SweepDisplay) -> None:
        self._sweep = sweep
        self._display = display

    def began(self, trial: Trial) -> None:
        self._sweep.note(trial)
        self._display.began(trial)

    def stepped(self, trial: Trial, report: StepReport) -> None:
        self._display.stepped(trial, report)

    def ended(self, trial: Trial) -> None:
        self._sweep.note(trial)
        self._display.ended(trial)
        if trial.run is not None and trial.state is not TrialState.FAILED and trial.run.metrics():
            write_run_report(trial.run)


def groups(trials: Sequence[Trial]) -> list[list[Trial]]:
    """The trials by the base that they share, in the order of the first of each.

    Training all weights changes the base, so such trials have it one at a time.
    """
    found: dict[str, list[Trial]] = {}
    for trial in trials:
        config = as_dict(trial.config)
        base: list[Any] = [config["model"], config["backend"], config["lora"] is None]
        found.setdefault(json.dumps(base, sort_keys=True), []).append(trial)
    return list(found.values())


def trials_at_once(trials: Sequence[Trial], backend: Backend, settings: SweepConfig) -> int:
    """How many trials of a group can be trained at a time; at least 1.

    Args:
        trials: prepared, over one base.
        backend: of the base.
        settings: of the sweep.
    """
    config = trials[0].config
    if config.lora is None:
        return 1
    summaries = [trial.task.summary for trial in trials if trial.task is not None]
    sessions = max(each.get("sessions", 1) for each in summaries)
    room = backend.capabilities.max_sessions // sessions
    if settings.max_at_once is not None:
        room = min(room, settings.max_at_once)
    if config.backend.get("_target_") == LOCAL:
        from tunebook.backends.local.base_model import resolve_device
        from tunebook.backends.local.memory import adapters_that_fit

        trained = max(each["trainable_parameters"] or 0 for each in summaries)
        fitting = adapters_that_fit(resolve_device(config.backend["device"]), trained * sessions)
        room = room if fitting is None else min(room, fitting)
    return max(room, 1)


def _plain_halving(settings: SweepConfig) -> dict[str, Any] | None:
    return asdict(settings.halving) if settings.halving.rungs else None
