"""What holds for every loss: masks, halves, padding, extremes, metrics without a graph."""

import math
import pickle

import pytest
import torch

from tests.loss_fns.batches import (
    EVERY,
    POLICY,
    PREFERENCE,
    WITH_KL,
    changed,
    columns_of,
    make_batch,
    per_token,
    value_and_gradient,
)
from tunebook.columns import loss_name, required_columns

every_loss = pytest.mark.parametrize("name", EVERY)


@every_loss
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
def test_masked_tokens_have_no_influence_and_gradient_exactly_zero(name, value):
    """Case 74: whatever stands at a masked position, NaN too, changes not one bit."""
    loss = EVERY[name]
    logprobs, columns = make_batch()
    masked = columns["token_weights"] == 0
    expected, expected_gradient, expected_metrics = value_and_gradient(loss, logprobs, columns)
    for column in per_token(columns):
        columns[column] = columns[column].masked_fill(masked, value)
    found, gradient, metrics = value_and_gradient(
        loss, logprobs.masked_fill(masked, value), columns
    )
    assert torch.equal(found, expected) and torch.isfinite(found)
    assert torch.equal(gradient, expected_gradient) and torch.isfinite(gradient).all()
    assert (gradient[masked] == 0).all() and gradient[~masked].any()
    assert metrics == expected_metrics


@every_loss
def test_one_batch_is_its_parts_summed(name):
    """Value, gradient and every metric; parts of one and two pairs."""
    loss = EVERY[name]
    logprobs, columns = make_batch()
    whole, gradient, metrics = value_and_gradient(loss, logprobs, columns)
    parts = [
        value_and_gradient(
            loss, logprobs[rows], changed(columns, lambda each, rows=rows: each[rows])
        )
        for rows in (slice(0, 2), slice(2, 6))
    ]
    assert whole.item() == pytest.approx(sum(part[0].item() for part in parts), rel=1e-12)
    assert torch.allclose(gradient, torch.cat([part[1] for part in parts]), rtol=1e-12, atol=0)
    for key, metric in metrics.items():
        assert metric.item() == pytest.approx(
            sum(part[2][key].item() for part in parts), rel=1e-12, abs=1e-12
        )


@every_loss
def test_padding_changes_nothing(name):
    loss = EVERY[name]
    logprobs, columns = make_batch()
    plain, plain_gradient, plain_metrics = value_and_gradient(loss, logprobs, columns)
    pad = torch.nn.functional.pad
    padded = {
        column: each if each.ndim == 1 else pad(each, (0, 3), value=math.nan)
        for column, each in columns.items()
    }
    padded["token_weights"] = pad(columns["token_weights"], (0, 3))
    value, gradient, metrics = value_and_gradient(loss, pad(logprobs, (0, 3), value=1.0), padded)
    assert value.item() == pytest.approx(plain.item(), rel=1e-12)
    assert torch.allclose(gradient[:, :-3], plain_gradient, rtol=1e-12, atol=0)
    assert (gradient[:, -3:] == 0).all()
    for key, metric in metrics.items():
        assert metric.item() == pytest.approx(plain_metrics[key].item(), rel=1e-12, abs=1e-12)


@every_loss
@pytest.mark.parametrize("ours", [-1000.0, -100.0, -30.0, -1e-7, 0.0])
@pytest.mark.parametrize("other", [-1000.0, -100.0, -30.0, -1e-7, 0.0])
def test_extreme_log_ratios_are_finite(name, ours, other):
    """Cases 56 and 74, in float32, both signs of advantages and margins."""
    loss = EVERY[name]
    shape = (2, 3)
    logprobs = torch.full(shape, ours)
    logprobs[1] = other
    columns = {
        "token_weights": torch.ones(shape),
        "pair_weights": torch.ones(2),
        "sampling_logprobs": logprobs.flip(0),
        "reference_logprobs": logprobs.flip(0),
        "advantages": torch.tensor([[1.0, -1.0, 0.0], [1.0, -1.0, 0.0]]),
    }
    value, gradient, metrics = value_and_gradient(loss, logprobs, columns)
    assert torch.isfinite(value) and torch.isfinite(gradient).all()
    assert all(math.isfinite(metric) for metric in metrics.values())


@every_loss
def test_a_nan_that_counts_is_not_hidden(name):
    """A log-prob that is NaN where the weight is not 0 must end the run, not vanish."""
    loss = EVERY[name]
    logprobs, columns = make_batch()
    logprobs[0, 1] = math.nan
    assert torch.isnan(loss(logprobs, **columns_of(loss, columns))[0])


@every_loss
def test_nothing_that_counts_is_loss_zero(name):
    """Case 69: all masked is 0.0 and finite, gradient included."""
    loss = EVERY[name]
    logprobs, columns = make_batch()
    columns = {name: torch.zeros_like(each) for name, each in columns.items()}
    value, gradient, metrics = value_and_gradient(loss, logprobs, columns)
    assert value == 0 and not gradient.any()
    assert all(metric == 0 for metric in metrics.values())


@every_loss
def test_metrics_are_scalars_without_a_graph(name):
    logprobs, columns = make_batch()
    _, _, metrics = value_and_gradient(EVERY[name], logprobs, columns)
    for metric in metrics.values():
        assert metric.ndim == 0 and not metric.requires_grad


@every_loss
def test_it_writes_into_nothing_it_is_given(name):
    loss = EVERY[name]
    logprobs, columns = make_batch()
    before = changed(columns, torch.clone)
    value_and_gradient(loss, logprobs, columns)
    assert all(torch.equal(columns[column], each) for column, each in before.items())


@every_loss
def test_it_can_be_sent_to_other_processes(name):
    """Sessions over several processes pickle the loss."""
    logprobs, columns = make_batch()
    loss = EVERY[name]
    copy = pickle.loads(pickle.dumps(loss))
    assert (required_columns(copy), loss_name(copy)) == (required_columns(loss), loss_name(loss))
    assert torch.equal(
        copy(logprobs, **columns_of(loss, columns))[0],
        loss(logprobs, **columns_of(loss, columns))[0],
    )


def test_columns_are_those_of_the_contract():
    for name in POLICY:
        assert set(required_columns(EVERY[name])) == {
            "token_weights",
            "sampling_logprobs",
            "advantages",
        }
    for name in WITH_KL:
        assert set(required_columns(EVERY[name])) == {
            "token_weights",
            "sampling_logprobs",
            "advantages",
            "reference_logprobs",
        }
    for name in PREFERENCE:
        reference = set() if name in ("simpo", "orpo") else {"reference_logprobs"}
        assert set(required_columns(EVERY[name])) == {"token_weights", "pair_weights"} | reference
