"""The base model on its device: loaded, taken apart into body and output head, and checked.

Legend: B rows, T tokens, H hidden size, V vocabulary.
"""

import hashlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tunebook.backends.local.quantised import FULL, loading_options
from tunebook.backends.local.stream import (
    angles_depend_on_length,
    rotate_rows_alone,
    supports_stream,
)
from tunebook.errors import ConfigError
from tunebook.models import load_causal_lm, resolve_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DEVICES = ("auto", "cpu", "cuda", "mps")
# Synthetic logits that the check below sends through a model's own code after its head.
PROBE_RANGE = 100.0
FINGERPRINT_VALUES = 64


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A causal language model, ready to compute with."""

    name: str
    model: PreTrainedModel
    device: torch.device
    compute_dtype: torch.dtype
    body: nn.Module
    """Everything before the output head; returns hidden states."""
    head: nn.Module
    """The output head."""
    head_name: str
    logits_rule: Callable[[Tensor], Tensor] | None
    """What the model does to the head's output; None = not known to us, so that logits must come
    from the model's own forward."""
    streams: bool
    """Rows can be computed one after the other without padding; see `stream`."""
    fingerprint: str
    """Identifies architecture and weights, whatever the folder is called."""

    @property
    def vocab_size(self) -> int:
        """Token ids the input embedding knows."""
        embeddings = self.model.get_input_embeddings()
        assert isinstance(embeddings, nn.Module)
        weight = embeddings.weight
        assert isinstance(weight, Tensor)
        return weight.shape[0]

    def computing(self) -> AbstractContextManager[object]:
        """The context that a forward runs in: autocast where weights are kept in float32."""
        if self.model.dtype == self.compute_dtype:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)


@dataclass(frozen=True, slots=True)
class Architecture:
    """The modules of a model on torch's meta device, where they have shapes but no values."""

    model: PreTrainedModel
    head: nn.Module
    """The output head."""


def resolve_device(device: str) -> torch.device:
    """The device that a setting names; `auto` takes cuda, mps, cpu in this order.

    Raises:
        ConfigError: not a known device, or not there.
    """
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    kind, _, index = device.partition(":")
    if kind not in DEVICES[1:] or (index and not (kind == "cuda" and index.isdecimal())):
        raise ConfigError(
            f"backend.device={device}: must be one of {', '.join(DEVICES)}, or cuda:<number>"
        )
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"backend.device={device}: no CUDA device is available; use auto or cpu")
    if kind == "cuda" and index and int(index) >= torch.cuda.device_count():
        raise ConfigError(
            f"backend.device={device}: this machine has {torch.cuda.device_count()} CUDA devices, "
            "counted from 0"
        )
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"backend.device={device}: no MPS device is available; use auto or cpu")
    return torch.device(device)


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The dtype that a setting names; `auto` is bfloat16 on cuda and float32 elsewhere.

    Raises:
        ConfigError: not a known dtype.
    """
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise ConfigError(f"backend.dtype={dtype}: must be one of auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def load_base_model(
    name: str,
    *,
    device: torch.device,
    weight_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    revision: str | None,
    trust_remote_code: bool,
    allow_pickle: bool,
    base_weights: str = FULL,
) -> BaseModel:
    """A frozen base model on its device, in evaluation mode.

    A quantised base is another base than the full one: its fingerprint says so.

    Raises:
        ConfigError: it cannot be loaded, is quantised, or has no output head.
    """
    read_unquantised_config(name, revision=revision, trust_remote_code=trust_remote_code)
    model = load_causal_lm(
        name,
        revision=revision,
        dtype=weight_dtype,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
        options=loading_options(base_weights, device=device, compute_dtype=compute_dtype),
    )
    model.requires_grad_(False)
    fingerprint = weights_fingerprint(model)
    if base_weights == FULL:
        model.to(device)  # pyright: ignore[reportArgumentType]
    else:
        fingerprint = f"{base_weights}-{fingerprint}"
    if angles_depend_on_length(model.config):
        rotate_rows_alone(model)
    head = output_head(model, name)
    body = model.base_model
    return BaseModel(
        name=name,
        model=model,
        device=device,
        compute_dtype=compute_dtype,
        body=body,
        head=head,
        head_name=next(key for key, module in model.named_modules() if module is head),
        logits_rule=verified_logits_rule(model, body, head),
        streams=supports_stream(model, body),
        fingerprint=fingerprint,
    )


def read_config(name: str, *, revision: str | None, trust_remote_code: bool) -> PreTrainedConfig:
    """The config of a model, without its weights.

    Raises:
        ConfigError: there is none that can be read.
    """
    try:
        return AutoConfig.from_pretrained(
            resolve_model(name), revision=revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"model.name={name}: its config cannot be read: {reason}") from error


def read_unquantised_config(
    name: str, *, revision: str | None, trust_remote_code: bool
) -> PreTrainedConfig:
    """The config of a model whose weights can be trained.

    Raises:
        ConfigError: there is none that can be read, or it says that the weights are quantised.
    """
    config = read_config(name, revision=revision, trust_remote_code=trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"model.name={name}: the weights are quantised, which can be neither trained over nor "
            "merged into here without loss; give the unquantised model (on a GPU, "
            "backend.base_weights=nf4 quantises it while it is loaded)"
        )
    return config


def read_architecture(
    name: str, *, revision: str | None, trust_remote_code: bool
) -> Architecture | None:
    """The modules of a model, or None if it cannot be built without weights.

    Raises:
        ConfigError: its config cannot be read, or it cannot be trained.
    """
    config = read_unquantised_config(name, revision=revision, trust_remote_code=trust_remote_code)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if trust_remote_code and hasattr(config, "auto_map"):
        options["code_revision"] = revision
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, **options)
    except Exception:
        # A model's own code may do anything with its weights while it is built, and raise anything
        # where there are none. Loading it tells whether something is wrong with it.
        return None
    return Architecture(model, output_head(model, name))


def output_head(model: PreTrainedModel, name: str) -> nn.Module:
    """The output head of a model.

    Raises:
        ConfigError: it has none.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Module):
        raise ConfigError(f"model.name={name}: {type(model).__name__} has no output head to train")
    return head


def weights_fingerprint(model: PreTrainedModel) -> str:
    """32 hex digits of the names, shapes and first values of all weights.

    Values are rounded to bfloat16 first, so a model loaded in float32 and in bfloat16 is the same.
    """
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        values = parameter.detach().flatten()[:FINGERPRINT_VALUES].to(torch.bfloat16)
        digest.update(values.view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()[:32]


def declared_logits_rule(config: PreTrainedConfig) -> Callable[[Tensor], Tensor]:
    """What a config says happens between the output head and the logits: a scale, then a soft cap.

    Cohere multiplies by `logit_scale`, Granite divides by `logits_scaling`, Falcon-H1 multiplies by
    `lm_head_multiplier`, Gemma 2 caps by `final_logit_softcapping`.
    """
    text_config = config.get_text_config()
    scale = 1.0
    for key, inverted in (
        ("logit_scale", False),
        ("lm_head_multiplier", False),
        ("logits_scaling", True),
    ):
        value = getattr(text_config, key, None)
        if value is not None:
            scale *= 1 / value if inverted else value
    cap = getattr(text_config, "final_logit_softcapping", None)

    def rule(logits: Tensor) -> Tensor:
        scaled = logits if scale == 1.0 else logits * scale
        return scaled if cap is None else cap * torch.tanh(scaled / cap)

    return rule


@torch.no_grad()
def verified_logits_rule(
    model: PreTrainedModel, body: nn.Module, head: nn.Module
) -> Callable[[Tensor], Tensor] | None:
    """The declared rule if the model's own forward follows it exactly, else None.

    One short forward of the whole model is observed: what goes into the head must be what the body
    returns, and a known ramp put in place of the head's output must come out as the rule says. A
    ramp shows scales and caps that a model's small real logits would hide.
    """
    rule = declared_logits_rule(model.config)
    device = next(model.parameters()).device
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, nn.Module) and isinstance(embeddings.weight, Tensor)
    input_ids = torch.arange(4, device=device).remainder(embeddings.weight.shape[0])[None]
    seen: list[Tensor] = []
    ramps: list[Tensor] = []

    def observe(_module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        seen.extend(args[:1])
        ramp = torch.linspace(-PROBE_RANGE, PROBE_RANGE, output.numel(), device=device)
        ramps.append(ramp.view_as(output))
        return ramps[-1].to(output.dtype)

    handle = head.register_forward_hook(observe)
    try:
        logits = model(input_ids=input_ids, use_cache=False).logits
    finally:
        handle.remove()
    hidden = body_hidden(body, input_ids=input_ids)
    tolerance = 1e-5 if logits.dtype == torch.float32 else 2e-2
    if len(seen) != 1 or hidden is None or hidden.shape != seen[0].shape:
        return None
    if not torch.allclose(seen[0], hidden, rtol=tolerance, atol=tolerance):
        return None
    expected = rule(ramps[0])
    return rule if torch.allclose(logits.float(), expected, rtol=tolerance, atol=1e-3) else None


def body_hidden(body: nn.Module, **inputs: Tensor) -> Tensor | None:
    """Hidden states `[B, T, H]` of a body, or None if it does not return any."""
    output = body(**inputs, use_cache=False)
    hidden = getattr(output, "last_hidden_state", None)
    return hidden if isinstance(hidden, Tensor) else None


def parameters_of_forward(module: nn.Module) -> set[str]:
    """Names of the arguments that a module's forward takes."""
    return set(inspect.signature(module.forward).parameters)
