"""Learning rate as a pure function of the step."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """The shape of the learning rate over a run."""

    kind: str
    """constant, linear, cosine or wsd (warm-up, stable, decay)."""
    peak: float
    """The highest learning rate."""
    warmup: float
    """Steps if >= 1, a fraction of the planned steps if below 1."""
    final_fraction: float
    """Fraction of the peak that the decay heads for; it would be reached one step after the last,
    so that the last step still trains when this is 0."""
    decay: float
    """wsd: fraction of the planned steps spent decaying."""


def warmup_steps(planned_steps: int, *, warmup: float) -> int:
    """Number of warm-up steps; a fraction is rounded up.

    Args:
        planned_steps: optimizer steps of the whole run.
        warmup: steps if >= 1, else a fraction of `planned_steps`.
    """
    return math.ceil(round(warmup * planned_steps, 9)) if warmup < 1 else int(warmup)


def learning_rate_at(step: int, planned_steps: int, schedule: Schedule) -> float:
    """The learning rate of one optimizer step.

    Warm-up is linear and reaches the peak at its last step: with 4 warm-up steps the rates are
    1/4, 2/4, 3/4 and 4/4 of the peak. The decay starts at the next step.

    Args:
        step: 1 for the first update, `planned_steps` for the last.
        planned_steps: optimizer steps of the whole run.
        schedule: shape and peak.
    """
    num_warmup = warmup_steps(planned_steps, warmup=schedule.warmup)
    if step <= num_warmup:
        return schedule.peak * step / num_warmup
    decay_start = max(num_warmup, 1)
    if schedule.kind == "wsd":
        num_decay = math.ceil(round(schedule.decay * planned_steps, 9))
        decay_start = max(decay_start, planned_steps - num_decay)
    progress = max(0.0, (step - decay_start) / (planned_steps + 1 - decay_start))
    return schedule.peak * _remaining(schedule, min(progress, 1.0))


def _remaining(schedule: Schedule, progress: float) -> float:
    """Fraction of the peak left after `progress` (0 to 1) of the decay."""
    floor = schedule.final_fraction
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "cosine":
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    return floor + (1 - floor) * (1 - progress)
