"""Cross-entropy: value by hand, gradient against the formula, masks, halves, padding."""

import math

import pytest
import torch

from loss_fns.cross_entropy import cross_entropy


def eighths(*shape: int) -> torch.Tensor:
    """Random multiples of 1/8 from 1/8 to 8: sums of products of two are exact in any order."""
    return torch.randint(1, 65, shape, generator=torch.Generator().manual_seed(sum(shape))) / 8


def test_value_by_hand() -> None:
    """Weights 1/4 on log-probs -1, -2 and 1/2 on -4: 0.25 + 0.5 + 2 = 2.75."""
    logprobs = torch.tensor([[-1.0, -2.0, -9.0, -4.0]])
    weights = torch.tensor([[0.25, 0.25, 0.0, 0.5]])
    loss, metrics = cross_entropy(logprobs, token_weights=weights)
    assert loss.item() == pytest.approx(2.75)
    assert metrics["num_tokens"].item() == 3


def test_token_mean_over_rows_of_unequal_length() -> None:
    """1, 3 and 6 tokens at NLL 4, 2, 1: (4 + 6 + 6) / 10 = 1.6, however the rows are split."""
    rows = [(1, 4.0), (3, 2.0), (6, 1.0)]
    losses = []
    for num, nll in rows:
        weights = torch.full((1, num), 0.1)
        losses.append(cross_entropy(torch.full((1, num), -nll), token_weights=weights)[0])
    assert sum(losses).item() == pytest.approx(1.6)
    logprobs, weights = torch.zeros(3, 6), torch.zeros(3, 6)
    for row, (num, nll) in enumerate(rows):
        logprobs[row, :num], weights[row, :num] = -nll, 0.1
    assert cross_entropy(logprobs, token_weights=weights)[0].item() == pytest.approx(1.6)


def test_gradient_is_minus_the_weight() -> None:
    logprobs = torch.randn(2, 5, requires_grad=True)
    weights = torch.tensor([[0.0, 0.1, 0.2, -0.3, 0.0], [0.4, 0.0, 0.0, 0.0, 0.0]])
    cross_entropy(logprobs, token_weights=weights)[0].backward()
    assert torch.equal(logprobs.grad, -weights)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_masked_positions_get_exactly_zero_whatever_is_there(value: float) -> None:
    logprobs = torch.tensor([[-1.0, value]], requires_grad=True)
    loss, _ = cross_entropy(logprobs, token_weights=torch.tensor([[1.0, 0.0]]))
    loss.backward()
    assert loss.item() == 1.0
    assert logprobs.grad.tolist() == [[-1.0, 0.0]]


def test_a_supervised_nan_is_not_hidden() -> None:
    loss, _ = cross_entropy(torch.tensor([[math.nan]]), token_weights=torch.tensor([[1.0]]))
    assert math.isnan(loss.item())


def test_one_batch_is_its_halves_summed() -> None:
    logprobs, weights = -eighths(4, 7), eighths(4, 7)
    whole = cross_entropy(logprobs, token_weights=weights)
    halves = [
        cross_entropy(logprobs[rows], token_weights=weights[rows])
        for rows in (slice(0, 1), slice(1, 4))
    ]
    assert whole[0] == sum(half[0] for half in halves)
    assert whole[1]["num_tokens"] == sum(half[1]["num_tokens"] for half in halves)


def test_padding_changes_nothing() -> None:
    logprobs, weights = -eighths(2, 3), eighths(2, 3)
    padded = [
        torch.nn.functional.pad(tensor, (0, 4), value=value)
        for tensor, value in ((logprobs, math.nan), (weights, 0.0))
    ]
    plain = cross_entropy(logprobs, token_weights=weights)
    with_padding = cross_entropy(padded[0], token_weights=padded[1])
    assert plain == with_padding


def test_nothing_supervised_is_zero() -> None:
    loss, metrics = cross_entropy(torch.randn(2, 3), token_weights=torch.zeros(2, 3))
    assert loss.item() == 0.0 and metrics["num_tokens"] == 0
