"""Whether saved weights fit the session that is to go on from them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunebook.backends.local.base_model import BaseModel
from tunebook.backends.local.checkpoint import CheckpointState
from tunebook.backends.local.weights import TrainedWeights, layer_names
from tunebook.errors import CheckpointError
from tunebook.types import LoraConfig


def check_fits(
    state: CheckpointState, base: BaseModel, weights: TrainedWeights, *, path: Path
) -> None:
    """Returns if a checkpoint was made on this base with an adapter of this shape.

    Raises:
        CheckpointError: naming what differs, with both values.
    """
    saved, ours = state.lora, weights.lora
    if (saved is None) != (ours is None):
        kinds = ("full weights", "an adapter")
        raise CheckpointError(
            f"{path}: holds {kinds[saved is not None]}, "
            f"this session trains {kinds[ours is not None]}"
        )
    differing: list[str] = []
    if state.base_fingerprint != base.fingerprint:
        theirs = f"{state.base_name} ({state.base_fingerprint})"
        mine = f"{base.name} ({base.fingerprint})"
        differing.append(f"base model: {theirs} in the checkpoint, {mine} now")
    if saved is not None and ours is not None:
        values = {"rank": saved.rank, "alpha": saved.alpha, "rslora": saved.rslora}
        differing += differing_values(values, ours, where="checkpoint")
        layers = sorted(set(state.targets) ^ set(layer_names(weights)))
        if layers:
            differing.append(
                f"lora.target_modules (layers {', '.join(layers[:3])} ...): "
                f"{saved.target_modules} in the checkpoint, {ours.target_modules} now"
            )
    refuse(differing, path)


def check_adapter_fits(config: Mapping[str, Any], lora: LoraConfig, *, path: Path) -> None:
    """Returns if a PEFT adapter computes what an adapter of this config would.

    Raises:
        CheckpointError: naming what differs, with both values.
    """
    values = {
        "rank": config["r"],
        "alpha": config["lora_alpha"],
        "rslora": bool(config.get("use_rslora")),
    }
    refuse(differing_values(values, lora, where="adapter"), path)


def differing_values(values: Mapping[str, Any], lora: LoraConfig, *, where: str) -> list[str]:
    """One sentence for each value that is another in `lora`."""
    return [
        f"lora.{key}: {value} in the {where}, {getattr(lora, key)} now"
        for key, value in values.items()
        if value != getattr(lora, key)
    ]


def refuse(differing: Sequence[str], path: Path) -> None:
    """Returns if nothing differs.

    Raises:
        CheckpointError: with all that does.
    """
    if differing:
        raise CheckpointError(f"{path}: does not fit this session. {'; '.join(differing)}")
