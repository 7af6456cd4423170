"""Every loss trains as on the local backend: by the service's own where it means the same."""

from functools import partial

import numpy as np
import pytest
import torch

from loss_fns import policy
from loss_fns.cross_entropy import cross_entropy
from tests.backends.services import ROWS_PER_UNIT, gradient_of, make_rows
from tests.loss_fns.batches import EVERY, POLICY, PREFERENCE, WITH_KL
from tunebook.backends.remote.losses import built_in, differentiated
from tunebook.backends.together.losses import SAME_MEANING
from tunebook.columns import required_columns
from tunebook.types import Datum

CASES = {
    "cross_entropy": (cross_entropy, True, "LOSS_TYPE_CROSS_ENTROPY"),
    **{
        name: (loss_fn, False, f"LOSS_TYPE_{name.upper()}")
        for name, loss_fn in POLICY.items()
        if name not in ("grpo", "gspo", "dro")
    },
    "grpo": (POLICY["grpo"], False, "LOSS_TYPE_PPO"),
    "dro": (POLICY["dro"], True, "LOSS_TYPE_DRO"),
    "dro_by_rows": (POLICY["dro"], False, None),
    "gspo": (POLICY["gspo"], False, None),
    "with_kl": (WITH_KL["grpo_k3"], False, None),
    "dpo": (PREFERENCE["dpo_sigmoid"], False, None),
    "orpo": (PREFERENCE["orpo"], False, None),
}


@pytest.mark.parametrize("name", CASES)
def test_gradient_and_metrics_are_those_of_the_local_backend(
    name, attach, open_local, tmp_path
) -> None:
    loss_fn, same_weights, kind = CASES[name]
    rows = make_rows(same_weights=same_weights)
    own = built_in(loss_fn, rows, SAME_MEANING)
    assert (own.name if own else None) == kind
    metrics, gradient = gradient_of(attach(), loss_fn, rows, tmp_path / "remote")
    expected_metrics, expected = gradient_of(open_local(), loss_fn, rows, tmp_path / "local")
    assert expected.norm() > 0
    assert (gradient - expected).norm() < 1e-4 * expected.norm()
    assert metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", EVERY)
def test_two_passes_send_the_gradient_of_the_loss(name) -> None:
    """Case by case what autograd says of all rows at once."""
    loss_fn = EVERY[name]
    rows = make_rows(same_weights=False)
    random = np.random.default_rng(1)
    logprobs = [
        np.where(row.columns["token_weights"] != 0, random.uniform(-5, -4, row.num_scored), np.nan)
        for row in rows
    ]
    found, metrics = differentiated(
        rows, [each.astype(np.float32) for each in logprobs], loss_fn, rows_per_unit=ROWS_PER_UNIT
    )
    longest = max(row.num_scored for row in rows)
    padded = torch.zeros(len(rows), longest)
    columns = {
        column: torch.zeros(len(rows), longest)
        if column != "pair_weights"
        else torch.full((len(rows),), 0.5)
        for column in required_columns(loss_fn)
    }
    for number, row in enumerate(rows):
        padded[number, : row.num_scored] = torch.from_numpy(logprobs[number]).float()
        for column in columns.keys() - {"pair_weights"}:
            columns[column][number, : row.num_scored] = torch.from_numpy(row.columns[column])
    leaf = padded.requires_grad_()
    loss, _ = loss_fn(leaf.clone(), **columns)
    (expected,) = torch.autograd.grad(loss, leaf)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for number, row in enumerate(rows):
        ours = torch.from_numpy(found[number])
        torch.testing.assert_close(ours, expected[number, : row.num_scored])
        assert (ours[torch.from_numpy(row.columns["token_weights"]) == 0] == 0).all()


def test_weights_go_into_the_advantages() -> None:
    """The service takes every weight other than 0 for 1."""
    rows = make_rows(same_weights=False)
    own = built_in(partial(policy.ppo, clip_low=0.5, clip_high=1.5), rows, SAME_MEANING)
    assert own is not None
    assert own.parameters == {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}
    columns = own.columns[0]
    assert columns["weights"].tolist() == [0, 0, 0, 1, 1, 1]
    np.testing.assert_allclose(columns["advantages"], [0] * 3 + [0.7 * 0.25 / 3] * 3)


def test_the_pull_of_dro_is_weighted_too() -> None:
    own = built_in(POLICY["dro"], make_rows(same_weights=True), SAME_MEANING)
    assert own is not None and own.parameters["beta"] == pytest.approx(0.05 * 0.1)


def test_negative_weights_take_two_passes() -> None:
    """-w min(r A, clip(r) A) is not a clipped surrogate of w A where w is below 0."""
    rows = make_rows(same_weights=True)
    rows = [
        Datum(row.tokens, {**row.columns, "token_weights": -row.columns["token_weights"]})
        for row in rows
    ]
    assert built_in(POLICY["ppo"], rows, SAME_MEANING) is None
    assert built_in(cross_entropy, rows, SAME_MEANING) is not None


def test_an_own_loss_is_never_taken_for_one_of_the_service() -> None:
    def ppo(logprobs, *, token_weights, sampling_logprobs, advantages, clip_low, clip_high):
        return logprobs.sum(), {}

    rows = make_rows(same_weights=True)
    assert built_in(partial(ppo, clip_low=0.8, clip_high=1.2), rows, SAME_MEANING) is None
