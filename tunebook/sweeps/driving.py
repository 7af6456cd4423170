"""Drives several trainings at once over one backend, each in a thread of its own."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import Protocol

from tunebook.backends.base import Backend
from tunebook.backends.gathering import Gathering
from tunebook.errors import RunCancelled, TunebookError
from tunebook.launch import StopRequest, Train, start_run
from tunebook.runs import RunDir, cancellation, redact
from tunebook.sweeps.trial import STATE_OF_RUN, STOPPED_EVENT, Trial, TrialState
from tunebook.types import StepReport

LAST_WORDS_S = 10.0
"""Seconds that trials have to write down their end after a second interrupt."""


class Watch(Protocol):
    """Is told what happens; called by the threads of the trials, one call at a time."""

    def began(self, trial: Trial) -> None:
        """A trial has its run directory and begins to train."""
        ...

    def stepped(self, trial: Trial, report: StepReport) -> None:
        """A trial has made a step."""
        ...

    def ended(self, trial: Trial) -> None:
        """A trial is over; its state says how."""
        ...


class Judge(Protocol):
    """Decides after a step whether a trial goes on."""

    def is_due(self, trial: Trial, report: StepReport) -> bool:
        """Whether the step is one after which it decides."""
        ...

    def enter(self, trial: Trial, report: StepReport) -> None:
        """Takes the result of a step that is due."""
        ...

    def unjudged_step(self, trial: Trial, run: RunDir) -> int | None:
        """The step from which a resumed trial goes on, if it was killed before its verdict."""
        ...

    def verdict(self, trial: Trial, step: int) -> str | None:
        """Why the trial ends after a step that was entered; None = it goes on."""
        ...


def train_trials(
    recipe: str,
    trials: Sequence[Trial],
    backend: Backend,
    *,
    train: Train,
    at_once: int,
    watch: Watch,
    stop: StopRequest,
    judge: Judge | None = None,
) -> None:
    """Trains trials to their end, `at_once` of them at a time; what one raises stays with it.

    Their numbers are those of each trained alone: they only wait for each other, so that what they
    ask of the backend meets. A request to stop lets every trial finish its step and save; those
    that have not begun stay pending.

    Args:
        recipe: name of the recipe.
        trials: prepared.
        backend: of all of them.
        train: of the recipe.
        at_once: most trials at a time.
        watch: shows and records what happens.
        stop: asked after each step of each trial.
        judge: ends trials early; None = none are.
    """
    waiting = deque(trials)
    gathering = Gathering()
    driver = _Driver(recipe, backend, train, watch, stop, judge, gathering)
    threads: list[threading.Thread] = []
    try:
        while True:
            while waiting and gathering.num_members < at_once and stop.signal_number is None:
                trial = waiting.popleft()
                if driver.begin(trial):
                    work = partial(driver.run, trial)
                    threads.append(gathering.start(work, name=f"trial {trial.number}"))
            if not gathering.num_members:
                break
            gathering.serve()
    except BaseException:
        gathering.interrupt()
        for thread in threads:
            thread.join(LAST_WORDS_S)
        raise
    if driver.problems:
        raise driver.problems[0]


class _Driver:
    def __init__(
        self,
        recipe: str,
        backend: Backend,
        train: Train,
        watch: Watch,
        stop: StopRequest,
        judge: Judge | None,
        gathering: Gathering,
    ) -> None:
        self._recipe = recipe
        self._backend = backend
        self._train = train
        self._watch = watch
        self._stop = stop
        self._judge = judge
        self._gathering = gathering
        self._one_call = threading.Lock()
        self.problems: list[Exception] = []
        """What the watch raised at the end of a trial."""

    def begin(self, trial: Trial) -> bool:
        """Gives a trial its run directory, in the order of trials; returns whether it can train."""
        assert trial.task is not None
        try:
            trial.run = start_run(self._recipe, trial.task, trial.preparing_s)
        except Exception as error:
            trial.state, trial.why = TrialState.FAILED, failure_text(error)
            self._end(trial)
            return False
        trial.state = TrialState.RUNNING
        with self._one_call:
            self._watch.began(trial)
        return True

    def run(self, trial: Trial) -> None:
        """Trains one trial that has begun, in a thread of the gathering."""
        try:
            self._train_trial(trial)
        except (KeyboardInterrupt, SystemExit):
            trial.state, trial.why = TrialState.CANCELLED, "interrupted"
        except RunCancelled as cancelled:
            trial.state, trial.why = TrialState.CANCELLED, failure_text(cancelled)
        except BaseException as error:
            trial.state, trial.why = TrialState.FAILED, failure_text(error)
        finally:
            self._end(trial)

    def _end(self, trial: Trial) -> None:
        trial.task = None  # its rows may be large
        try:
            with self._one_call:
                self._watch.ended(trial)
        except Exception as error:  # nobody waits for the exceptions of a trial's thread
            self.problems.append(error)

    def _train_trial(self, trial: Trial) -> None:
        assert trial.task is not None and trial.run is not None
        run = trial.run
        reason = overdue = self._overdue_verdict(trial, run)
        if overdue is not None:
            # The attempt ends before its first step, and promotes what the run has.
            cancellation.request(run.path, len(run.record.attempts) + 1)
        with closing(self._train(trial.task, self._backend, run)) as reports:
            for report in reports:
                with self._one_call:
                    self._watch.stepped(trial, report)
                reason = self._verdict(trial, report)
                if reason is not None:
                    run.event(STOPPED_EVENT, step=report.step, reason=reason)
                if reason is not None or self._stop.signal_number is not None:
                    reports.close()
        if overdue is not None:
            run.event(STOPPED_EVENT, step=run.record.attempts[-1].resumed_from_step, reason=overdue)
        trial.state, trial.why = STATE_OF_RUN[run.record.state], None
        if reason is not None and trial.state is TrialState.CANCELLED:
            trial.state, trial.why = TrialState.STOPPED, reason

    def _overdue_verdict(self, trial: Trial, run: RunDir) -> str | None:
        step = None if self._judge is None else self._judge.unjudged_step(trial, run)
        if self._judge is None or step is None:
            return None
        with self._one_call:
            return self._judge.verdict(trial, step)

    def _verdict(self, trial: Trial, report: StepReport) -> str | None:
        judge = self._judge
        if judge is None or not judge.is_due(trial, report):
            return None
        with self._one_call:
            judge.enter(trial, report)
        found: list[str | None] = []

        def decide() -> None:
            found.append(judge.verdict(trial, report.step))

        # Trials that come here in one round are compared with each other, whoever was first.
        self._gathering.wait_for(decide)
        return found[0]


def failure_text(error: BaseException) -> str:
    """What a trial raised, in one line and without secrets."""
    text = " ".join(str(error).split())
    if not isinstance(error, TunebookError):
        text = f"{type(error).__name__}: {text}"
    return redact(text, os.environ)
