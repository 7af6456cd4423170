"""KL terms: golden values, gradients, what the gradient estimates, extremes, composition."""

import inspect
import math
from functools import partial

import pytest
import torch

from loss_fns import policy
from loss_fns.kl import ESTIMATORS, k1, k2, k3, with_kl
from tests.loss_fns.batches import columns_of, make_batch, value_and_gradient
from tunebook.columns import check_columns, loss_name, required_columns
from tunebook.errors import ConfigError

GRPO = partial(policy.grpo, clip_low=0.8, clip_high=1.2)
POLICY_COLUMNS = ("token_weights", "sampling_logprobs", "advantages")


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_golden_values():
    """p = ln 0.5, f = ln 0.3: ln(5/3), its square over 2, and 0.6 - ln 0.6 - 1."""
    p, f = tensor(math.log(0.5)), tensor(math.log(0.3))
    assert k1(p, f).item() == pytest.approx(0.5108256, abs=5e-8)
    assert k2(p, f).item() == pytest.approx(0.1304714, abs=5e-8)
    assert k3(p, f).item() == pytest.approx(0.1108256, abs=5e-8)


def test_a_reference_that_is_twice_as_likely():
    """Case 74: f - p = ln 2 gives 2 - ln 2 - 1."""
    assert k3(tensor(-1.0), tensor(-1.0 + math.log(2))).item() == pytest.approx(0.30685, abs=5e-6)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_gradients_are_the_formula(name):
    """By p: 1, p - f and 1 - e^(f - p)."""
    p = tensor(-0.1, -1.0, -2.0, -3.0).requires_grad_()
    f = tensor(-0.7, -0.9, -2.0, -1.0)
    (gradient,) = torch.autograd.grad(ESTIMATORS[name](p, f).sum(), p)
    logratio = (p - f).tolist()
    by_hand = {"k1": [1.0] * 4, "k2": logratio, "k3": [1 - math.exp(-each) for each in logratio]}
    assert gradient.tolist() == pytest.approx(by_hand[name], abs=1e-14)
    assert torch.autograd.gradcheck(lambda each: ESTIMATORS[name](each, f), p)


def test_what_the_gradients_estimate():
    """Over a whole distribution: k1 has gradient 0, k2 that of the divergence, k3 nearly so.

    The expectation over tokens of the policy of the gradient of each estimator, the sampling itself
    held fixed, against the gradient of sum p (log p - log f).
    """
    logits = tensor(0.3, -0.4, 0.1).requires_grad_()
    reference = torch.log_softmax(tensor(0.2, -0.3, 0.2), 0)
    logprobs = torch.log_softmax(logits, 0)
    divergence = (logprobs.exp() * (logprobs - reference)).sum()
    (exact,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    probabilities = logprobs.detach().exp()
    found = {}
    for name, estimator in ESTIMATORS.items():
        value = (probabilities * estimator(logprobs, reference)).sum()
        (found[name],) = torch.autograd.grad(value, logits, retain_graph=True)
        if name != "k2":  # which is biased
            assert value.item() == pytest.approx(divergence.item(), rel=1e-10)
    assert torch.allclose(found["k1"], torch.zeros(3, dtype=torch.float64), atol=1e-15)
    assert torch.allclose(found["k2"], exact, rtol=1e-12)
    assert torch.allclose(found["k3"], exact, atol=0.05 * exact.abs().max().item())
    assert not torch.allclose(found["k3"], exact, rtol=1e-3)


@pytest.mark.parametrize("logratio", [20.0, 50.0, 100.0, 1000.0])
def test_a_policy_far_below_the_reference_is_still_pulled_back(logratio):
    """Case 74, ratio e^100 and more: finite, and the gradient raises p with the strength at 20."""
    p = torch.tensor([-logratio], requires_grad=True)
    value = k3(p, torch.zeros(1)).sum()
    (gradient,) = torch.autograd.grad(value, p)
    line = math.exp(20) * (1 + logratio - 20) - logratio - 1
    assert value.item() == pytest.approx(line, rel=1e-6)
    assert gradient.item() == pytest.approx(1 - math.exp(20), rel=1e-6)


def test_a_policy_far_above_the_reference_has_a_gradient_of_one():
    p = torch.zeros(1, requires_grad=True)
    value = k3(p, torch.tensor([-1000.0])).sum()
    (gradient,) = torch.autograd.grad(value, p)
    assert (value.item(), gradient.item()) == (999.0, 1.0)


def test_a_small_divergence_is_not_lost_to_rounding():
    """At f - p = 2^-10 k3 is 4.77e-7, four times the rounding of e^x - 1 in float32."""
    p = torch.tensor([-1.0])
    value = k3(p, p + 2.0**-10).item()
    assert value == pytest.approx(math.expm1(2**-10) - 2**-10, rel=1e-3)
    assert (k3(p, p) == 0).all()


def test_the_gradient_near_the_reference_is_right_in_float32():
    """1 - e^(2^-10), with the absolute rounding of 1 in float32."""
    p = torch.tensor([-1.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(k3(p, p.detach() + 2.0**-10).sum(), p)
    assert gradient.item() == pytest.approx(-math.expm1(2**-10), abs=2e-7)


def test_the_term_is_weighted_and_added():
    """Two tokens at beta 0.5 and weights 1/4, 1/2: 0.5 (0.25 k_1 + 0.5 k_2) beside the loss."""
    columns = {
        "token_weights": tensor(0.25, 0.5, 0.0)[None],
        "sampling_logprobs": tensor(-1.0, -2.0, math.nan)[None],
        "reference_logprobs": tensor(-1.5, -1.0, math.nan)[None],
        "advantages": tensor(1.0, -1.0, 0.0)[None],
    }
    logprobs = tensor(-1.0, -2.0, 0.0)[None]
    loss, metrics = with_kl(GRPO, beta=0.5, estimator="k2")(logprobs, **columns)
    plain, plain_metrics = GRPO(logprobs, **columns_of(GRPO, columns))
    assert loss.item() == pytest.approx(plain.item() + 0.5 * (0.25 * 0.125 + 0.5 * 0.5))
    assert metrics["kl_sum"].item() == pytest.approx(0.625)
    assert {name: metrics[name] for name in plain_metrics} == plain_metrics
    assert metrics.keys() - plain_metrics.keys() == {"kl_sum"}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_term_reaches_the_gradient(name):
    """Case 75: with a coefficient and a drifted policy the gradient is another one, by the formula.

    At the reference itself k2 and k3 have gradient 0, and the two agree.
    """
    logprobs, columns = make_batch()
    loss = with_kl(GRPO, beta=0.1, estimator=name)
    _, gradient, _ = value_and_gradient(loss, logprobs, columns)
    _, plain, _ = value_and_gradient(GRPO, logprobs, columns)
    logratio = logprobs - columns["reference_logprobs"]
    slope = {"k1": torch.ones_like(logratio), "k2": logratio, "k3": 1 - (-logratio).exp()}[name]
    added = 0.1 * columns["token_weights"] * slope
    assert torch.allclose(gradient, plain + added, rtol=1e-12, atol=1e-15)
    assert not torch.allclose(gradient, plain, atol=1e-4)
    columns["reference_logprobs"] = logprobs
    _, at_reference, _ = value_and_gradient(loss, logprobs, columns)
    assert torch.allclose(at_reference, plain) == (name != "k1")


def test_it_looks_like_the_loss_it_wraps():
    """Columns and name as the recipe and the record see them, bound hyper-parameters hidden."""
    loss = with_kl(GRPO, beta=0.1, estimator="k3")
    for form in (loss, partial(loss), with_kl(policy.importance_sampling, beta=1, estimator=k1)):
        assert required_columns(form) == (*POLICY_COLUMNS, "reference_logprobs")
        check_columns(form, (*POLICY_COLUMNS, "reference_logprobs"), recipe="grpo")
    assert loss_name(loss) == loss_name(partial(loss)) == "grpo"
    with pytest.raises(ConfigError, match=r"loss 'grpo' needs 'reference_logprobs'"):
        check_columns(loss, POLICY_COLUMNS, recipe="grpo")
    assert inspect.signature(loss).parameters["clip_low"].default == 0.8


def test_a_loss_that_reads_the_reference_itself_gets_it_once():
    def pulled(logprobs, *, reference_logprobs, token_weights):
        return (token_weights * (logprobs - reference_logprobs)).sum(), {}

    loss = with_kl(pulled, beta=2.0, estimator="k1")
    assert required_columns(loss) == ("reference_logprobs", "token_weights")
    value, _ = loss(
        tensor(-1.0)[None], token_weights=tensor(1.0)[None], reference_logprobs=tensor(-2.0)[None]
    )
    assert value.item() == 3.0


def test_an_estimator_of_ones_own():
    def absolute(logprobs, reference_logprobs):
        return (logprobs - reference_logprobs).abs()

    logprobs, columns = make_batch()
    loss = with_kl(GRPO, beta=1.0, estimator=absolute)
    _, _, metrics = value_and_gradient(loss, logprobs, columns)
    marked = columns["token_weights"] != 0
    expected = (logprobs - columns["reference_logprobs"]).abs()[marked].sum()
    assert metrics["kl_sum"].item() == pytest.approx(expected.item())


@pytest.mark.parametrize("beta", [0.0, -0.1, math.nan, math.inf, "0.1"])
def test_a_weight_that_is_none_is_refused(beta):
    with pytest.raises(ValueError, match="beta="):
        with_kl(GRPO, beta=beta, estimator="k3")


def test_an_unknown_estimator_names_those_there_are():
    with pytest.raises(ValueError, match="estimator=k4: must be one of k1, k2, k3"):
        with_kl(GRPO, beta=0.1, estimator="k4")
