"""Preference losses: golden values, formulas written out in plain floats, metrics, refusals."""

import math
from functools import partial

import pytest
import torch

from loss_fns import dpo
from tests.loss_fns.batches import PREFERENCE, columns_of, make_batch, value_and_gradient


def one_pair(loss, *, chosen, rejected, lengths=(1, 1), reference=(0.0, 0.0)):
    """Value, gradient `[2]` by row and metrics of one pair, from summed log-probs.

    Each completion has its log-prob spread evenly over its tokens; a prompt token of weight 0
    comes first.
    """
    width = 1 + max(lengths)
    logprobs = torch.zeros(2, width, dtype=torch.float64)
    reference_logprobs = torch.full((2, width), math.nan, dtype=torch.float64)
    weights = torch.zeros(2, width, dtype=torch.float64)
    for row, total in enumerate((chosen, rejected)):
        counted = slice(1, 1 + lengths[row])
        logprobs[row, counted] = total / lengths[row]
        reference_logprobs[row, counted] = reference[row] / lengths[row]
        weights[row, counted] = 1
    columns = {
        "token_weights": weights,
        "pair_weights": torch.ones(2, dtype=torch.float64),
        "reference_logprobs": reference_logprobs,
    }
    value, gradient, metrics = value_and_gradient(loss, logprobs, columns)
    return (
        value.item(),
        gradient[:, 1].tolist(),
        {name: float(each) for name, each in metrics.items()},
    )


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (partial(dpo.dpo_sigmoid, beta=0.1), 0.5981389),
        (partial(dpo.dpo_hinge, beta=0.1), 0.8),
        (partial(dpo.dpo_conservative, beta=0.1, label_smoothing=0.1), 0.6181389),
        (partial(dpo.dpo_robust, beta=0.1, label_smoothing=0.1), 0.5731389),
    ],
)
def test_golden_values(loss, expected):
    """The probe of `reference/losses.md`: beta 0.1 and d = 2.

    -log sigmoid(0.2) = ln(1 + e^-0.2) = 0.5981389; the hinge is 1 - 0.2; smoothing by 0.1 adds
    0.1 * 0.2; robust is (0.9 * 0.5981389 - 0.1 * 0.7981389) / 0.8.
    """
    assert one_pair(loss, chosen=-1.0, rejected=-3.0)[0] == pytest.approx(expected, abs=5e-8)


def test_golden_value_of_ipo():
    """d averaged over tokens 0.2 at beta 0.1: (0.2 - 5)^2 = 23.04."""
    value, _, _ = one_pair(
        partial(dpo.ipo, beta=0.1),
        chosen=-2.0,
        rejected=-2.0,
        lengths=(4, 4),
        reference=(-2.4, -1.6),
    )
    assert value == pytest.approx(23.04)


def test_sums_where_sums_are_due_and_means_where_means_are():
    """Case 51: log-ratios +1 over 3 tokens and -1 over 5, beta 0.1.

    Sums: -log sigmoid(0.2) = 0.59814. Means: 1/3 + 1/5 = 0.53333, (0.53333 - 5)^2 = 19.95111; on
    sums it would be (2 - 5)^2 = 9.
    """
    pair = {"chosen": -6.0, "rejected": -10.0, "lengths": (3, 5), "reference": (-7.0, -9.0)}
    assert one_pair(partial(dpo.dpo_sigmoid, beta=0.1), **pair)[0] == pytest.approx(
        0.59814, abs=5e-6
    )
    assert one_pair(partial(dpo.ipo, beta=0.1), **pair)[0] == pytest.approx(19.95111, abs=5e-6)
    normalised = one_pair(partial(dpo.dpo_sigmoid_norm, beta=0.1), **pair)[0]
    assert normalised == pytest.approx(math.log1p(math.exp(-0.1 * 8 / 15)))


@pytest.mark.parametrize("name", PREFERENCE)
def test_an_empty_completion_divides_by_at_least_one(name):
    """Case 51: counts are at least 1, so a row without completion tokens is no 0/0."""
    loss = PREFERENCE[name]
    logprobs, columns = make_batch()
    columns["token_weights"][1] = 0
    value, gradient, metrics = value_and_gradient(loss, logprobs, columns)
    assert torch.isfinite(value) and torch.isfinite(gradient).all()
    assert all(math.isfinite(each) for each in metrics.values())


def test_large_margins_are_stable():
    """Case 56: beta d = -1000 costs 1000 with a gradient of beta, +1000 costs nothing."""
    loss = partial(dpo.dpo_sigmoid, beta=0.1)
    value, gradient, _ = one_pair(loss, chosen=-10_000.0, rejected=0.0)
    assert value == 1000.0
    assert gradient == pytest.approx([-0.1, 0.1])
    assert one_pair(loss, chosen=0.0, rejected=-10_000.0)[0] == 0.0


def test_beta_is_in_the_margin_once():
    """Case 57: beta 0.1, log-ratios 3 and 1: rewards 0.3 and 0.1, margin 0.2, not 0.02."""
    _, _, metrics = one_pair(
        partial(dpo.dpo_sigmoid, beta=0.1), chosen=-4.0, rejected=-6.0, reference=(-7.0, -7.0)
    )
    assert metrics == pytest.approx(
        {
            "accuracy": 1.0,
            "margin": 0.2,
            "chosen_reward": 0.3,
            "rejected_reward": 0.1,
            "chosen_logprob": -4.0,
            "rejected_logprob": -6.0,
            "chosen_length": 1.0,
            "rejected_length": 1.0,
            "kl": 2.0,
            "num_tokens": 2.0,
        }
    )


@pytest.mark.parametrize("name", PREFERENCE)
def test_metrics_of_a_step_are_means_over_its_pairs(name):
    """Weights of 1/3 for three pairs: accuracies 1, 0 and a tie of 1/2 are 1/2 together."""
    logprobs, columns = make_batch()
    columns = {key: torch.ones_like(each) for key, each in columns.items()}
    columns["pair_weights"] /= 3
    columns["reference_logprobs"] = torch.full_like(logprobs, -2.0)
    for row, value in enumerate((-1.0, -3.0, -3.0, -1.0, -2.5, -2.5)):
        logprobs[row] = value
    _, _, metrics = value_and_gradient(PREFERENCE[name], logprobs, columns)
    assert metrics["accuracy"].item() == pytest.approx(0.5)
    assert metrics["margin"].item() == pytest.approx(0.0, abs=1e-12)
    assert metrics["chosen_logprob"].item() == pytest.approx(5 * (-1 - 3 - 2.5) / 3)
    assert metrics["chosen_length"].item() == pytest.approx(5)
    assert metrics["num_tokens"].item() == 30
    assert ("kl" in metrics) == (name not in ("simpo", "orpo"))


def test_scores_are_what_the_loss_compares():
    """Losses on averages report rewards on averages; without a reference on the log-prob itself."""
    pair = {"chosen": -6.0, "rejected": -10.0, "lengths": (3, 5), "reference": (-7.0, -9.0)}
    averaged = one_pair(partial(dpo.ipo, beta=0.1), **pair)[2]
    assert averaged["chosen_reward"] == pytest.approx(0.1 / 3)
    assert averaged["margin"] == pytest.approx(0.1 * 8 / 15)
    assert (averaged["chosen_logprob"], averaged["chosen_length"]) == pytest.approx((-6.0, 3.0))
    plain = one_pair(partial(dpo.simpo, beta=2.0, gamma=0.5), **pair)[2]
    assert (plain["chosen_reward"], plain["margin"]) == pytest.approx((-4.0, 0.0))
    assert plain["accuracy"] == 0.5


def softplus(x):
    """ln(1 + e^x), which is -log sigmoid(-x)."""
    return math.log1p(math.exp(x))


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def expected(name, dc, dr, lc, lr, nc, nr):
    """Loss of one pair from log-ratios (d), log-probs (l) and lengths (n) of both completions."""
    d, x, mean = dc - dr, 0.3 * (dc - dr), dc / nc - dr / nr
    ac, ar = lc / nc, lr / nr
    return {
        "dpo_sigmoid": lambda: softplus(-x),
        "dpo_conservative": lambda: 0.9 * softplus(-x) + 0.1 * softplus(x),
        "dpo_robust": lambda: (0.8 * softplus(-x) - 0.2 * softplus(x)) / 0.6,
        "dpo_hinge": lambda: max(0.0, 1 - x),
        "dpo_sigmoid_norm": lambda: softplus(-2 * mean),
        "dpo_sft": lambda: softplus(-x) - 0.5 * ac,
        "ipo": lambda: (mean - 1.25) ** 2,
        "apo_zero": lambda: 1 - sigmoid(0.3 * dc) + sigmoid(0.3 * dr),
        "apo_down": lambda: sigmoid(0.3 * dc) + 1 - sigmoid(0.3 * d),
        "exo_pair": lambda: (
            sigmoid(x) * math.log(sigmoid(x) / 0.99) + sigmoid(-x) * math.log(sigmoid(-x) / 0.01)
        ),
        "nca_pair": lambda: (
            softplus(-0.3 * dc) + 0.5 * softplus(0.3 * dc) + 0.5 * softplus(0.3 * dr)
        ),
        "sppo_hard": lambda: (dc - 1 / 0.6) ** 2 + (dr + 1 / 0.6) ** 2,
        "discopop": lambda: (1 - sigmoid(2 * x)) * softplus(-x) + sigmoid(2 * x) * math.exp(-x),
        "simpo": lambda: softplus(-(2 * (ac - ar) - 1)),
        "orpo": lambda: (
            -ac
            + softplus(
                math.log(math.exp(ar) / (1 - math.exp(ar)))
                - math.log(math.exp(ac) / (1 - math.exp(ac)))
            )
        ),
    }[name]()


@pytest.mark.parametrize("name", PREFERENCE)
@pytest.mark.parametrize("seed", range(4))
def test_value_is_the_formula(name, seed):
    logprobs, columns = make_batch(seed=seed)
    value, _, _ = value_and_gradient(PREFERENCE[name], logprobs, columns)
    weights = columns["token_weights"].tolist()
    total = 0.0
    for pair in range(0, len(logprobs), 2):
        sums = []
        for row in (pair, pair + 1):
            p, f = logprobs[row].tolist(), columns["reference_logprobs"][row].tolist()
            sums.append(
                (
                    sum(w * (a - b) for w, a, b in zip(weights[row], p, f, strict=True)),
                    sum(w * a for w, a in zip(weights[row], p, strict=True)),
                    sum(1 for w in weights[row] if w),
                )
            )
        (dc, lc, nc), (dr, lr, nr) = sums
        total += columns["pair_weights"][pair].item() * expected(name, dc, dr, lc, lr, nc, nr)
    assert value.item() == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("name", PREFERENCE)
def test_gradcheck(name):
    logprobs, columns = make_batch(seed=1)
    loss, given = PREFERENCE[name], columns_of(PREFERENCE[name], columns)
    assert torch.autograd.gradcheck(
        lambda each: loss(each, **given)[0], logprobs.clone().requires_grad_()
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dpo_sigmoid", math.log(2)),
        ("dpo_conservative", math.log(2)),
        ("dpo_robust", math.log(2)),
        ("dpo_hinge", 1.0),
        ("dpo_sigmoid_norm", math.log(2)),
        ("ipo", 1.5625),
        ("apo_zero", 1.0),
        ("apo_down", 1.0),
        ("nca_pair", 2 * math.log(2)),
    ],
)
def test_at_the_reference(name, value):
    """The policy at the start of a run: every log-ratio 0, so -log sigmoid(0) = ln 2."""
    logprobs, columns = make_batch()
    columns["reference_logprobs"] = logprobs
    columns["pair_weights"][:] = 1 / 3
    found, _, metrics = value_and_gradient(PREFERENCE[name], logprobs, columns)
    assert found.item() == pytest.approx(value)
    assert metrics["accuracy"].item() == pytest.approx(0.5)
    assert metrics["kl"] == 0


@pytest.mark.parametrize("value", [-1e-9, 0.0, -80.0])
def test_the_odds_of_orpo_at_its_clamp(value):
    """Beyond the clamp the odds stand still, and the likelihood goes on."""
    _, gradient, _ = one_pair(partial(dpo.orpo, beta=1.0), chosen=value, rejected=-1.0)
    assert gradient[0] == pytest.approx(-1.0)
    assert math.isfinite(gradient[1])


@pytest.mark.parametrize("name", PREFERENCE)
def test_both_rows_of_a_pair_get_a_gradient_of_the_right_sign(name):
    """A lower loss with a likelier chosen (but for apo_down) and a less likely rejected."""
    _, gradient, _ = one_pair(
        PREFERENCE[name], chosen=-2.0, rejected=-1.5, reference=(-2.1, -1.4), lengths=(2, 2)
    )
    assert gradient[1] > 0
    assert name == "apo_down" or gradient[0] < 0


@pytest.mark.parametrize("loss", [dpo.dpo_conservative, dpo.dpo_robust, dpo.exo_pair])
@pytest.mark.parametrize("eps", [-0.1, 0.5, 0.9, math.nan, "0.1"])
def test_label_smoothing_out_of_range_is_refused(loss, eps):
    """Case 59."""
    with pytest.raises(ValueError, match="label_smoothing="):
        one_pair(partial(loss, beta=0.1, label_smoothing=eps), chosen=-1.0, rejected=-2.0)


def test_smoothing_that_would_be_infinite_is_refused():
    with pytest.raises(ValueError, match="label_smoothing=0: must be above 0"):
        one_pair(partial(dpo.exo_pair, beta=0.1, label_smoothing=0), chosen=-1.0, rejected=-2.0)


def test_without_smoothing_it_is_plain_dpo():
    pair = {"chosen": -1.0, "rejected": -3.0}
    plain = one_pair(partial(dpo.dpo_sigmoid, beta=0.1), **pair)[0]
    for loss in (dpo.dpo_conservative, dpo.dpo_robust):
        assert one_pair(partial(loss, beta=0.1, label_smoothing=0.0), **pair)[0] == plain
    assert one_pair(partial(dpo.dpo_sft, beta=0.1, sft_weight=0.0), **pair)[0] == plain


@pytest.mark.parametrize("name", PREFERENCE)
@pytest.mark.parametrize("beta", [0.0, -0.1, math.nan, math.inf, None])
def test_beta_out_of_range_is_refused(name, beta):
    """Case 59."""
    loss = PREFERENCE[name]
    assert isinstance(loss, partial)
    with pytest.raises(ValueError, match="beta="):
        one_pair(partial(loss, beta=beta), chosen=-1.0, rejected=-2.0)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (partial(dpo.simpo, beta=1.0, gamma=-0.5), "gamma=-0.5: must be at least 0"),
        (partial(dpo.dpo_sft, beta=1.0, sft_weight=-1), "sft_weight=-1: must be at least 0"),
        (partial(dpo.discopop, beta=1.0, tau=0.0), "tau=0.0: must be above 0"),
    ],
)
def test_other_hyper_parameters_out_of_range_are_refused(loss, words):
    with pytest.raises(ValueError, match=words):
        one_pair(loss, chosen=-1.0, rejected=-2.0)


def test_the_sft_term_is_a_mean_over_the_tokens_of_each_chosen_completion():
    """Chosen rows of 2 tokens at -1 and -3, and of 1 at -5, weights 1/2: (2 + 5) / 2."""
    logprobs = torch.tensor([[-1.0, -3.0], [-9.0, -9.0], [-5.0, 7.0], [-9.0, -9.0]])
    weights = torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    value = dpo.sft_term(logprobs, token_weights=weights, pair_weights=torch.full((4,), 0.5))
    assert value.item() == pytest.approx(3.5)
