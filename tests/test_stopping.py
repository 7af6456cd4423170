"""Early stopping and the best evaluation, on scripted values."""

import math

import pytest

from tunebook.stopping import Evaluation, best_evaluation, should_stop

NAN = math.nan


def history(values):
    return [Evaluation(step=number, value=value) for number, value in enumerate(values, start=1)]


def stops_after(values, *, patience, min_delta=0.0, lower_is_better=True):
    """The number of the evaluation after which the run stops, or None."""
    for count in range(1, len(values) + 1):
        if should_stop(
            history(values[:count]),
            patience=patience,
            min_delta=min_delta,
            lower_is_better=lower_is_better,
        ):
            return count
    return None


@pytest.mark.parametrize(
    ("values", "patience", "min_delta", "stop", "best"),
    [
        ([1.0, 0.9, 0.95, 0.96, 0.97], 2, 0.0, 4, 2),  # case 43
        ([1.0, 1.1, 0.9, 1.0, 1.1], 2, 0.0, 5, 3),  # case 43: the counter starts again
        ([1.0, 1.1, 1.2, 1.3], 3, 0.0, 4, 1),  # case 42
        ([1.0, 1.0], 1, 0.0, 2, 1),  # an equal value is no improvement
        ([NAN, 1.0, NAN, 1.2], 2, 0.0, 4, 2),  # case 45
        ([NAN, NAN], 2, 0.0, 2, None),
        ([math.inf, 1.0, -math.inf, 1.2], 2, 0.0, 4, 2),  # infinity is no better than NaN
        ([math.inf, math.inf], 2, 0.0, 2, None),
        ([1.0, 0.95, 0.90], 2, 0.1, 3, 3),  # smaller than min_delta, yet best is best
        ([1.0, 0.95, 0.85, 0.84], 2, 0.1, None, 4),  # small changes add up to one
        ([1.0, 0.9], None, 0.0, None, 2),
    ],
)
def test_table(values, patience, min_delta, stop, best):
    assert stops_after(values, patience=patience, min_delta=min_delta) == stop
    found = best_evaluation(history(values), lower_is_better=True)
    assert (found.step if found else None) == best


def test_higher_is_better():
    values = [0.1, 0.5, 0.4, 0.3]
    assert stops_after(values, patience=2, lower_is_better=False) == 4
    found = best_evaluation(history(values), lower_is_better=False)
    assert found is not None and found.step == 2


def test_earliest_of_equals_is_best():
    found = best_evaluation(history([1.0, 0.5, 0.5]), lower_is_better=True)
    assert found is not None and found.step == 2


def test_resume_changes_nothing():
    """Case 42: the state is the history, so a stop in between cannot lose it."""
    values = [1.0, 1.1, 1.2]
    assert stops_after(values, patience=3) is None
    assert stops_after([*values, 1.3], patience=3) == 4
