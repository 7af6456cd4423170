"""The checkpoints of a run: saved, rotated, resumed from, and the best one promoted to `model/`."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from tunebook.backends.base import Session
from tunebook.config import EarlyStoppingConfig, RecipeConfig
from tunebook.display import tunebook_command
from tunebook.errors import ConfigError, NonFiniteError, RunCancelled
from tunebook.evaluate import Monitor
from tunebook.notices import remembering
from tunebook.plan import Plan
from tunebook.runs import (
    Checkpoint,
    Evaluation,
    RunDir,
    RunState,
    StopReason,
    best_checkpoint,
    checkpoints_to_discard,
    newest_checkpoint,
)
from tunebook.stopping import Evaluation as MonitorValue
from tunebook.stopping import best_evaluation, should_stop
from tunebook.types import CheckpointRef, Metrics

LOG = logging.getLogger("tunebook")
T = TypeVar("T")


class CheckpointBook:
    """What a run has saved and evaluated, earlier attempts included."""

    def __init__(self, run: RunDir, monitor: Monitor | None, *, keep: int) -> None:
        self.run = run
        self.monitor = monitor
        self.keep = keep
        self.newest = newest_checkpoint(run.checkpoints())
        """Where this attempt goes on from; None = the beginning."""

    @property
    def resumed_step(self) -> int:
        """Optimizer steps that are in the checkpoint this attempt goes on from."""
        return self.newest.step if self.newest else 0

    @property
    def history(self) -> list[MonitorValue]:
        """The monitored metric of every evaluation of the run."""
        if self.monitor is None:
            return []
        values = self.run.history(self.monitor.metric)
        return [MonitorValue(step=step, value=value) for step, value in values]

    @property
    def best_step(self) -> int | None:
        """Step of the best evaluation; None = none had a finite value."""
        if self.monitor is None:
            return None
        best = best_evaluation(self.history, lower_is_better=self.monitor.lower_is_better)
        return best.step if best else None

    def stops_early(self, config: EarlyStoppingConfig) -> bool:
        """Whether the evaluations recorded so far call for an early stop."""
        return self.monitor is not None and should_stop(
            self.history,
            patience=config.patience,
            min_delta=config.min_delta,
            lower_is_better=self.monitor.lower_is_better,
        )

    @property
    def saved_step(self) -> int:
        """Step of the newest checkpoint."""
        newest = newest_checkpoint(self.run.checkpoints())
        return newest.step if newest else 0

    @contextmanager
    def attempt(self, *, planned_steps: int, downgrades: Sequence[str]) -> Iterator[None]:
        """One attempt of the run; what an earlier one did past its last checkpoint is set aside."""
        with (
            self.run.attempt(
                planned_steps=planned_steps,
                downgrades=downgrades,
                resumed_from_step=self.resumed_step,
            ),
            remembering(self.run),
        ):
            if self.run.metrics():
                self.run.rewind(self.resumed_step)
            yield

    def until_cancelled(self, remaining: Iterable[T]) -> Iterator[T]:
        """The steps to make, which end as soon as somebody has asked to cancel the run.

        Raises:
            RunCancelled: somebody did, and the run has made no step, so there is nothing to keep.
        """
        made = self.resumed_step
        for each in remaining:
            if self.run.cancel_requested():
                if made == 0:
                    raise RunCancelled(f"{self.run.path}: cancelled before its first step")
                return
            yield each
            made += 1

    def save(self, session: Session, step: int, evaluation: Metrics | None) -> CheckpointRef:
        """Saves the session after a step, and lets older checkpoints go."""
        ref = session.save(f"step_{step:06d}").result()
        value = evaluation[self.monitor.metric] if evaluation and self.monitor else None
        self.run.record_checkpoint(Checkpoint(step=step, ref=ref, monitor=value))
        for old in checkpoints_to_discard(self.run.checkpoints(), self.keep, self.best_step):
            self.run.record_discarded(old)
            session.discard(old.ref)
        self._record_evaluation(promoted_step=None)
        return ref

    def promoted(self) -> Checkpoint:
        """The checkpoint that is the result of the run: the best, else the newest.

        Raises:
            NonFiniteError: the run evaluated, and no evaluation was finite.
        """
        checkpoints = self.run.checkpoints()
        best = best_checkpoint(checkpoints, self.monitor.direction) if self.monitor else None
        if best is None and self.history:
            assert self.monitor is not None
            raise NonFiniteError(
                f"{self.monitor.metric} was never a finite number, so no checkpoint is the best "
                "and none is promoted. Lower optimizer.learning_rate, and look at the rows with "
                f"`{tunebook_command()} inspect`"
            )
        chosen = best or newest_checkpoint(checkpoints)
        assert chosen is not None, "a run is promoted after its last save"
        if self.best_step is not None and chosen.step != self.best_step:
            self.run.event("best_checkpoint_missing", best=self.best_step, promoted=chosen.step)
            self.run.add_downgrade("promotion:next_best:best_checkpoint_missing")
            LOG.warning(
                "%s: the checkpoint of the best step %d is gone; the model is that of step %d",
                self.run.path, self.best_step, chosen.step,
            )  # fmt: skip
        return chosen

    def promote(self, session: Session, chosen: Checkpoint) -> None:
        """Exports a checkpoint to `model/` as the result of the run."""
        if self.run.record.model_available:  # until the new one is there, none is
            self.run.set_model_available(False)
        with self.run.phase("finalizing_s"):
            session.export(chosen.ref, self.run.model_dir)
        self._record_evaluation(promoted_step=chosen.step)
        self.run.set_model_available(True)

    def _record_evaluation(self, *, promoted_step: int | None) -> None:
        history = self.history
        if self.monitor is None or not history:
            return
        best = best_evaluation(history, lower_is_better=self.monitor.lower_is_better)
        last = history[-1]
        self.run.set_evaluation(
            Evaluation(
                metric=self.monitor.metric,
                direction=self.monitor.direction,
                best=best.value if best else None,
                best_step=best.step if best else None,
                last=None if math.isnan(last.value) else last.value,
                last_step=last.step,
                count=len(history),
                promoted_step=promoted_step,
                promoted_before_last_eval=promoted_step is not None and promoted_step < last.step,
            )
        )


def check_can_go_on(config: RecipeConfig, plan: Plan, monitor: Monitor) -> None:
    """Returns if the run that `config` resumes has something left to do.

    Raises:
        ConfigError: it has made all its steps, or its evaluations call for an early stop already.
    """
    assert config.resume is not None
    run = RunDir.open(config.resume)
    newest = newest_checkpoint(run.checkpoints())
    done = newest.step if newest else 0
    if run.record.state is not RunState.SUCCEEDED:
        return  # also when all steps are made: what was interrupted may be the promotion
    if done >= plan.planned_steps:
        raise ConfigError(
            f"resume={config.resume}: all {plan.planned_steps} planned steps are made, so there is "
            "nothing to train. Raise plan.epochs (or plan.max_steps) to train further"
        )
    history = [
        MonitorValue(step=step, value=value)
        for step, value in run.history(monitor.metric)
        if step <= done
    ]
    if history and should_stop(
        history,
        patience=config.early_stopping.patience,
        min_delta=config.early_stopping.min_delta,
        lower_is_better=monitor.lower_is_better,
    ):
        raise ConfigError(
            f"resume={config.resume}: {monitor.metric} has not improved over the last "
            f"{config.early_stopping.patience} evaluations, so the run would stop at once. Raise "
            "early_stopping.patience, or turn it off with early_stopping.patience=null"
        )


def planned_stop(plan: Plan) -> StopReason:
    """Why a run that makes all its planned steps stops."""
    return StopReason.MAX_STEPS if plan.by_max_steps else StopReason.COMPLETED
