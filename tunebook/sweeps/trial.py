"""One run of a sweep, from its overrides to its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from tunebook.errors import ConfigError, TunebookError
from tunebook.launch import RecipeTask
from tunebook.runs import RunDir, RunState

if TYPE_CHECKING:
    from tunebook.config import RecipeConfig


class TrialState(StrEnum):
    """How far a trial has come."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    STOPPED = "stopped"
    """By the sweep, which found others better."""
    INTERRUPTED = "interrupted"
    """Its process was killed, and no sweep goes on with it; never in `sweep.json`."""


FINAL = frozenset({TrialState.SUCCEEDED, TrialState.STOPPED})
"""States that a resumed sweep leaves alone."""
STOPPED_EVENT = "stopped_by_sweep"
"""Of a run, with the step and the reason."""
STATE_OF_RUN = {
    RunState.SUCCEEDED: TrialState.SUCCEEDED,
    RunState.FAILED: TrialState.FAILED,
    RunState.CANCELLED: TrialState.CANCELLED,
}


@dataclass
class Trial:
    """A trial while its sweep goes on."""

    number: int
    """Position in the sweep, from 0, as Hydra counts jobs."""
    overrides: tuple[str, ...]
    """Of the command line, for this trial."""
    config: RecipeConfig
    label: str = ""
    """The overrides in which it differs from the others."""
    task: RecipeTask | None = None
    """What it was prepared to; None = it is not to be trained, or was and is over."""
    preparing_s: float = 0.0
    plan_hash: str | None = None
    """Of the plan that it was prepared to."""
    state: TrialState = TrialState.PENDING
    run: RunDir | None = None
    """Its run directory, once it has one."""
    why: str | None = None
    """Why it ended, where its state does not say it all."""

    @property
    def value(self) -> float | None:
        """The best value of the metric that the run monitored; None = it never evaluated."""
        evaluation = None if self.run is None else self.run.record.evaluation
        return None if evaluation is None else evaluation.best

    @property
    def name(self) -> str:
        """What a person reads: its number and in what it differs."""
        return f"trial {self.number}" + (f" ({self.label})" if self.label else "")


def labels(jobs: Sequence[Sequence[str]]) -> list[str]:
    """In what each job differs: the overrides that not all have, by the last part of their keys."""
    common = set(jobs[0]).intersection(*jobs) if len(jobs) > 1 else set[str]()
    differing = [[each for each in job if each not in common] for job in jobs]
    keys = {each.partition("=")[0] for job in differing for each in job}
    last = Counter(key.rpartition(".")[2] for key in keys)

    def short(override: str) -> str:
        key, equals, value = override.partition("=")
        name = key.rpartition(".")[2]
        return f"{name if last[name] == 1 else key}{equals}{value}"

    return [" ".join(map(short, job)) for job in differing]


def raise_all(problems: Mapping[str, TunebookError]) -> None:
    """Returns if there are none.

    Args:
        problems: name of a trial -> what is wrong with it.

    Raises:
        TunebookError: the only problem as it is, or all of them in one message, the same ones once.
    """
    if not problems:
        return
    trials: dict[str, list[str]] = {}
    for name, problem in problems.items():
        trials.setdefault(str(problem), []).append(name)
    first = next(iter(problems.values()))
    if len(problems) == 1:
        first.add_note(f"This is {next(iter(problems))}; nothing was trained.")
        raise first
    lines = [f"{', '.join(names)}: {text}" for text, names in trials.items()]
    raise ConfigError("\n".join(["Nothing was trained.", *lines])) from first
