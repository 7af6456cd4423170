"""Adapters as the service takes them: a rank, a seed, and which groups of layers."""

from __future__ import annotations

from typing import Any

from tunebook.errors import ConfigError
from tunebook.types import LoraConfig

GROUPS = {
    "train_attn": frozenset({"q_proj", "k_proj", "v_proj", "o_proj"}),
    "train_mlp": frozenset({"gate_proj", "up_proj", "down_proj"}),
    "train_unembed": frozenset({"lm_head"}),
}
"""Switch of the service -> the layers that it adapts."""


def lora_options(lora: LoraConfig) -> dict[str, Any]:
    """The adapter as the service takes it; `alpha` and `dropout` are none of its options.

    Raises:
        ConfigError: it has none like this.
    """
    if lora.rank < 1:
        raise ConfigError(f"lora.rank={lora.rank}: must be at least 1")
    if lora.target_modules == "all-linear":
        chosen = GROUPS["train_attn"] | GROUPS["train_mlp"]
    else:
        chosen = frozenset(lora.target_modules)
    switches = {name: group <= chosen for name, group in GROUPS.items()}
    covered = frozenset().union(*(GROUPS[name] for name, on in switches.items() if on))
    if not chosen or chosen != covered:
        groups = "; ".join(", ".join(sorted(group)) for group in GROUPS.values())
        raise ConfigError(
            f"lora.target_modules={lora.target_modules}: the service adapts whole groups only "
            f"({groups}); use all-linear, or the names of whole groups"
        )
    return {"rank": lora.rank, "seed": lora.seed, **switches}
