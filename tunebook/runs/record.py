"""What `run.json` holds: the durable, public record of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from tunebook.runs.files import as_float


class RunState(StrEnum):
    """State of a run."""

    PENDING = "pending"
    RUNNING = "running"
    CANCEL_REQUESTED = "cancel_requested"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Preparation(StrEnum):
    """State of the preparation, which is free and precedes every attempt."""

    QUEUED = "queued"
    SNAPSHOTTING = "snapshotting"
    VERIFIED = "verified"
    FAILED = "failed"
    CANCELLED = "cancelled"


class AttemptState(StrEnum):
    """State of one attempt at training."""

    LEASED = "leased"
    """Recorded; its process is about to be started."""
    ACCEPTED = "accepted"
    """Its process is there and prepares."""
    STARTED = "started"
    """It holds the lock of the run and trains."""
    FINALIZING = "finalizing"
    """It writes the model; a cancellation is refused from here on."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    """The process is gone without having said how it ended."""
    SUBMISSION_UNCERTAIN = "submission_uncertain"
    """Whoever was starting its process is gone, and nobody knows whether it did."""


LIVE_ATTEMPT_STATES = frozenset(
    {
        AttemptState.LEASED,
        AttemptState.ACCEPTED,
        AttemptState.STARTED,
        AttemptState.FINALIZING,
    }
)


class StopReason(StrEnum):
    """Why a run made no further step."""

    COMPLETED = "completed"
    MAX_STEPS = "max_steps"
    EARLY_STOPPING = "early_stopping"
    HEALTH = "health"
    """A rule of `tunebook.health` that was told to end the run; `Outcome.rule` names it."""
    CANCELLED = "cancelled"
    FAILED = "failed"


ENDED_STATES = frozenset({RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED})

STATE_OF_STOP_REASON = {
    StopReason.COMPLETED: RunState.SUCCEEDED,
    StopReason.MAX_STEPS: RunState.SUCCEEDED,
    StopReason.EARLY_STOPPING: RunState.SUCCEEDED,
    StopReason.HEALTH: RunState.SUCCEEDED,
    StopReason.CANCELLED: RunState.CANCELLED,
    StopReason.FAILED: RunState.FAILED,
}


@dataclass(frozen=True, slots=True)
class Attempt:
    """One process that trained, from its start to its end."""

    number: int
    """From 1."""
    state: AttemptState
    started_at: str
    """ISO 8601, UTC. Durations never come from these: clocks step back."""
    ended_at: str | None
    """None while it runs, and when its process was killed."""
    pid: int
    host: str
    resumed_from_step: int
    """0 = began at the beginning."""
    lease: str | None = None
    """By which a process in the background knows that this attempt is its own."""
    idempotency_key: str | None = None
    """A retry with the same key is this attempt, not another one."""
    process_started: str | None = None
    """When its process started, to tell it from a later one with the same pid; None = unknown."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of each phase, summed over attempts; None = unknown or never reached."""

    queued_s: float | None = None
    preparing_s: float | None = None
    training_s: float | None = None
    post_processing_s: float | None = None
    finalizing_s: float | None = None

    @property
    def total_s(self) -> float:
        """The known phases together."""
        return sum(getattr(self, one.name) or 0.0 for one in fields(self))

    def plus(self, phase: str, seconds: float) -> Timing:
        """The timing with `seconds` added to a phase, for example `training_s`."""
        return replace(self, **{phase: (getattr(self, phase) or 0.0) + seconds})


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What the evaluations of a run said."""

    metric: str
    direction: str
    """`down` or `up`: which way the metric improves."""
    best: float | None
    """None when no evaluation gave a finite value."""
    best_step: int | None
    last: float | None
    last_step: int
    count: int
    promoted_step: int | None
    """Step of the checkpoint that became the model."""
    promoted_before_last_eval: bool
    """The model is older than the last evaluation."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    stop_reason: StopReason
    planned_steps: int
    steps: int
    downgrades: list[str] = field(default_factory=list)
    """`setting:action:cause`, for example `early_stopping:disabled:no_eval_set`."""
    rule: str | None = None
    """Health rule that ended the run."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a run failed, without a traceback (that is in `log.txt`)."""

    code: str
    category: str
    """input, capacity, service, numeric or system."""
    message: str


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The whole of `run.json`."""

    number: int
    """From 1, per folder of runs; never given twice."""
    id: str
    recipe: str
    name: str | None
    created_at: str
    state: RunState = RunState.PENDING
    preparation: Preparation = Preparation.QUEUED
    attempts: list[Attempt] = field(default_factory=list)
    timing: Timing = field(default_factory=Timing)
    evaluation: Evaluation | None = None
    """None when the run never evaluated."""
    outcome: Outcome | None = None
    failure: Failure | None = None
    model_available: bool = False
    """`model/` holds a complete model: the signal to use it, whatever the state."""
    plan_hash: str | None = None
    tunebook_version: str | None = None
    tracker: dict[str, str] = field(default_factory=dict)
    """What a tracker needs to go on with the same run after a resume."""

    @property
    def live_attempt(self) -> Attempt | None:
        """The attempt that runs, or whose process was killed before it could say how it ended."""
        if self.attempts and self.attempts[-1].state in LIVE_ATTEMPT_STATES:
            return self.attempts[-1]
        return None

    def with_attempt(self, attempt: Attempt) -> RunRecord:
        """The record with one attempt added, or replaced when its number is there already."""
        others = [one for one in self.attempts if one.number != attempt.number]
        return replace(self, attempts=[*others, attempt])


def record_to_json(record: RunRecord) -> dict[str, Any]:
    """The record as nested dicts."""
    return asdict(record)


def record_from_json(value: Mapping[str, Any]) -> RunRecord:
    """The record that `record_to_json` gave; keys of a later version are ignored.

    Raises:
        ValueError: a key is missing, or a state is unknown.
    """
    try:
        known = _known(RunRecord, value)
        return RunRecord(
            **{
                **known,
                "state": RunState(value["state"]),
                "preparation": Preparation(value["preparation"]),
                "attempts": [
                    Attempt(**{**_known(Attempt, one), "state": AttemptState(one["state"])})
                    for one in value.get("attempts", [])
                ],
                "timing": Timing(**_known(Timing, value.get("timing") or {})),
                "evaluation": _evaluation(value.get("evaluation")),
                "outcome": _outcome(value.get("outcome")),
                "failure": _optional(Failure, value.get("failure")),
            }
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"not the record of a run: {error}") from error


def _outcome(value: Mapping[str, Any] | None) -> Outcome | None:
    if value is None:
        return None
    return Outcome(**{**_known(Outcome, value), "stop_reason": StopReason(value["stop_reason"])})


def _evaluation(value: Mapping[str, Any] | None) -> Evaluation | None:
    if value is None:
        return None
    numbers = {key: as_float(value[key]) for key in ("best", "last")}
    return Evaluation(**{**_known(Evaluation, value), **numbers})


def _optional(cls: type[Any], value: Mapping[str, Any] | None) -> Any:
    return None if value is None else cls(**_known(cls, value))


def _known(cls: type[Any], value: Mapping[str, Any]) -> dict[str, Any]:
    names = {one.name for one in fields(cls)}
    return {key: item for key, item in value.items() if key in names}
