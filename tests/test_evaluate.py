"""Held-out evaluation and the choice of the monitor."""

import numpy as np
import pytest
import torch

from tests.fakes import Done
from tunebook.config import Direction, EvalConfig
from tunebook.errors import ConfigError
from tunebook.evaluate import choose_monitor, evaluate_loss, evaluate_nll
from tunebook.types import Datum


class Scripted:
    """A session whose log-probs are the negated first token of each datum."""

    def __init__(self):
        self.batches = []

    def forward(self, data):
        self.batches.append(len(data))
        logprobs = []
        for datum in data:
            values = torch.full((datum.num_scored,), -float(datum.tokens[0]))
            values[torch.from_numpy(datum.columns["token_weights"]) == 0] = float("nan")
            logprobs.append(values)
        return Done(logprobs)


def datum(nll, supervised, unsupervised=2):
    mask = np.array([0.0] * unsupervised + [1.0] * supervised, dtype=np.float32)
    return Datum(np.full(len(mask) + 1, nll, dtype=np.int32), {"token_weights": mask})


@pytest.mark.parametrize("rows_per_call", [1, 2, 3, 10])
def test_token_weighted_over_the_whole_split(rows_per_call):
    """1, 3 and 6 tokens at NLL 4, 2, 1 give 1.6 at every eval batch size."""
    session = Scripted()
    metrics = evaluate_nll(
        session, [datum(4, 1), datum(2, 3), datum(1, 6)], rows_per_call=rows_per_call
    )
    assert metrics["eval/loss"] == pytest.approx(1.6)
    assert metrics["eval/perplexity"] == pytest.approx(np.exp(1.6))
    assert metrics["eval/num_tokens"] == 10
    assert max(session.batches) <= rows_per_call


def test_rows_without_a_target_add_nothing():
    """Case 41: finite from the others."""
    metrics = evaluate_nll(Scripted(), [datum(9, 0), datum(2, 3)], rows_per_call=2)
    assert metrics["eval/loss"] == pytest.approx(2.0)


def config(**values):
    return EvalConfig(fraction=0.05, min_rows=8, max_rows=512, **values)


def test_direction_is_inferred_or_must_be_stated():
    """Case 47."""
    available = ("eval/loss", "eval/accuracy", "eval/thing")
    assert choose_monitor(config(), available=available, default="eval/loss").lower_is_better
    assert not choose_monitor(
        config(monitor="eval/accuracy"), available=available, default="eval/loss"
    ).lower_is_better
    with pytest.raises(ConfigError, match=r"eval\.direction"):
        choose_monitor(config(monitor="eval/thing"), available=available, default="eval/loss")
    stated = config(monitor="eval/thing", direction=Direction.up)
    assert choose_monitor(stated, available=available, default="eval/loss").direction == "up"
    with pytest.raises(ConfigError, match=r"eval/accurcy.*eval/loss, eval/accuracy"):
        choose_monitor(config(monitor="eval/accurcy"), available=available, default="eval/loss")


@pytest.mark.parametrize(
    ("metric", "direction"),
    [
        ("eval/sft_loss", "down"),
        ("eval/KL", "down"),
        ("eval/chosen_reward", "up"),
        ("eval/checklist_score", "up"),  # chec-kl-ist
        ("eval/lossless", None),
        ("eval/no_errors", None),
        ("eval/reward_loss", None),  # says both
        ("eval/num_tokens", None),
    ],
)
def test_direction_goes_by_whole_words(metric, direction):
    values = {"available": (metric,), "default": metric}
    if direction is None:
        with pytest.raises(ConfigError, match=r"eval\.direction"):
            choose_monitor(config(), **values)
    else:
        assert choose_monitor(config(), **values).direction == direction
    known = {metric: Direction.up}
    assert choose_monitor(config(), **values, directions=known).direction == "up"
    stated = config(direction=Direction.down)
    assert choose_monitor(stated, **values, directions=known).direction == "down"


def weighted_nll(logprobs, *, token_weights, scale):
    """A loss with a divisor in `token_weights` and one number a row."""
    rows = -(token_weights * logprobs).sum(dim=1)
    return (scale * rows).sum(), {"rows": scale.sum(), "worst": logprobs.min()}


@pytest.mark.parametrize("rows_per_call", [1, 2, 3, 10])
def test_a_loss_is_summed_over_the_whole_split(rows_per_call):
    """1, 3 and 6 tokens at NLL 4, 2, 1 with the divisor 10 in the weights: 1.6 in any batches."""
    session = Scripted()
    data = []
    for each in (datum(4, 1), datum(2, 3), datum(1, 6)):
        weights = each.columns["token_weights"] / 10
        data.append(Datum(each.tokens, {"token_weights": weights, "scale": 1.0}))
    metrics = evaluate_loss(session, data, weighted_nll, rows_per_call=rows_per_call)
    assert metrics["loss"] == pytest.approx(1.6)
    assert metrics["rows"] == 3.0
    assert max(session.batches) <= rows_per_call


def test_a_reward_that_should_fall_has_no_direction_of_its_own():
    available = ("eval/chosen_reward", "eval/rejected_reward")
    chosen = choose_monitor(
        config(monitor="eval/chosen_reward"), available=available, default="eval/loss"
    )
    assert not chosen.lower_is_better
    with pytest.raises(ConfigError, match=r"eval\.direction"):
        choose_monitor(
            config(monitor="eval/rejected_reward"), available=available, default="eval/loss"
        )
