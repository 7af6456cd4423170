"""Forward and backward of a decoder's layers over a stream, adapters included.

The base is frozen: the backward pass computes the gradient of each layer's input and of the
adapters, and nothing else. What a layer keeps for it is its inputs before normalisation and the
outputs of its products; what follows from these in one elementwise pass is computed again. With
`recompute`, a layer keeps nothing but its input.
Legend: N tokens, H hidden size, A query heads, K key-value heads, D head size, I feed-forward size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tunebook.backends.local.engine.adapters import (
    AdapterSpan,
    add_update_gradients,
    add_updates,
)
from tunebook.backends.local.engine.attention import Attended, attend, attend_backward
from tunebook.backends.local.engine.decoder import Decoder, DecoderLayer, Norm, Site
from tunebook.backends.local.engine.layout import Span, Stream
from tunebook.backends.local.engine.products import linear, linear_backward

Rotations = Mapping[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Pass:
    """A stream on the device of its decoder, with the adapters of its rows."""

    decoder: Decoder
    stream: Stream
    spans: Sequence[AdapterSpan]
    rotations: Rotations
    wanted: np.ndarray | None = None
    """`[M]` ascending places whose hidden states are wanted after the last layer; None = all."""

    attention: "LayerAttention | None" = None
    """None = each row of the stream attends to itself, which is what training computes."""

    def narrowed(self) -> "Pass":
        """The pass with the adapters' tokens counted among the wanted places only."""
        assert self.wanted is not None
        wanted = self.wanted

        def narrow(span: Span) -> Span:
            start, stop = np.searchsorted(wanted, (span.start, span.stop))
            return Span(int(start), int(stop))

        spans = [
            AdapterSpan(
                each.adapter,
                narrow(each.tokens),
                [group for group in map(narrow, each.groups) if group.length],
            )
            for each in self.spans
        ]
        return replace(self, spans=spans)


LayerAttention: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Attended]
"""`(layer, queries [N, A, D], keys [N, K, D], values [N, K, D]) -> attention`"""


@dataclass(frozen=True, slots=True)
class KeptLayer:
    """What the backward pass of a layer needs."""

    hidden: Tensor
    """`[N, H]` float32, the layer's input."""
    heads: Tensor
    """`[N, A + 2K, D]` queries, keys and values as projected."""
    rotated: Tensor
    """`[N, A + K, D]` queries and keys as attention sees them, in its dtype."""
    attended: Attended
    attention_output: Tensor | None
    """`[N, H]` what attention adds, before it is normalised; None where it is not."""
    middle: Tensor
    """`[N, H]` float32, the residual stream after attention; `[M, H]` in the last layer, where what
    follows is computed at the wanted places only."""
    gate_up: Tensor
    """`[N, 2 I]`"""
    feed_forward_output: Tensor | None
    low_ranks: Mapping[Site, Sequence[Tensor | None]]


@torch.no_grad()
def run_layers(given: Pass, *, first_trained: int | None, recompute: bool) -> "Ran":
    """Hidden states after the last layer, and what the backward pass needs.

    Args:
        given: the stream.
        first_trained: lowest layer whose adapters want a gradient; None = no gradient.
        recompute: keep only the input of each layer.
    """
    decoder = given.decoder
    tokens = torch.from_numpy(given.stream.tokens).to(decoder.device).long()
    hidden = decoder.embed(tokens)
    kept: dict[int, KeptLayer | Tensor] = {}
    for number in range(len(decoder.layers)):
        wants = first_trained is not None and number >= first_trained
        output, layer = run_layer(given, number, hidden, keep=wants and not recompute)
        if wants:
            kept[number] = hidden if layer is None else layer
        hidden = output
    return Ran(hidden, kept)


@dataclass(frozen=True, slots=True)
class Ran:
    """A stream after all layers."""

    hidden: Tensor
    """`[M, H]` float32 at the wanted places, not normalised."""
    kept: Mapping[int, KeptLayer | Tensor]
    """Layer number -> what it kept, or its input."""


@torch.no_grad()
def run_layers_backward(given: Pass, ran: Ran, gradient: Tensor) -> None:
    """Adds the gradients of the adapters of a stream to their sums.

    Args:
        given: the stream.
        ran: from `run_layers`; what it kept is let go of on the way.
        gradient: `[M, H]` float32, of `ran.hidden`; overwritten.
    """
    kept = dict(ran.kept)
    lowest = min(kept)
    for number in sorted(kept, reverse=True):
        layer = kept.pop(number)
        if isinstance(layer, Tensor):
            _, again = run_layer(given, number, layer, keep=True)
            assert again is not None
            layer = again
        gradient = run_layer_backward(given, number, layer, gradient, into_input=number > lowest)


def run_layer(
    given: Pass, number: int, hidden: Tensor, *, keep: bool
) -> tuple[Tensor, KeptLayer | None]:
    """The output of one layer, `[N, H]` float32, and what its backward pass needs if `keep`."""
    decoder = given.decoder
    layer = decoder.layers[number]
    low_ranks: dict[Site, Sequence[Tensor | None]] = {}
    places = wanted_places(given, number)
    after = given if places is None else given.narrowed()

    def project(site: Site, inputs: Tensor) -> Tensor:
        weights = layer.sites[site]
        outputs = linear(inputs, weights.weight, weights.bias)
        spans = given.spans if site is Site.QKV else after.spans
        low_ranks[site] = add_updates(outputs, inputs, spans, (number, site))
        return outputs

    normed = normalised(hidden, layer.input_norm).to(decoder.dtype)
    heads = project(Site.QKV, normed).view(len(hidden), -1, decoder.head_dim)
    rotated = _queries_and_keys(decoder, layer, heads, given.rotations[layer.rope])
    queries, keys = rotated[:, : decoder.num_heads], rotated[:, decoder.num_heads :]
    values = heads[:, decoder.num_heads + decoder.num_kv_heads :].to(rotated.dtype)
    if given.attention is None:
        attended = attend(queries, keys, values, given.stream, layer.attention, with_gradient=keep)
    else:
        attended = given.attention(number, queries, keys, values)
    added = project(Site.OUT, at(attended.output, places).flatten(1).to(decoder.dtype))
    attention_output = None
    if layer.attention_output_norm is not None:
        attention_output = added
        added = normalised(added.float(), layer.attention_output_norm)
    middle = at(hidden, places) + added

    normed = normalised(middle, layer.feed_forward_norm).to(decoder.dtype)
    gate_up = project(Site.GATE_UP, normed)
    added = project(Site.DOWN, gated(gate_up, decoder.activation))
    feed_forward_output = None
    if layer.feed_forward_output_norm is not None:
        feed_forward_output = added
        added = normalised(added.float(), layer.feed_forward_output_norm)
    output = middle + added
    if not keep:
        return output, None
    return output, KeptLayer(
        hidden, heads, rotated, attended, attention_output, middle, gate_up, feed_forward_output,
        low_ranks,
    )  # fmt: skip


def wanted_places(given: Pass, number: int) -> Tensor | None:
    """Places at which the end of a layer is wanted, `[M]`; None = all."""
    if given.wanted is None or number < len(given.decoder.layers) - 1:
        return None
    return torch.from_numpy(given.wanted).to(given.decoder.device)


def at(values: Tensor, places: Tensor | None) -> Tensor:
    """The values at some places of a stream; None = all."""
    return values if places is None else values[places]


def spread(values: Tensor, places: Tensor | None, *, length: int) -> Tensor:
    """What `at` took, back in its places among zeros, `[length, ...]`."""
    if places is None:
        return values
    whole = values.new_zeros(length, *values.shape[1:])
    whole[places] = values
    return whole


def run_layer_backward(
    given: Pass, number: int, kept: KeptLayer, gradient: Tensor, *, into_input: bool
) -> Tensor:
    """The gradient of a layer's input, `[N, H]` float32; adds to those of the adapters.

    Args:
        given: the stream.
        number: of the layer.
        kept: from `run_layer`.
        gradient: `[N, H]` float32, of the output; overwritten.
        into_input: whether a lower layer wants the gradient; else what is returned is not it.
    """
    decoder = given.decoder
    layer = decoder.layers[number]
    places = wanted_places(given, number)
    after = given if places is None else given.narrowed()

    def project_backward(
        site: Site, outer: Tensor, inputs: Tensor, *, wanted: bool = True
    ) -> Tensor | None:
        inner = linear_backward(outer, layer.sites[site].weight) if wanted else None
        spans = given.spans if site is Site.QKV else after.spans
        add_update_gradients(outer, inputs, inner, kept.low_ranks[site], spans, (number, site))
        return inner

    # Feed-forward: middle + norm(down(act(gate) * up))
    outer = gradient
    if layer.feed_forward_output_norm is not None:
        assert kept.feed_forward_output is not None
        outer = normalised_backward(
            gradient, kept.feed_forward_output.float(), layer.feed_forward_output_norm
        )
    inner = project_backward(
        Site.DOWN, outer.to(decoder.dtype), gated(kept.gate_up, decoder.activation)
    )
    assert inner is not None
    outer = gated_backward(inner, kept.gate_up, decoder.activation)
    normed = normalised(kept.middle, layer.feed_forward_norm)
    inner = project_backward(Site.GATE_UP, outer, normed.to(decoder.dtype))
    assert inner is not None
    gradient += normalised_backward(inner.float(), kept.middle, layer.feed_forward_norm)

    # Attention: hidden + norm(out(attend(rotate(qkv))))
    outer = gradient
    if layer.attention_output_norm is not None:
        assert kept.attention_output is not None
        outer = normalised_backward(
            gradient, kept.attention_output.float(), layer.attention_output_norm
        )
    inner = project_backward(
        Site.OUT,
        outer.to(decoder.dtype),
        at(kept.attended.output, places).flatten(1).to(decoder.dtype),
    )
    assert inner is not None
    num_tokens = len(kept.hidden)
    inner = spread(inner, places, length=num_tokens)
    gradient = spread(gradient, places, length=num_tokens)
    num_heads = decoder.num_heads
    query, key, value = attend_backward(
        inner.view_as(kept.attended.output).to(kept.rotated.dtype),
        kept.rotated[:, :num_heads],
        kept.rotated[:, num_heads:],
        kept.heads[:, num_heads + decoder.num_kv_heads :].to(kept.rotated.dtype),
        kept.attended,
        given.stream,
        layer.attention,
    )
    outer = _queries_and_keys_backward(
        decoder, layer, kept.heads, torch.cat([query, key, value], dim=1),
        given.rotations[layer.rope],
    )  # fmt: skip
    normed = normalised(kept.hidden, layer.input_norm).to(decoder.dtype)
    inner = project_backward(
        Site.QKV, outer.flatten(1).to(decoder.dtype), normed, wanted=into_input
    )
    if inner is not None:
        gradient += normalised_backward(inner.float(), kept.hidden, layer.input_norm)
    return gradient


def normalised(inputs: Tensor, norm: Norm) -> Tensor:
    """`inputs` of root-mean-square 1 times the norm's weight, over the last dimension, float32."""
    return F.rms_norm(inputs, (inputs.shape[-1],), norm.weight, norm.eps)


def normalised_backward(gradient: Tensor, inputs: Tensor, norm: Norm) -> Tensor:
    """The gradient of the inputs of `normalised`, float32."""
    inverse = inputs.square().mean(-1, keepdim=True).add_(norm.eps).rsqrt_()
    weighted = gradient * norm.weight
    # With u the inputs and r their inverse root-mean-square: r (g - u r^2 mean(g u)).
    overlap = (weighted * inputs).mean(-1, keepdim=True).mul_(inverse.square())
    return weighted.addcmul_(inputs, overlap, value=-1).mul_(inverse)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """`activation(gate) * up`, `[N, I]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return _activated(gate, activation).mul_(up)


def gated_backward(gradient: Tensor, gate_up: Tensor, activation: str) -> Tensor:
    """The gradient of gate and up, `[N, 2 I]`; that of the result, `[N, I]`, is overwritten."""
    gate, up = gate_up.chunk(2, dim=-1)
    result = torch.empty_like(gate_up)
    gate_gradient, up_gradient = result.chunk(2, dim=-1)
    torch.mul(gradient, _activated(gate, activation), out=up_gradient)
    outer = gradient.mul_(up)
    if activation == "silu":
        torch.ops.aten.silu_backward.grad_input(outer, gate, grad_input=gate_gradient)
    else:
        torch.ops.aten.gelu_backward.grad_input(
            outer, gate, approximate="tanh", grad_input=gate_gradient
        )
    return result


def _activated(gate: Tensor, activation: str) -> Tensor:
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")


def rotate(heads: Tensor, rotation: tuple[Tensor, Tensor], out: Tensor, *, back: bool) -> None:
    """Rotary position embedding of heads `[N, heads, D]` into `out`. Source: arXiv:2104.09864.

    Args:
        heads: not rotated.
        rotation: cosines and sines, `[N, D / 2]`.
        out: `[N, heads, D]`
        back: by the opposite angle, which is the gradient.
    """
    cosines, sines = (each[:, None, :].to(out.dtype) for each in rotation)
    first, second = heads.chunk(2, dim=-1)
    out_first, out_second = out.chunk(2, dim=-1)
    sign = -1 if back else 1
    torch.mul(first, cosines, out=out_first)
    out_first.addcmul_(second.to(out.dtype), sines, value=-sign)
    torch.mul(second, cosines, out=out_second)
    out_second.addcmul_(first.to(out.dtype), sines, value=sign)


def _queries_and_keys(
    decoder: Decoder, layer: DecoderLayer, heads: Tensor, rotation: tuple[Tensor, Tensor]
) -> Tensor:
    """Queries and keys normalised where the layer does so, then rotated, `[N, A + K, D]`."""
    num_heads, num_kv_heads = decoder.num_heads, decoder.num_kv_heads
    plain = heads[:, : num_heads + num_kv_heads]
    if layer.query_norm is not None and layer.key_norm is not None:
        plain = torch.cat(
            [
                normalised(plain[:, :num_heads].float(), layer.query_norm),
                normalised(plain[:, num_heads:].float(), layer.key_norm),
            ],
            dim=1,
        )
    rotated = torch.empty(plain.shape, dtype=decoder.attention_dtype, device=heads.device)
    rotate(plain, rotation, rotated, back=False)
    return rotated


def _queries_and_keys_backward(
    decoder: Decoder,
    layer: DecoderLayer,
    heads: Tensor,
    gradient: Tensor,
    rotation: tuple[Tensor, Tensor],
) -> Tensor:
    """The gradient of queries, keys and values as projected, from that of those attention saw."""
    num_heads, num_kv_heads = decoder.num_heads, decoder.num_kv_heads
    turned = gradient[:, : num_heads + num_kv_heads]
    rotate(turned.clone(), rotation, turned, back=True)
    if layer.query_norm is not None and layer.key_norm is not None:
        queries = slice(0, num_heads)
        keys = slice(num_heads, num_heads + num_kv_heads)
        for part, norm in ((queries, layer.query_norm), (keys, layer.key_norm)):
            gradient[:, part] = normalised_backward(
                gradient[:, part].float(), heads[:, part].float(), norm
            ).to(gradient.dtype)
    return gradient
