"""The adapter that every contestant starts from: a PEFT folder whose B is not zero."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.spec import LORA
from tunebook.backends.local.base_model import read_architecture
from tunebook.backends.local.lora import adapter_targets, features_of, initial_lora_a
from tunebook.backends.local.peft_format import write_peft_adapter
from tunebook.models import resolve_model

B_SCALE = 0.01


def write_start(model: str, folder: Path) -> Path:
    """Writes the adapter; returns its folder. With B at zero, A would have no gradient to compare.

    Args:
        model: name of the base.
        folder: made if needed.

    Raises:
        ValueError: the model cannot be built without its weights.
    """
    architecture = read_architecture(model, revision=None, trust_remote_code=False)
    if architecture is None:
        raise ValueError(f"--model {model}: not a model of transformers' own code")
    targets = adapter_targets(architecture.model, architecture.head, LORA.target_modules)
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, module in targets.items():
        num_out, num_in = features_of(module)
        weights[f"{name}.lora_A"] = initial_lora_a(name, (LORA.rank, num_in), seed=LORA.seed)
        weights[f"{name}.lora_B"] = B_SCALE * torch.randn((num_out, LORA.rank), generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    write_peft_adapter(
        folder,
        weights,
        model=architecture.model,
        lora=LORA,
        targets=list(targets),
        base_name=resolve_model(model),
    )
    return folder
