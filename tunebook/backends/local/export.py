"""What leaves the library: PEFT adapters, full models, and adapters merged into their base."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from tunebook.backends.local.base_model import DTYPES, BaseModel, load_base_model
from tunebook.backends.local.checkpoint import STATE_FILE, replaced_folder
from tunebook.backends.local.peft_format import (
    peft_lora_config,
    read_peft_config,
    read_peft_weights,
    write_peft_adapter,
)
from tunebook.backends.local.weights import LORA_A, LORA_B, AdapterWeights
from tunebook.errors import ConfigError, NonFiniteError
from tunebook.models import load_tokenizer, no_progress_bars
from tunebook.types import LoraConfig

PROBE_TOKENS = 32


def export_adapter(
    model: PreTrainedModel,
    weights: Mapping[str, Tensor],
    directory: Path,
    *,
    lora: LoraConfig,
    targets: Sequence[str],
    base_name: str,
    tokenizer: PreTrainedTokenizerBase,
) -> Path:
    """The folder, with the adapter in PEFT's format and the tokenizer.

    Raises:
        NonFiniteError: the adapter holds NaN or infinite values.
        CheckpointError: the folder cannot be written.
    """
    check_all_finite(weights, directory)
    with replaced_folder(directory, num_bytes=num_bytes_of(weights)) as temporary:
        write_peft_adapter(
            temporary, weights, model=model, lora=lora, targets=targets, base_name=base_name
        )
        tokenizer.save_pretrained(temporary)
    return directory


def export_full_model(
    base: BaseModel,
    weights: Mapping[str, Tensor],
    directory: Path,
    *,
    tokenizer: PreTrainedTokenizerBase,
) -> Path:
    """The folder, with a whole model in the dtype it computed in, and the tokenizer.

    Raises:
        NonFiniteError: a weight is NaN or infinite.
        CheckpointError: the folder cannot be written.
    """
    check_all_finite(weights, directory)
    names = {id(parameter): name for name, parameter in base.model.named_parameters()}
    converted = {name: value.to(base.compute_dtype) for name, value in weights.items()}
    state = {
        key: converted[names[id(value)]] if id(value) in names else value
        for key, value in base.model.state_dict(keep_vars=True).items()
    }
    with replaced_folder(directory, num_bytes=num_bytes_of(converted)) as temporary:
        save_model(base.model, temporary, state=state, dtype=base.compute_dtype)
        tokenizer.save_pretrained(temporary)
    return directory


def is_full_model(folder: Path) -> bool:
    """Whether a folder holds an exported model rather than a checkpoint."""
    return (folder / "config.json").is_file() and not (folder / STATE_FILE).is_file()


def save_model(
    model: PreTrainedModel, folder: Path, *, state: Mapping[str, Tensor], dtype: torch.dtype
) -> None:
    """Writes `state` as the weights of `model`, with a config that names their dtype."""
    with no_progress_bars():
        model.save_pretrained(folder, state_dict=dict(state))
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.save_pretrained(folder)


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What a merge did."""

    path: Path
    num_layers: int
    """Layers whose weight was changed."""
    dtype: str
    max_logit_difference: float
    """Largest difference on a probe between the merged model in `dtype` and base plus adapter in
    float32."""
    untied_head: bool
    """Whether the output head was separated from the input embedding, because it was adapted."""


def merge_adapter(
    model_name: str,
    adapter: Path,
    directory: Path,
    *,
    dtype: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
) -> MergeReport:
    """Writes the base with the adapter added to its weights, and reports how close it is.

    `W' = W + scale * B A`, in float32, then converted.

    Args:
        model_name: the base, as in `tunebook.models.resolve_model`.
        adapter: folder of a PEFT adapter.
        directory: folder to write.
        dtype: float32 or bfloat16.
        revision: hub revision of the base.
        trust_remote_code: allow the base's own Python code.
        allow_pickle: allow weights other than safetensors.

    Raises:
        ConfigError: the base is quantised, or the dtype unknown.
        CheckpointError: the adapter cannot be read, or does not fit the base.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype}: must be one of {', '.join(DTYPES)}")
    config, weights = read_peft_config(adapter), read_peft_weights(adapter)
    check_all_finite(weights, directory)
    base = load_base_model(
        model_name,
        device=torch.device("cpu"),
        weight_dtype=torch.float32,
        compute_dtype=torch.float32,
        revision=revision,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
    )
    adapter_weights = AdapterWeights(base, peft_lora_config(config, weights))
    with adapter_weights.applied(dropout=False, values=weights):
        expected = probe_logits(base.model)
    untied = base.head_name in adapter_weights.layers and untie_head(base.model, base.head)
    for name, layer in adapter_weights.layers.items():
        add_update(layer.module, weights[name + LORA_A], weights[name + LORA_B], layer.scale)
    base.model.to(DTYPES[dtype])  # pyright: ignore[reportArgumentType]
    difference = (probe_logits(base.model) - expected).abs().max()
    state = base.model.state_dict()
    with replaced_folder(directory, num_bytes=num_bytes_of(state)) as temporary:
        save_model(base.model, temporary, state=state, dtype=DTYPES[dtype])
        adapter_has_tokenizer = (adapter / "tokenizer_config.json").is_file()
        tokenizer = load_tokenizer(
            str(adapter) if adapter_has_tokenizer else model_name,
            revision=None if adapter_has_tokenizer else revision,
            trust_remote_code=trust_remote_code,
        )
        tokenizer.save_pretrained(temporary)
    return MergeReport(
        path=directory,
        num_layers=len(adapter_weights.layers),
        dtype=dtype,
        max_logit_difference=float(difference),
        untied_head=untied,
    )


@torch.no_grad()
def add_update(module: nn.Module, lora_a: Tensor, lora_b: Tensor, scale: float) -> None:
    """Adds `scale * B A` to a layer's weight."""
    weight: Any = module.weight
    update = scale * (lora_b @ lora_a)
    weight.add_(update.T if isinstance(module, Conv1D) else update)


def untie_head(model: PreTrainedModel, head: nn.Module) -> bool:
    """Gives the output head a weight of its own, and says so in the config; whether it had to."""
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, nn.Module)
    if head.weight is not embeddings.weight:
        return False
    weight = embeddings.weight
    assert isinstance(weight, Tensor)
    head.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
    model.config.tie_word_embeddings = False
    model.config.get_text_config().tie_word_embeddings = False
    return True


@torch.no_grad()
def probe_logits(model: PreTrainedModel) -> Tensor:
    """Float32 logits of a short fixed sequence."""
    embeddings: Any = model.get_input_embeddings()
    vocab_size = embeddings.weight.shape[0]
    input_ids = (torch.arange(PROBE_TOKENS) * 7919 % vocab_size)[None]
    return model(input_ids=input_ids, use_cache=False).logits.float()


def check_all_finite(weights: Mapping[str, Tensor], directory: Path) -> None:
    """Returns if no weight is NaN or infinite.

    Raises:
        NonFiniteError: naming the first such weight.
    """
    for name, value in weights.items():
        if not torch.isfinite(value).all():
            raise NonFiniteError(
                f"refusing to export to {directory}: the weight {name} holds NaN or infinite values"
            )


def num_bytes_of(weights: Mapping[str, Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(value.numel() * value.element_size() for value in weights.values())
