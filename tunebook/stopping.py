"""Which evaluation is the best, and whether to stop: pure functions of the recorded history."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The monitored metric at one step."""

    step: int
    value: float


def best_evaluation(history: Sequence[Evaluation], *, lower_is_better: bool) -> Evaluation | None:
    """The best evaluation, the earliest among equals; NaN and infinity never are."""
    finite = [evaluation for evaluation in history if math.isfinite(evaluation.value)]
    sign = 1 if lower_is_better else -1
    return min(
        finite, key=lambda evaluation: (sign * evaluation.value, evaluation.step), default=None
    )


def evaluations_without_improvement(
    history: Sequence[Evaluation], *, min_delta: float, lower_is_better: bool
) -> int:
    """Evaluations since the monitor last improved by more than `min_delta`.

    An equal value is no improvement, and NaN or infinity never is. The reference moves only when an
    improvement counts, so many changes below `min_delta` in a row still add up to one.
    """
    sign = 1 if lower_is_better else -1
    reference = math.inf
    waited = 0
    for evaluation in history:
        value = sign * evaluation.value
        if math.isfinite(value) and value < reference - min_delta:
            reference, waited = value, 0
        else:
            waited += 1
    return waited


def should_stop(
    history: Sequence[Evaluation], *, patience: int | None, min_delta: float, lower_is_better: bool
) -> bool:
    """Whether `patience` evaluations have passed without an improvement; never if it is None."""
    if patience is None:
        return False
    waited = evaluations_without_improvement(
        history, min_delta=min_delta, lower_is_better=lower_is_better
    )
    return waited >= patience
