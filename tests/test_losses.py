"""Losses as configs name them: built, tried before anything is spent, and listed."""

import json
import math
from functools import partial

import pytest
import torch

from loss_fns import dpo, policy
from loss_fns.kl import with_kl
from tests.loss_fns.batches import EVERY
from tests.test_compose import group_files
from tunebook.columns import check_columns, loss_name, required_columns
from tunebook.compose import build_function, compose
from tunebook.errors import ConfigError
from tunebook.loss_listing import fitting_recipes, list_losses
from tunebook.losses import check_loss

COLUMNS = {
    "sft": ("token_weights",),
    "dpo": ("token_weights", "pair_weights", "reference_logprobs"),
    "grpo": ("token_weights", "sampling_logprobs", "advantages", "reference_logprobs"),
}
ESSENTIAL = {"sft": (), "dpo": ("pair_weights",), "grpo": ("advantages",)}
LISTED = list_losses(COLUMNS)


@pytest.mark.parametrize("listed", LISTED, ids=lambda listed: listed.name)
def test_every_loss_composes_with_the_recipe_it_fits(listed):
    """And passes what its `prepare` asks of it."""
    (recipe,) = listed.recipes
    loss = build_function(compose(recipe, [f"loss={listed.name}"]).loss, key="loss")
    check_columns(loss, COLUMNS[recipe], recipe=recipe, essential=ESSENTIAL[recipe])
    check_loss(loss)
    assert loss.keywords == listed.parameters
    assert listed.summary.endswith(".") and listed.target.endswith(loss_name(loss))


def test_every_loss_has_a_config():
    targets = {listed.target for listed in LISTED}
    names = {loss_name(loss) for loss in EVERY.values()}
    assert {target.rpartition(".")[2] for target in targets} == names
    assert [listed.name for listed in LISTED if listed.recipes == ("sft",)] == ["cross_entropy"]
    assert sorted(listed.name for listed in LISTED) == group_files("loss")


def test_every_hyper_parameter_has_its_value_in_the_config():
    """No default in Python, none left out of the YAML."""
    for listed in LISTED:
        loss = build_function({"_target_": listed.target}, key="loss")
        unbound = set(required_columns(loss)) - {each for c in COLUMNS.values() for each in c}
        assert unbound == set(listed.parameters), listed.name


def test_values_are_those_that_services_document():
    """`reference/losses.md`; where it has none, those of the papers."""
    found = {listed.name: dict(listed.parameters) for listed in LISTED}
    assert found["ppo"] == found["grpo"] == {"clip_low": 0.8, "clip_high": 1.2}
    assert found["cispo"] == {"clip_low": 0.0, "clip_high": 4.0}
    assert found["gspo"] == {"clip_low": 1 - 3e-4, "clip_high": 1 + 4e-4}
    assert found["dppo"] == {"delta_low": 0.15, "delta_high": 0.15}
    assert found["dro"] == {"beta": 0.05}
    assert found["dpo"] == {"beta": 0.1}
    assert found["orpo"] == {"beta": 1.0}


def test_a_recipe_fits_the_loss_that_reads_most_of_its_columns():
    assert fitting_recipes(("token_weights",), COLUMNS) == ("sft",)
    assert fitting_recipes(("token_weights", "pair_weights"), COLUMNS) == ("dpo",)
    assert fitting_recipes(("token_weights", "advantages"), COLUMNS) == ("grpo",)
    assert fitting_recipes(("nothing_like_it",), COLUMNS) == ()


@pytest.mark.parametrize(
    ("recipe", "overrides", "words"),
    [
        ("dpo", ["loss.beta=0"], r"^loss\.beta=0: must be above 0$"),
        ("dpo", ["loss.beta=-0.1"], r"^loss\.beta=-0\.1: must be above 0$"),
        ("dpo", ["loss.beta=null"], r"^loss\.beta=None: must be a number$"),
        ("dpo", ["loss=dpo_robust", "loss.label_smoothing=0.5"], r"^loss\.label_smoothing=0\.5: "),
        ("dpo", ["loss=dpo_conservative", "loss.label_smoothing=-0.1"], "at least 0 and below 0.5"),
        ("dpo", ["loss=ipo", "loss.label_smoothing=0.1"], "there is no 'label_smoothing'"),
        ("dpo", ["loss.label_smoothing=0.1"], "there is no 'label_smoothing'"),
        ("dpo", ["loss=dpo_robust", "loss.label_smothing=0.1"], r"loss\.label_smoothing"),
        ("grpo", ["loss=ppo", "loss.clip_ratio=0.2"], r"loss\.clip_ratio.*loss\.clip_low"),
        ("grpo", ["loss=ppo", "loss.epsilon=0.2"], r"loss\.clip_high, loss\.clip_low"),
        ("grpo", ["loss.clip_low=0.2", "loss.clip_high=0.28"], r"^loss\.clip_low=0\.2, clip_high="),
        ("dpo", ["loss._target_=loss_fns.dpo.dpo_robust"], r"needs 'label_smoothing'.*loss\.label"),
        ("dpo", ["loss=ppo"], "loss 'ppo' needs 'sampling_logprobs'"),
        ("dpo", ["loss=cross_entropy"], "does not read 'pair_weights'.*tunebook losses"),
        ("grpo", ["loss=cross_entropy"], "does not read 'advantages'.*tunebook losses"),
        ("grpo", ["loss=dpo"], "loss 'dpo_sigmoid' needs 'pair_weights'"),
    ],
)
def test_bad_settings_fail_before_anything_is_opened(recipe, overrides, words):
    """Cases 59 and 76: key, value and what is allowed; an option that a loss ignores is refused."""
    config = compose(recipe, overrides)
    with pytest.raises(ConfigError, match=words):
        loss = build_function(config.loss, key="loss")
        check_columns(loss, COLUMNS[recipe], recipe=recipe, essential=ESSENTIAL[recipe])
        check_loss(loss)


def test_the_smoothed_loss_of_the_config():
    """Case 59: beta d = 0.2 at eps 0.1 costs 0.61814, as the command line sets it."""
    loss = build_function(
        compose("dpo", ["loss=dpo_conservative", "loss.label_smoothing=0.1"]).loss, key="loss"
    )
    value, _ = loss(
        torch.tensor([[-1.0], [-3.0]]),
        token_weights=torch.ones(2, 1),
        pair_weights=torch.ones(2),
        reference_logprobs=torch.zeros(2, 1),
    )
    assert value.item() == pytest.approx(0.61814, abs=5e-6)


def refuses(logprobs, *, token_weights, strength):
    if strength > 1:
        raise ValueError(f"at most 1, not {strength}")
    return strength * (token_weights * logprobs).sum(), {}


def no_metrics(logprobs, *, token_weights):
    return (token_weights * logprobs).sum()


def per_token(logprobs, *, token_weights):
    return token_weights * logprobs, {}


def vector_metric(logprobs, *, token_weights):
    return (token_weights * logprobs).sum(), {"each": logprobs}


def independent(logprobs, *, token_weights):
    return token_weights.sum(), {}


def detached(logprobs, *, token_weights):
    return (token_weights.requires_grad_() * logprobs.detach()).sum(), {}


def leaking(logprobs, *, token_weights, sampling_logprobs, advantages):
    return -(token_weights * advantages * torch.exp(logprobs - sampling_logprobs)).sum(), {}


def unmasked(logprobs, *, token_weights):
    return -logprobs.mean(), {"num_tokens": token_weights.sum()}


def broken(logprobs, *, token_weights):
    return (logprobs @ token_weights).sum(), {}


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (partial(refuses, strength=2), r"loss 'refuses' with loss\.strength=2: at most 1, not 2"),
        (partial(refuses, strength="much"), r"loss\.strength=much: '>' not supported"),
        (no_metrics, r"returned a tensor \(float32, shape \[\]\)"),
        (per_token, r"returned a tensor \(float32, shape \[2, 3\]\) as its loss"),
        (vector_metric, r"shape \[2, 3\]\) as its metric 'each'"),
        (independent, "'independent': its value does not depend on the log-probs"),
        (detached, "'detached': its value does not depend on the log-probs"),
        (leaking, r"'leaking': on two made-up rows its value is nan.*torch\.where"),
        (unmasked, r"'unmasked': its gradient at a token whose token_weights are 0 is \[-0\.16"),
    ],
)
def test_an_own_loss_that_is_none_is_found_in_prepare(loss, words):
    with pytest.raises(ConfigError, match=words):
        check_loss(loss)


def test_a_fault_of_an_own_loss_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="mat1 and mat2") as raised:
        check_loss(broken)
    assert (
        "the loss 'broken' when prepare tried it on two made-up rows" in raised.value.__notes__[0]
    )


def in_place(logprobs, *, token_weights, anything):
    logprobs *= token_weights * anything
    return -logprobs.sum(), {"tokens": token_weights.sum()}


def test_an_own_loss_may_write_into_log_probs_and_read_columns_of_its_own():
    check_loss(in_place)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_loss_with_a_kl_term_is_tried_like_any(estimator):
    check_loss(
        with_kl(partial(policy.ppo, clip_low=0.8, clip_high=1.2), beta=0.1, estimator=estimator)
    )
    with pytest.raises(ConfigError, match=r"clip_low=0\.2"):
        check_loss(
            with_kl(partial(policy.ppo, clip_low=0.2, clip_high=0.2), beta=0.1, estimator=estimator)
        )


def positional(logprobs, token_weights, *more, scale=1.0, **options):
    return -scale * (token_weights * logprobs).sum(), {}


def test_columns_may_be_positional_parameters():
    """What has a default, and what takes any number of arguments, is no column."""
    assert required_columns(positional) == ("token_weights",)
    check_columns(positional, ("token_weights",), recipe="sft")
    check_loss(positional)
    with pytest.raises(ConfigError, match="needs 'token_weights'"):
        check_columns(positional, ("other",), recipe="sft")


def test_listing_is_plain_data():
    """What `tunebook losses --json` prints."""
    from dataclasses import asdict

    text = json.dumps([asdict(listed) for listed in LISTED])
    assert math.isclose(json.loads(text)[0]["parameters"]["beta"], 0.1)
    assert dpo.dpo_sigmoid.__doc__ is not None
    assert dpo.dpo_sigmoid.__doc__.splitlines()[0] in text
