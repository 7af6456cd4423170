"""Adapters as the service takes them."""

from __future__ import annotations

from typing import Any

from tunebook.errors import ConfigError
from tunebook.types import LoraConfig


def lora_config(lora: LoraConfig) -> dict[str, Any]:
    """The adapter as the service takes it.

    Raises:
        ConfigError: it has none like this.
    """
    if lora.rank < 1:
        raise ConfigError(f"lora.rank={lora.rank}: must be at least 1")
    if not 0 <= lora.dropout < 1:
        raise ConfigError(f"lora.dropout={lora.dropout}: must be at least 0 and below 1")
    if lora.target_modules != "all-linear":
        raise ConfigError(
            f"lora.target_modules={lora.target_modules}: the service adapts every linear layer but "
            "the output head; use all-linear"
        )
    alpha = lora.scale * lora.rank
    if alpha < 1 or abs(alpha - round(alpha)) > 1e-6:
        raise ConfigError(
            f"lora.alpha={lora.alpha:g}"
            + (f" with lora.rslora=true is {alpha:g} for the service" if lora.rslora else "")
            + ": the service takes whole numbers from 1"
        )
    return {
        "rank": lora.rank,
        "alpha": round(alpha),
        "dropout": lora.dropout,
        "seed": lora.seed,
        "train_unembed": False,
    }
