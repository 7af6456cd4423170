"""Adapters in PEFT's file format, written and read without PEFT."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tunebook.backends.local.checkpoint import read_tensors
from tunebook.backends.local.lora import ALL_LINEAR, linear_modules, matches, stores_transpose
from tunebook.backends.local.weights import LORA_A, LORA_B
from tunebook.errors import CheckpointError
from tunebook.types import LoraConfig

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
KEY_PREFIX = "base_model.model."
# Options of PEFT's LoRA that change the function of an adapter and that we do not have.
UNSUPPORTED = {
    "use_dora": (None, False),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
}

# Options that take some of the layers out of `target_modules` again.
NARROWING = ("exclude_modules", "layers_to_transform")


def is_peft_adapter(folder: Path) -> bool:
    """Whether a folder holds a PEFT adapter."""
    return (folder / CONFIG_FILE).is_file()


def write_peft_adapter(
    folder: Path,
    weights: Mapping[str, Tensor],
    *,
    model: nn.Module,
    lora: LoraConfig,
    targets: Sequence[str],
    base_name: str,
) -> None:
    """Writes config and weights into an existing folder."""
    modules = dict(model.named_modules())
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "use_dora": False,
        "bias": "none",
        "init_lora_weights": True,
        "fan_in_fan_out": any(stores_transpose(modules[name]) for name in targets),
        "modules_to_save": None,
        "target_modules": peft_target_modules(list(modules), targets),
    }
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
    tensors = {f"{KEY_PREFIX}{name}.weight": value for name, value in weights.items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def peft_target_modules(module_names: Sequence[str], targets: Sequence[str]) -> list[str]:
    """Names that make PEFT select exactly `targets`: their last parts if unambiguous, else in full.

    Args:
        module_names: all modules of the model.
        targets: those that carry an adapter.
    """
    leaves = sorted({name.rpartition(".")[2] for name in targets})
    selected = {name for name in module_names if any(matches(name, leaf) for leaf in leaves)}
    return leaves if selected == set(targets) else sorted(targets)


def read_peft_config(folder: Path) -> dict[str, Any]:
    """The config of a PEFT adapter that is a plain LoRA.

    Raises:
        CheckpointError: not readable, or it uses what we cannot apply.
    """
    path = folder / CONFIG_FILE
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{path}: peft_type is {config.get('peft_type')}, only LORA is known")
    for key, allowed in UNSUPPORTED.items():
        if config.get(key) not in allowed:
            raise CheckpointError(f"{path}: {key}={config[key]} is not supported")
    for key in ("r", "lora_alpha"):
        if key not in config:
            raise CheckpointError(f"{path}: {key} is missing")
    return config


def peft_targets(config: Mapping[str, Any], model: nn.Module, head: nn.Module) -> set[str] | None:
    """Names of the layers that a PEFT adapter says it has, or None if only its weights tell.

    Args:
        config: as `read_peft_config`.
        model: its base; no weights are needed.
        head: the base's output head.
    """
    wanted = config.get("target_modules")
    if not wanted or any(config.get(key) for key in NARROWING):
        return None
    names = linear_modules(model)
    if wanted == ALL_LINEAR:
        return {name for name, module in names.items() if module is not head}
    if isinstance(wanted, str):
        return {name for name in names if re.fullmatch(wanted, name)}
    return {name for name in names if any(matches(name, suffix) for suffix in wanted)}


def read_peft_weights(folder: Path) -> dict[str, Tensor]:
    """`<layer>.lora_A` and `<layer>.lora_B` -> weight in float32.

    Raises:
        CheckpointError: not readable, or it holds weights that are not of a LoRA.
    """
    path = folder / WEIGHTS_FILE
    weights: dict[str, Tensor] = {}
    for key, value in read_tensors(path).items():
        name = key.removeprefix(KEY_PREFIX).removesuffix(".weight")
        if not name.endswith((LORA_A, LORA_B)):
            raise CheckpointError(f"{path}: {key} is not the weight of a LoRA layer")
        weights[name] = value.to(torch.float32)
    return weights


def peft_lora_config(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> LoraConfig:
    """The adapter as we describe it; its targets are named in full."""
    targets = sorted({name.removesuffix(LORA_A).removesuffix(LORA_B) for name in weights})
    return LoraConfig(
        rank=config["r"],
        alpha=config["lora_alpha"],
        dropout=config.get("lora_dropout", 0.0),
        target_modules=tuple(targets),
        seed=0,
        rslora=config.get("use_rslora", False),
    )
