"""Token weights: mask and divisor in one column."""

import numpy as np
import pytest

from tunebook.token_weights import (
    fixed_horizon,
    prompt_mean,
    sequence_mean,
    token_mean,
    token_sum,
)


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


def test_prompt_mean_by_hand():
    """Prompt a has data of 1 and 3 tokens at losses 1 and 2, prompt b one of 2 at 4.

    Token means 7/4 and 4, so 2.875 together; the order of the data does not matter.
    """
    step = masks([1], [1, 1], [1, 1, 1])
    weights = prompt_mean(step, groups=["a", "b", "a"])
    assert loss(weights, [1, 4, 2]) == pytest.approx(2.875)
    assert sum(w.sum() for w in weights) == pytest.approx(1.0)


def test_prompt_mean_of_one_datum_a_prompt_is_the_sequence_mean():
    step = masks([0, 1, 0.5], [1, 1, 1, 0])
    for found, expected in zip(prompt_mean(step, groups=[0, 1]), sequence_mean(step), strict=True):
        assert found == pytest.approx(expected)


def test_a_prompt_without_supervised_tokens_counts_in_no_prompt_mean():
    """Case 69: all completions of a prompt masked; and all of the step: zeros, no 0/0."""
    weights = prompt_mean(masks([1, 1], [0, 0], [0, 0]), groups=[0, 0, 1])
    assert [w.sum() for w in weights] == pytest.approx([1.0, 0.0, 0.0])
    for each in prompt_mean(masks([0, 0], [0]), groups=[0, 1]):
        assert not each.any() and np.isfinite(each).all()
