"""Policy losses: golden values, formulas written out in plain floats, clip bounds, metrics."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from loss_fns import policy
from tests.loss_fns.batches import POLICY, columns_of, make_batch, value_and_gradient
from tunebook.token_weights import token_mean

P, Q = math.log(0.5), math.log(0.4)


def one_token(loss, *, advantage, p=P, q=Q):
    """Value, gradient and metrics of a single token of weight 1."""
    columns = {
        "token_weights": torch.ones(1, 1, dtype=torch.float64),
        "sampling_logprobs": torch.tensor([[q]], dtype=torch.float64),
        "advantages": torch.tensor([[advantage]], dtype=torch.float64),
    }
    value, gradient, metrics = value_and_gradient(
        loss, torch.tensor([[p]], dtype=torch.float64), columns
    )
    return value.item(), gradient.item(), {name: float(each) for name, each in metrics.items()}


@pytest.mark.parametrize(
    ("loss", "positive", "negative"),
    [
        (policy.importance_sampling, -1.25, 1.25),
        (partial(policy.ppo, clip_low=0.8, clip_high=1.2), -1.2, 1.25),
        (partial(policy.grpo, clip_low=0.8, clip_high=1.2), -1.2, 1.25),
        (partial(policy.gspo, clip_low=0.8, clip_high=1.2), -1.2, 1.25),
        (partial(policy.cispo, clip_low=0.8, clip_high=1.2), 0.8317766, -0.8317766),
        (partial(policy.cispo, clip_low=0.0, clip_high=4.0), 0.8664340, -0.8664340),
        (partial(policy.dppo, delta_low=0.15, delta_high=0.15), -1.25, 1.25),
        (partial(policy.dppo, delta_low=0.05, delta_high=0.05), 0.0, 1.25),
        (partial(policy.dro, beta=0.05), 0.6943920, -0.6919024),
    ],
)
def test_golden_values(loss, positive, negative):
    """The probe of `reference/losses.md`: p = ln 0.5, q = ln 0.4, so r = 1.25; A = 1 and -1.

    By hand, for instance cispo at bounds 0.8 and 1.2: -1.2 * ln 0.5 = 0.8317766; dro:
    -(ln 0.5 - 0.025 * (ln 1.25)^2) = 0.6931472 + 0.0012448.
    """
    assert one_token(loss, advantage=1.0)[0] == pytest.approx(positive, abs=5e-8)
    assert one_token(loss, advantage=-1.0)[0] == pytest.approx(negative, abs=5e-8)


@pytest.mark.parametrize("loss", [policy.ppo, policy.grpo, policy.gspo])
@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "low", "high"),
    [(1.5, 1, 1.28, 0, 1), (0.5, -1, -0.8, 1, 0), (0.5, 1, 0.5, 0, 0), (1.5, -1, -1.5, 0, 0)],
)
def test_asymmetric_clipping(loss, ratio, advantage, objective, low, high):
    """Case 77: distances 0.2 and 0.28 are bounds 0.8 and 1.28; clip shares per side.

    Where a bound holds the gradient is 0, elsewhere it is -r A.
    """
    value, gradient, metrics = one_token(
        partial(loss, clip_low=0.8, clip_high=1.28),
        advantage=float(advantage),
        p=math.log(ratio) - 3,
        q=-3.0,
    )
    assert -value == pytest.approx(objective)
    assert (metrics["clipped_low_sum"], metrics["clipped_high_sum"]) == (low, high)
    assert gradient == pytest.approx(0.0 if low or high else -ratio * advantage)


def expected(name, p, q, a, s):
    """Loss of one token and its gradient by p, with s the ratio of its row."""
    r = math.exp(p - q)

    def clipped(ratio, low, high):
        surrogate = min(ratio * a, min(max(ratio, low), high) * a)
        held = (ratio > high and a > 0) or (ratio < low and a < 0)
        return -surrogate, 0.0 if held else -ratio * a

    if name == "importance_sampling":
        return -r * a, -r * a
    if name == "ppo":
        return clipped(r, 0.8, 1.2)
    if name == "grpo":
        return clipped(r, 0.8, 1.28)
    if name == "gspo":
        return clipped(s, 0.95, 1.05)
    if name == "cispo":
        weight = min(max(r, 0.7), 1.5)
        return -weight * p * a, -weight * a
    if name == "dppo":
        gain = math.exp(p) - math.exp(q)
        left_out = (a > 0 and gain > 0.1) or (a < 0 and -gain > 0.05)
        return (0.0, 0.0) if left_out else (-r * a, -r * a)
    assert name == "dro"
    return -(p * a - 0.025 * (p - q) ** 2), -(a - 0.05 * (p - q))


@pytest.mark.parametrize("name", POLICY)
@pytest.mark.parametrize("seed", range(4))
def test_value_and_gradient_are_the_formula(name, seed):
    logprobs, columns = make_batch(seed=seed)
    value, gradient, _ = value_and_gradient(POLICY[name], logprobs, columns)
    total, by_hand = 0.0, torch.zeros_like(logprobs)
    for row in range(len(logprobs)):
        weights = columns["token_weights"][row].tolist()
        p, q = logprobs[row].tolist(), columns["sampling_logprobs"][row].tolist()
        counted = [token for token, weight in enumerate(weights) if weight]
        s = math.exp(sum(p[token] - q[token] for token in counted) / len(counted))
        for token in counted:
            loss, slope = expected(
                name, p[token], q[token], columns["advantages"][row, token].item(), s
            )
            total += weights[token] * loss
            by_hand[row, token] = weights[token] * slope
    assert value.item() == pytest.approx(total, rel=1e-12)
    assert torch.allclose(gradient, by_hand, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "grpo", "dro"])
def test_gradcheck(name):
    """Numerical gradients of the losses that hold nothing constant."""
    logprobs, columns = make_batch(rows=2, seed=3)
    loss, given = POLICY[name], columns_of(POLICY[name], columns)
    assert torch.autograd.gradcheck(
        lambda each: loss(each, **given)[0], logprobs.clone().requires_grad_()
    )


def test_the_ratio_of_gspo_is_a_mean_over_tokens_that_count():
    """Log-ratios 0.3, (0.9 masked), -0.1 in a row: s = e^0.1, the weights' sizes do not matter."""
    columns = {
        "token_weights": torch.tensor([[0.5, 0.0, 0.125]]),
        "sampling_logprobs": torch.tensor([[-1.0, -1.0, -1.0]]),
        "advantages": torch.tensor([[1.0, 1.0, -2.0]]),
    }
    logprobs = torch.tensor([[-0.7, -0.1, -1.1]])
    loss = partial(policy.gspo, clip_low=0.5, clip_high=2.0)
    value, gradient, metrics = value_and_gradient(loss, logprobs, columns)
    s = math.exp(0.1)
    assert value.item() == pytest.approx(-0.5 * s + 0.125 * 2 * s)
    assert gradient[0].tolist() == pytest.approx([-0.5 * s, 0.0, 0.25 * s])
    assert metrics["ratio_sum"].item() == pytest.approx(2 * s)


def test_a_small_sequence_ratio_survives_large_log_probs():
    """Clips of 3e-4 need a ratio that is right to 1e-7, at log-probs of -30 in float32 too."""
    logprobs = torch.full((1, 8), -30.0)
    columns = {
        "token_weights": torch.ones(1, 8),
        "sampling_logprobs": logprobs - torch.tensor([[0.0] * 7 + [2**-10]]),
        "advantages": torch.ones(1, 8),
    }
    _, metrics = policy.gspo(logprobs, clip_low=0.9997, clip_high=1.0004, **columns)
    assert metrics["ratio_sum"].item() / 8 == pytest.approx(1 + 2**-13, abs=2e-7)


def test_metrics_are_sums_over_tokens_that_count():
    """Log-ratios ln 1.25 and -ln 2 of two tokens, a third masked."""
    columns = {
        "token_weights": torch.tensor([[0.5, 0.25, 0.0]], dtype=torch.float64),
        "sampling_logprobs": torch.tensor([[Q, math.log(0.2), -9.0]], dtype=torch.float64),
        "advantages": torch.tensor([[1.0, -1.0, 5.0]], dtype=torch.float64),
    }
    logprobs = torch.tensor([[P, math.log(0.1), -1.0]], dtype=torch.float64)
    found = policy.ppo(logprobs, clip_low=0.8, clip_high=1.2, **columns)[1]
    assert {name: value.item() for name, value in found.items()} == pytest.approx(
        {
            "num_tokens": 2,
            "logprob_sum": math.log(0.05),
            "logratio_sum": math.log(1.25) - math.log(2),
            "logratio_abs_sum": math.log(1.25) + math.log(2),
            "ratio_sum": 1.75,
            "ratio_sq_sum": 1.25**2 + 0.25,
            "clipped_low_sum": 1,
            "clipped_high_sum": 1,
        }
    )


def test_cispo_counts_every_changed_weight_and_keeps_its_gradient():
    loss = partial(policy.cispo, clip_low=0.8, clip_high=1.2)
    _, gradient, metrics = one_token(loss, advantage=2.0)
    assert gradient == pytest.approx(-2.4)
    assert (metrics["clipped_low_sum"], metrics["clipped_high_sum"]) == (0, 1)
    _, gradient, metrics = one_token(loss, advantage=2.0, p=math.log(0.1))
    assert gradient == pytest.approx(-1.6)
    assert (metrics["clipped_low_sum"], metrics["clipped_high_sum"]) == (1, 0)


def test_dppo_lets_a_rare_token_grow_by_a_large_ratio():
    """From 1e-5 to 1e-3 is a ratio of 100 and a gain of 0.001; 0.99 to 0.80 a ratio of 0.81."""
    loss = partial(policy.dppo, delta_low=0.15, delta_high=0.15)
    value, _, metrics = one_token(loss, advantage=1.0, p=math.log(1e-3), q=math.log(1e-5))
    assert value == pytest.approx(-100) and metrics["clipped_high_sum"] == 0
    value, _, metrics = one_token(loss, advantage=-1.0, p=math.log(0.80), q=math.log(0.99))
    assert value == 0 and metrics["clipped_low_sum"] == 1


@pytest.mark.parametrize("name", POLICY)
@pytest.mark.parametrize("sign", [1, -1])
def test_beyond_the_cap_the_ratio_is_constant(name, sign):
    """At p - q = ±25 the ratio is e^±20, and only losses that use p itself have a gradient."""
    value, gradient, metrics = one_token(
        POLICY[name], advantage=-1.0 if sign > 0 else 1.0, p=-30.0, q=-30.0 - 25.0 * sign
    )
    assert math.isfinite(value)
    assert metrics["ratio_sum"] == pytest.approx(math.exp(20 * sign))
    assert metrics["logratio_sum"] == pytest.approx(25 * sign)
    assert (gradient != 0) == (name in ("cispo", "dro"))


@pytest.mark.parametrize("name", POLICY)
def test_on_policy_the_gradient_is_that_of_reinforce(name):
    """r = 1: -w A for every loss, dro included."""
    logprobs, columns = make_batch()
    columns["sampling_logprobs"] = logprobs
    _, gradient, metrics = value_and_gradient(POLICY[name], logprobs, columns)
    assert torch.allclose(gradient, -columns["token_weights"] * columns["advantages"], rtol=1e-12)
    assert metrics["ratio_sum"] == metrics["num_tokens"]
    assert metrics["logratio_abs_sum"] == 0


def test_masked_tokens_are_in_no_denominator():
    """Case 69: 4 tokens that ended and 8 that were cut off and masked: divided by 4, not by 12.

    On-policy with A = 1 every token has loss -1, so the mean is -1 if the divisor is right. It is
    the same for any split, since divisors come from the whole step.
    """
    masks = [np.ones(4, np.float32), np.zeros(8, np.float32)]
    weights = torch.zeros(2, 8)
    for row, each in enumerate(token_mean(masks)):
        weights[row, : len(each)] = torch.from_numpy(each)
    logprobs = torch.full((2, 8), -1.0)
    columns = {
        "token_weights": weights,
        "sampling_logprobs": logprobs,
        "advantages": torch.ones(2, 8),
    }
    whole = policy.grpo(logprobs, clip_low=0.8, clip_high=1.2, **columns)
    assert whole[0].item() == pytest.approx(-1.0)
    assert whole[1]["num_tokens"] == 4
    split = [
        policy.grpo(
            logprobs[row : row + 1],
            clip_low=0.8,
            clip_high=1.2,
            **{name: each[row : row + 1] for name, each in columns.items()},
        )[0].item()
        for row in range(2)
    ]
    assert split == pytest.approx([-1.0, 0.0])


@pytest.mark.parametrize("loss", [policy.ppo, policy.grpo, policy.gspo, policy.cispo])
@pytest.mark.parametrize(
    ("low", "high"),
    [(0.2, 0.28), (1.1, 1.2), (-0.1, 1.2), (0.8, math.nan), (math.nan, 1.2), (0.8, "1.2")],
)
def test_bounds_that_are_none_are_refused(loss, low, high):
    """Distances from 1 among them (case 77)."""
    with pytest.raises(ValueError, match="clip_high="):
        one_token(partial(loss, clip_low=low, clip_high=high), advantage=1.0)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (partial(policy.dppo, delta_low=-0.1, delta_high=0.1), "delta_low=-0.1: must be between"),
        (partial(policy.dppo, delta_low=0.1, delta_high=1.5), "delta_high=1.5: must be between"),
        (partial(policy.dro, beta=0.0), "beta=0.0: must be above 0"),
        (partial(policy.dro, beta=math.inf), "beta=inf: must be above 0"),
        (partial(policy.dro, beta=True), "beta=True: must be a number"),
    ],
)
def test_hyper_parameters_out_of_range_are_refused(loss, words):
    with pytest.raises(ValueError, match=words):
        one_token(loss, advantage=1.0)
