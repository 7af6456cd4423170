"""A transformers decoder as the weights and rules that the fast path computes with.

Llama, Mistral, Qwen2, Qwen3 and the Gemma families share one structure: normalised attention and
normalised gated feed-forward, each added to a residual stream. `read_decoder` takes a model of
these families apart; `engine.agrees` compares the result with the model's own forward, so a variant
that computes something else is found out and left to the general path.
Legend: N tokens, H hidden size, A query heads, K key-value heads, D head size, I feed-forward size.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tunebook.backends.local.engine.attention import AttentionRule
from tunebook.backends.local.stream import angles_depend_on_length

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")
"""`model_type` of the models that are known to have this structure."""
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


class Site(StrEnum):
    """Linear layers of one input, which are computed as one product."""

    QKV = "qkv"
    OUT = "out"
    GATE_UP = "gate_up"
    DOWN = "down"


PARTS: dict[Site, tuple[str, ...]] = {
    Site.QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    Site.OUT: ("self_attn.o_proj",),
    Site.GATE_UP: ("mlp.gate_proj", "mlp.up_proj"),
    Site.DOWN: ("mlp.down_proj",),
}
"""The layers of a site, in the order of their outputs."""


@dataclass(frozen=True, slots=True)
class Norm:
    """Root-mean-square normalisation. Source: arXiv:1910.07467."""

    weight: Tensor
    """`[H]` float32; Gemma's 1 + weight is already added."""
    eps: float


@dataclass(frozen=True, slots=True)
class Linear:
    """One product with frozen weights."""

    weight: Tensor
    """`[O, I]`, the parts of a site below one another."""
    bias: Tensor | None
    """`[O]`"""


@dataclass(frozen=True, slots=True)
class Part:
    """Where a layer stands in its site."""

    layer: int
    site: Site
    first: int
    """Its first output feature."""
    stop: int


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The weights of one layer."""

    sites: Mapping[Site, Linear]
    input_norm: Norm
    feed_forward_norm: Norm
    attention_output_norm: Norm | None
    """Gemma 2 and 3 normalise what attention adds, too."""
    feed_forward_output_norm: Norm | None
    query_norm: Norm | None
    """Qwen 3 and Gemma 3 normalise each head."""
    key_norm: Norm | None
    attention: AttentionRule
    rope: str
    """Key into what `Decoder.rotations` returns."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder without its output head."""

    layers: tuple[DecoderLayer, ...]
    final_norm: Norm
    embed: Callable[[Tensor], Tensor]
    """`[N]` token ids -> `[N, H]`, scaled as the family scales."""
    rotations: Callable[[Tensor], Mapping[str, tuple[Tensor, Tensor]]]
    """`[N]` positions -> for each kind of layer cosines and sines, `[N, D / 2]` float32."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    activation: str
    """silu or gelu_tanh"""
    dtype: torch.dtype
    """Of weights and products; the residual stream is float32."""
    device: torch.device
    parts: Mapping[str, Part]
    """Name of a linear layer in the model -> its place."""
    window: int | None
    """Tokens of the narrowest window; None = no layer has one."""

    @property
    def attention_dtype(self) -> torch.dtype:
        """Of queries, keys and values where they meet.

        On a CPU float32: the backward pass of torch's attention is slower in bfloat16.
        """
        return torch.float32 if self.device.type == "cpu" else self.dtype

    @property
    def hidden_size(self) -> int:
        """H"""
        return len(self.final_norm.weight)


def read_decoder(model: PreTrainedModel, body: nn.Module) -> Decoder | None:
    """The decoder of a model of a known family with frozen weights, else None.

    The weights of a site are moved into one tensor, of which the model's own become views, so the
    model computes what it did and nothing is held twice.
    """
    config = model.config
    if angles_depend_on_length(config):
        return None
    if config.model_type not in FAMILIES or any(p.requires_grad for p in model.parameters()):
        return None
    activation = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    if model.config.model_type.startswith("gemma"):
        activation = getattr(config, "hidden_activation", None) or activation
    layers = getattr(body, "layers", None)
    if activation not in ACTIVATIONS or not isinstance(layers, nn.ModuleList):
        return None
    prefix = next(name for name, module in model.named_modules() if module is layers)
    try:
        read = tuple(_read_layer(layer, config) for layer in layers)
        final_norm = _read_norm(body.get_submodule("norm"))
    except AttributeError:
        return None  # a layer has other parts than those we know
    parts: dict[str, Part] = {}
    for number, layer in enumerate(layers):
        for site, names in PARTS.items():
            first = 0
            for name in names:
                stop = first + len(layer.get_submodule(name).get_parameter("weight"))
                parts[f"{prefix}.{number}.{name}"] = Part(number, site, first, stop)
                first = stop
    attention: Any = layers[0].get_submodule("self_attn")
    head_dim = int(attention.head_dim)
    windows = [layer.attention.window for layer in read if layer.attention.window is not None]
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, nn.Module)
    weight = read[0].sites[Site.QKV].weight
    return Decoder(
        layers=read,
        final_norm=final_norm,
        embed=lambda tokens: embeddings(tokens).float(),
        rotations=_rotations(body, sorted({layer.rope for layer in read}), head_dim),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        activation=ACTIVATIONS[activation],
        dtype=weight.dtype,
        device=weight.device,
        parts=parts,
        window=min(windows, default=None),
    )


def _read_layer(layer: nn.Module, config: Any) -> DecoderLayer:
    attention: Any = layer.get_submodule("self_attn")
    names = dict(layer.named_children())
    has_output_norms = "post_feedforward_layernorm" in names
    window = getattr(attention, "sliding_window", None)
    if config.model_type == "mistral":
        window = config.sliding_window
    return DecoderLayer(
        sites={
            site: _fused([layer.get_submodule(name) for name in parts])
            for site, parts in PARTS.items()
        },
        input_norm=_read_norm(names["input_layernorm"]),
        feed_forward_norm=_read_norm(
            names["pre_feedforward_layernorm" if has_output_norms else "post_attention_layernorm"]
        ),
        attention_output_norm=(
            _read_norm(names["post_attention_layernorm"]) if has_output_norms else None
        ),
        feed_forward_output_norm=(
            _read_norm(names["post_feedforward_layernorm"]) if has_output_norms else None
        ),
        query_norm=_read_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        key_norm=_read_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        attention=AttentionRule(
            scaling=float(attention.scaling),
            window=window,
            softcap=getattr(attention, "attn_logit_softcapping", None),
        ),
        rope=str(getattr(attention, "layer_type", None)),
    )


def _read_norm(module: nn.Module) -> Norm:
    weight = module.get_parameter("weight").detach().float()
    eps = getattr(module, "variance_epsilon", None)
    if eps is not None:
        return Norm(weight, float(eps))
    # Gemma keeps its weights around 0, where the others keep them around 1.
    return Norm(weight + 1.0, float(module.__getattribute__("eps")))


@torch.no_grad()
def _fused(modules: list[nn.Module]) -> Linear:
    """The layers as one; their own weights and biases become views of it."""
    weights = [module.get_parameter("weight") for module in modules]
    biases = [module.bias for module in modules]
    if len(modules) == 1:
        bias = biases[0]
        return Linear(weights[0].detach(), bias.detach() if isinstance(bias, Tensor) else None)
    weight = torch.cat([each.detach() for each in weights])
    _become_views(weights, weight)
    given = [bias for bias in biases if isinstance(bias, nn.Parameter)]
    if not given:
        return Linear(weight, None)
    if len(given) != len(biases):
        raise AttributeError("only some layers of a site have a bias")
    bias = torch.cat([each.detach() for each in given])
    _become_views(given, bias)
    return Linear(weight, bias)


def _become_views(parameters: list[nn.Parameter], whole: Tensor) -> None:
    for parameter, view in zip(
        parameters, whole.split([len(each) for each in parameters]), strict=True
    ):
        parameter.data = view


def _rotations(
    body: nn.Module, kinds: list[str], head_dim: int
) -> Callable[[Tensor], Mapping[str, tuple[Tensor, Tensor]]]:
    rotary: Any = body.get_submodule("rotary_emb")

    def rotations(positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        like = torch.empty(0, dtype=torch.float32, device=positions.device)
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for kind in kinds:
            # Gemma 3 rotates its local and its global layers by other angles.
            by_kind = hasattr(rotary, f"{kind}_inv_freq")
            extra = {"layer_type": kind} if by_kind else {}
            cosines, sines = rotary(like, position_ids=positions[None], **extra)
            assert cosines.shape[-1] == head_dim
            # Both halves of a head are rotated by the same angles.
            found[kind] = (cosines[0, :, : head_dim // 2], sines[0, :, : head_dim // 2])
        return found

    return rotations


CHECK_ROWS = ((7, 24), (3, 19), (11, 30), (5, 140))
"""Seeds and lengths of the rows that a decoder is checked on."""


def check_rows(vocab_size: int, *, window: int | None) -> list[np.ndarray]:
    """Rows that all begin alike and are longer than the window, so that every rule shows.

    Args:
        vocab_size: token ids are below it.
        window: of the model, tokens.
    """
    longest = 0 if window is None or window > 128 else window
    beginning = np.arange(20) * 5 % vocab_size
    return [
        np.concatenate([beginning, np.arange(length + longest) * seed % vocab_size]).astype(
            np.int32
        )
        for seed, length in CHECK_ROWS
    ]
