"""Every loss trains as on the local backend: by the service's own where it means the same."""

import pytest

from tests.backends.services import gradient_of, make_rows
from tests.loss_fns.batches import EVERY, POLICY
from tunebook.backends.remote.losses import built_in
from tunebook.backends.tinker.dialect import SAME_MEANING

OWN = {
    "cross_entropy": "cross_entropy",
    "importance_sampling": "importance_sampling",
    "ppo": "ppo",
    "grpo": "ppo",
    "cispo": "cispo",
    "dro": "dro",
}
ELSE = ("gspo", "dppo", "grpo_k3", "dpo_sigmoid")
"""Some that the service has not; `remote/test_losses.py` differentiates every loss."""


@pytest.mark.parametrize("name", [*OWN, *ELSE])
def test_gradient_and_metrics_are_those_of_the_local_backend(
    name, open_tinker, open_local, tmp_path
) -> None:
    """By the service's own loss and in two passes, where it has one."""
    loss_fn, rows = EVERY[name], make_rows(same_weights=name == "dro")
    own = built_in(loss_fn, rows, SAME_MEANING)
    assert (own.name if own else None) == OWN.get(name)
    adapter = {"alpha": 32.0}
    expected_metrics, expected = gradient_of(
        open_local(), loss_fn, rows, tmp_path / "local", **adapter
    )
    assert expected.norm() > 0
    for losses in ("auto", "two_passes")[: 2 if own else 1]:
        backend = open_tinker(losses=losses)
        metrics, gradient = gradient_of(backend, loss_fn, rows, tmp_path / losses, **adapter)
        assert (gradient - expected).norm() < 1e-4 * expected.norm()
        assert metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-6)


def test_every_parameter_is_sent() -> None:
    """The service's bounds are 0.8 and 1.2 where none are sent, ours may be others."""
    own = built_in(POLICY["cispo"], make_rows(same_weights=False), SAME_MEANING)
    assert own is not None
    assert own.parameters.keys() == {"clip_low_threshold", "clip_high_threshold"}
