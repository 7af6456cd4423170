"""Token weights: mask and divisor in one column."""

import numpy as np
import pytest

from tunebook.token_weights import fixed_horizon, sequence_mean, token_mean, token_sum


def masks(*rows):
    return [np.asarray(row, dtype=np.float32) for row in rows]


def loss(weights, per_token):
    """The weighted sum, with one constant loss per datum."""
    return sum(float(w.sum()) * value for w, value in zip(weights, per_token, strict=True))


def test_golden_aggregations():
    """Two data of 2 and 4 tokens at losses 1 and 2: `reference/losses.md`, probe values."""
    step = masks([1, 1], [1, 1, 1, 1])
    assert loss(token_mean(step), [1, 2]) == pytest.approx(1.6666667)
    assert loss(sequence_mean(step), [1, 2]) == pytest.approx(1.5)
    assert loss(fixed_horizon(step, horizon=6), [1, 2]) == pytest.approx(0.8333333)
    assert loss(token_sum(step), [1, 2]) == pytest.approx(10)


def test_one_datum_mean_and_sum():
    """Case 5: five tokens, the last three supervised."""
    step = masks([0, 1, 1, 1])
    assert token_mean(step)[0] == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])
    assert token_sum(step)[0].sum() == 3


@pytest.mark.parametrize("normalize", [token_mean, sequence_mean, token_sum])
def test_nothing_supervised_stays_zero(normalize):
    """Case 5: no 0/0."""
    for weights in normalize(masks([0, 0], [0, 0, 0])):
        assert not weights.any() and np.isfinite(weights).all()


def test_partial_batch_is_divided_by_its_own_tokens():
    """Case 2: a last step of one datum has the same scale as that datum alone."""
    assert token_mean(masks([0, 1, 1]))[0].sum() == pytest.approx(1.0)


def test_weights_sum_to_one_and_keep_ratios():
    step = masks([0, 1, 0.5], [1, 1, 1, 0])
    for weights in (token_mean(step), sequence_mean(step)):
        assert sum(w.sum() for w in weights) == pytest.approx(1.0)
        assert weights[0][2] == pytest.approx(weights[0][1] / 2)


def test_empty_datum_counts_in_no_sequence_mean():
    weights = sequence_mean(masks([1, 1], [0, 0]))
    assert weights[0].sum() == pytest.approx(1.0)
    assert weights[1].sum() == 0
