"""The losses of the service that mean the same as ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunebook.backends.remote.losses import BuiltIn, ServiceLoss

CROSS_ENTROPY = "LOSS_TYPE_CROSS_ENTROPY"
RATIO_BOUNDS = {"clip_low": "clip_low_threshold", "clip_high": "clip_high_threshold"}
SAME_MEANING: Mapping[str, ServiceLoss] = {
    "cross_entropy": ServiceLoss(CROSS_ENTROPY, {}),
    "importance_sampling": ServiceLoss("LOSS_TYPE_IMPORTANCE_SAMPLING", {}),
    "ppo": ServiceLoss("LOSS_TYPE_PPO", RATIO_BOUNDS),
    # Per token ours is PPO's; the service's GRPO divides by a horizon that it does not publish.
    "grpo": ServiceLoss("LOSS_TYPE_PPO", RATIO_BOUNDS),
    "cispo": ServiceLoss("LOSS_TYPE_CISPO", RATIO_BOUNDS),
    "dppo": ServiceLoss("LOSS_TYPE_DPPO", {"delta_low": "delta_low", "delta_high": "delta_high"}),
    "dro": ServiceLoss("LOSS_TYPE_DRO", {"beta": "beta"}),
}
"""Ours -> the service's. Its policy losses take any weight other than 0 for 1."""
PARAMETERS_OF = {
    "LOSS_TYPE_PPO": "ppo_params",
    "LOSS_TYPE_CISPO": "cispo_params",
    "LOSS_TYPE_DPPO": "dppo_params",
    "LOSS_TYPE_DRO": "dro_params",
}
"""Where the parameters of a loss go."""


def loss_config(own: BuiltIn) -> dict[str, Any]:
    """A loss of the service as it takes it."""
    config: dict[str, Any] = {"type": own.name}
    if own.parameters:
        config[PARAMETERS_OF[own.name]] = own.parameters
    return config
