"""Asynchronous successive halving: at each rung only the best of those that came there go on.

Source: Li et al., A System for Massively Parallel Hyperparameter Tuning, arXiv:1810.05934, in the
variant that stops trials and never waits for one that has not come to the rung yet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tunebook.config import HalvingConfig
from tunebook.errors import ConfigError
from tunebook.evaluate import Monitor
from tunebook.runs import RunDir, RunState, newest_checkpoint
from tunebook.sweeps.trial import Trial
from tunebook.types import StepReport


class Halving:
    """What trials have reached at each rung, and who goes on from there."""

    def __init__(self, config: HalvingConfig, monitor: Monitor) -> None:
        """Begins without results.

        Args:
            config: rungs, in steps, and the share that goes on.
            monitor: metric that is compared.
        """
        self._keep = config.keep
        self._monitor = monitor
        self._results: dict[int, dict[int, float]] = {rung: {} for rung in config.rungs}
        """Rung -> trial -> its value there."""

    def remember(self, trial: Trial, run: RunDir) -> None:
        """Takes over what a trial has reached in an earlier start of the sweep."""
        for step, value in run.history(self._monitor.metric):
            if step in self._results:
                self._results[step][trial.number] = value

    def is_due(self, trial: Trial, report: StepReport) -> bool:
        """Whether a step is a rung, and not the end of the trial anyway."""
        return report.step in self._results and report.step < report.planned_steps

    def enter(self, trial: Trial, report: StepReport) -> None:
        """Takes the result of a trial at a rung."""
        value = (report.evaluation or {}).get(self._monitor.metric)
        self._results[report.step][trial.number] = math.nan if value is None else value

    def unjudged_step(self, trial: Trial, run: RunDir) -> int | None:
        """The rung from which a trial goes on that was killed there before its verdict, if any.

        A step beyond it, or an end by a request to stop, follow on the verdict.
        """
        newest = newest_checkpoint(run.checkpoints())
        results = None if newest is None else self._results.get(newest.step)
        if newest is None or results is None or trial.number not in results:
            return None
        assert trial.task is not None
        is_last = newest.step >= trial.task.summary["planned_steps"]
        went_on = run.metrics()[-1]["step"] > newest.step
        if is_last or went_on or run.record.state is RunState.CANCELLED:
            return None
        return newest.step

    def verdict(self, trial: Trial, step: int) -> str | None:
        """Why a trial ends at a rung that it has entered; None = it goes on."""
        results = self._results[step]
        value = results[trial.number]
        going_on = max(1, math.floor(self._keep * len(results)))
        better = sum(self._is_better(other, value) for other in results.values())
        if better < going_on and not math.isnan(value):
            return None
        return (
            f"{self._monitor.metric} {value:.4g} at step {step} is not among the best "
            f"{going_on} of {len(results)}"
        )

    def _is_better(self, one: float, other: float) -> bool:
        if math.isnan(one) or math.isnan(other):
            return math.isnan(other) and not math.isnan(one)
        return one < other if self._monitor.lower_is_better else one > other


def check_halving(config: HalvingConfig, trials: Sequence[Trial]) -> Monitor:
    """The metric that trials are compared by, if halving can be done with them.

    Raises:
        ConfigError: a share or rungs that make no sense, a trial that does not evaluate at a rung,
            or trials with different monitors.
    """
    if not 0 < config.keep < 1:
        raise ConfigError(
            f"sweep.halving.keep={config.keep}: must lie between 0 and 1, both excluded"
        )
    if not config.rungs or config.rungs != sorted(set(config.rungs)):
        raise ConfigError(
            f"sweep.halving.rungs={config.rungs}: name one step or more, from the first to the last"
        )
    monitors: list[Monitor] = []
    for trial in trials:
        assert trial.task is not None
        if trial.task.monitor is None:
            raise ConfigError(
                f"sweep.halving compares evaluations, and {trial.name} has no eval rows. Lower "
                "eval.min_rows, raise eval.fraction, or name eval rows with data.eval.path"
            )
        monitors.append(trial.task.monitor)
        missing = sorted(set(config.rungs) - set(trial.task.summary["eval_steps"]))
        if missing:
            evaluated = ", ".join(map(str, trial.task.summary["eval_steps"]))
            raise ConfigError(
                f"sweep.halving.rungs={config.rungs}: {trial.name} does not evaluate at step "
                f"{', '.join(map(str, missing))}, only at {evaluated}; see plan.checkpoint_every"
            )
    if any(monitor != monitors[0] for monitor in monitors):
        raise ConfigError("sweep.halving: the trials differ in eval.monitor, so nothing compares")
    return monitors[0]
