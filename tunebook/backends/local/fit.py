"""Whether saved weights fit the session that is to go on from them."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from tunebook.backends.local.base_model import Architecture, BaseModel
from tunebook.backends.local.checkpoint import CheckpointState, read_state, weights_file
from tunebook.backends.local.export import is_full_model
from tunebook.backends.local.lora import adapter_targets
from tunebook.backends.local.peft_format import (
    WEIGHTS_FILE,
    is_peft_adapter,
    peft_targets,
    read_peft_config,
)
from tunebook.errors import CheckpointError
from tunebook.types import LoraConfig


def check_start(
    folder: Path, lora: LoraConfig | None, *, architecture: Architecture | None
) -> None:
    """Returns if a session can begin from a checkpoint, a PEFT adapter or an exported full model.

    Reads what describes it, not its weights.

    Args:
        folder: of the checkpoint, adapter or model.
        lora: the adapter that the session trains; None = full weights.
        architecture: of the base; None = layers are not compared.

    Raises:
        CheckpointError: naming what is missing or differs, with both values.
    """
    ours: dict[str, nn.Module] | None = None
    if lora is not None and architecture is not None:
        ours = adapter_targets(architecture.model, architecture.head, lora.target_modules)
    if is_full_model(folder):
        check_full_model_fits(lora, path=folder)
    elif is_peft_adapter(folder):
        config = read_peft_config(folder)
        check_adapter_fits(config, lora, path=folder)
        if lora is not None and architecture is not None and ours is not None:
            theirs = peft_targets(config, architecture.model, architecture.head)
            if theirs is not None:
                named = config["target_modules"]
                refuse(differing_targets(theirs, ours, named, lora, where="adapter"), folder)
        require_file(folder / WEIGHTS_FILE)
    else:
        state = read_state(folder)
        check_kind(state, lora, path=folder)
        refuse(differing_shape(state, lora, ours), folder)
        require_file(folder / weights_file(state))


def check_fits(
    state: CheckpointState,
    base: BaseModel,
    lora: LoraConfig | None,
    targets: Collection[str],
    *,
    path: Path,
) -> None:
    """Returns if a checkpoint was made on this base with an adapter of this shape.

    Args:
        state: of the checkpoint.
        base: of the session.
        lora: of the session; None = full weights.
        targets: layers that carry its adapter.
        path: of the checkpoint.

    Raises:
        CheckpointError: naming what differs, with both values.
    """
    check_kind(state, lora, path=path)
    differing: list[str] = []
    if state.base_fingerprint != base.fingerprint:
        theirs = f"{state.base_name} ({state.base_fingerprint})"
        mine = f"{base.name} ({base.fingerprint})"
        differing.append(f"base model: {theirs} in the checkpoint, {mine} now")
    refuse(differing + differing_shape(state, lora, targets), path)


def check_kind(state: CheckpointState, lora: LoraConfig | None, *, path: Path) -> None:
    """Returns if a checkpoint and a session both have an adapter, or both have none.

    Raises:
        CheckpointError: they do not.
    """
    if (state.lora is None) != (lora is None):
        kinds = ("full weights", "an adapter")
        raise CheckpointError(
            f"{path}: holds {kinds[state.lora is not None]}, "
            f"this session trains {kinds[lora is not None]}"
        )


def check_adapter_fits(config: Mapping[str, Any], lora: LoraConfig | None, *, path: Path) -> None:
    """Returns if a PEFT adapter computes what an adapter of this config would on the same layers.

    Raises:
        CheckpointError: naming what differs, with both values.
    """
    if lora is None:
        raise CheckpointError(f"{path}: holds an adapter, this session trains full weights")
    values = {
        "rank": config["r"],
        "alpha": config["lora_alpha"],
        "rslora": bool(config.get("use_rslora")),
    }
    refuse(differing_values(values, lora, where="adapter"), path)


def check_full_model_fits(lora: LoraConfig | None, *, path: Path) -> None:
    """Returns if a session trains full weights, so that it can begin from an exported model.

    Raises:
        CheckpointError: it trains an adapter.
    """
    if lora is not None:
        raise CheckpointError(
            f"{path}: holds a full model, this session trains an adapter; to train one over it, "
            f"set model.name={path}"
        )


def require_file(path: Path) -> None:
    """Returns if a file is there.

    Raises:
        CheckpointError: it is not.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: cannot be read: there is no such file")


def differing_shape(
    state: CheckpointState, lora: LoraConfig | None, targets: Collection[str] | None
) -> list[str]:
    """One sentence for each way in which the adapter of a checkpoint is another than ours.

    Args:
        state: of the checkpoint.
        lora: ours.
        targets: layers that carry ours; None = not known.
    """
    saved = state.lora
    if saved is None or lora is None:
        return []
    values = {"rank": saved.rank, "alpha": saved.alpha, "rslora": saved.rslora}
    differing = differing_values(values, lora, where="checkpoint")
    if targets is not None:
        differing += differing_targets(
            state.targets, targets, saved.target_modules, lora, where="checkpoint"
        )
    return differing


def differing_targets(
    theirs: Collection[str], ours: Collection[str], named: object, lora: LoraConfig, *, where: str
) -> list[str]:
    """A sentence if other layers carry an adapter than in `lora`.

    Args:
        theirs: layers of the saved adapter.
        ours: layers of `lora`.
        named: what the saved adapter calls its layers.
        lora: ours.
        where: what holds the saved adapter.
    """
    layers = sorted(set(theirs) ^ set(ours))
    if not layers:
        return []
    return [
        f"lora.target_modules (layers {', '.join(layers[:3])} ...): "
        f"{named} in the {where}, {lora.target_modules} now"
    ]


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
