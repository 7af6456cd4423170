"""Weights laid out for decoding on a CPU.

A decoding step multiplies a few rows by every weight of the model, so most of its time goes into
reading weights and bringing them into the order that the product wants. oneDNN can keep them in
that order. In float32 an adapter is added to them first, which also saves its many tiny products;
in bfloat16 that would round most of it away, so there it stays apart.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tunebook.backends.local.engine.adapters import AppliedAdapter
from tunebook.backends.local.engine.decoder import Decoder, DecoderLayer, Linear, Site
from tunebook.backends.local.engine.products import onednn_agrees
from tunebook.backends.local.memory import free_memory

MIN_TOKENS = 512
"""Tokens of a request from which on laying out the weights pays."""
PACKED_ROWS = 32
"""Rows that the layout is chosen for; any number can be multiplied."""
SHARE = 0.25
"""Of the free memory that laid-out weights may take."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A decoder and an output head for decoding."""

    decoder: Decoder
    head: Tensor
    """`[V, H]`"""
    adapter: AppliedAdapter | None
    """What is still to be applied; None = it is in the weights."""


def can_pack(decoder: Decoder, head: Tensor) -> bool:
    """Whether products with laid-out weights are there, and the memory for a second copy."""
    if decoder.device.type != "cpu" or not onednn_agrees():
        return False
    if decoder.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    free = free_memory(decoder.device)
    sizes = sum(s.weight.nbytes for layer in decoder.layers for s in layer.sites.values())
    return free is None or sizes + head.nbytes <= SHARE * free


@torch.no_grad()
def pack(decoder: Decoder, head: Tensor, adapter: AppliedAdapter) -> Packed:
    """The decoder with laid-out weights, the adapter in them where that loses nothing.

    Args:
        decoder: on a CPU.
        head: `[V, H]`
        adapter: over the decoder.
    """
    merges = decoder.dtype == torch.float32

    def packed_layer(number: int, layer: DecoderLayer) -> DecoderLayer:
        sites: dict[Site, Linear] = {}
        for site, linear in layer.sites.items():
            weight = linear.weight
            adapted = adapter.sites.get((number, site)) if merges else None
            if adapted is not None:
                weight = torch.addmm(weight, adapted.b, adapted.a)
            sites[site] = Linear(_packed(weight), linear.bias)
        return replace(layer, sites=sites)

    layers = tuple(packed_layer(number, layer) for number, layer in enumerate(decoder.layers))
    return Packed(replace(decoder, layers=layers), _packed(head), None if merges else adapter)


def _packed(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
