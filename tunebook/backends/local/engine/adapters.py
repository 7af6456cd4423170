"""Adapters of several sessions as grouped low-rank products on a stream.

Legend: N tokens of the stream, n tokens of one adapter, I input and O output features of a site,
R ranks of an adapter's layers at a site together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tunebook.backends.local.engine.decoder import Decoder, Part, Site
from tunebook.backends.local.engine.layout import SIZE_STEP, Span
from tunebook.backends.local.engine.products import linear, linear_backward


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """One linear layer of an adapter within its site."""

    name: str
    ranks: slice
    outputs: slice
    scale: float


@dataclass(slots=True)
class AdaptedSite:
    """What an adapter adds to one site: `inputs @ a.T @ b.T`."""

    a: Tensor
    """`[R, I]` in the decoder's dtype."""
    b: Tensor
    """`[O, R]`, scaled; zero where a layer's ranks meet another layer's outputs."""
    layers: tuple[AdaptedLayer, ...]
    a_gradient: Tensor | None = None
    """`[R, I]` float64, summed over groups of rows."""
    b_gradients: list[Tensor] = field(default_factory=list)
    """For each layer `[its outputs, its ranks]` float64, not scaled."""


@dataclass(frozen=True, slots=True)
class AppliedAdapter:
    """An adapter ready to compute with: a copy of its values, and sums of its gradient."""

    sites: Mapping[tuple[int, Site], AdaptedSite]
    first_layer: int
    """Lowest layer it adapts; nothing below needs a gradient."""


@dataclass(frozen=True, slots=True)
class AdapterSpan:
    """The tokens of a stream that an adapter applies to."""

    adapter: AppliedAdapter | None
    """None = the base alone."""
    tokens: Span
    groups: Sequence[Span]
    """Groups of rows; gradients are computed for each and summed in float64."""


def applied_adapter(
    decoder: Decoder,
    matrices: Mapping[str, tuple[Tensor, Tensor]],
    scales: Mapping[str, float],
) -> AppliedAdapter:
    """An adapter over a decoder.

    Args:
        decoder: the base.
        matrices: layer name -> A `[R, I]` and B `[O, R]`, float32.
        scales: layer name -> factor of `B A`.
    """
    by_site: dict[tuple[int, Site], list[tuple[str, Part]]] = {}
    for name in matrices:
        part = decoder.parts[name]
        by_site.setdefault((part.layer, part.site), []).append((name, part))
    sites: dict[tuple[int, Site], AdaptedSite] = {}
    for key, named in by_site.items():
        num_outputs = len(decoder.layers[key[0]].sites[key[1]].weight)
        a = torch.cat([matrices[name][0].detach() for name, _ in named])
        b = torch.zeros(num_outputs, len(a), device=decoder.device)
        layers: list[AdaptedLayer] = []
        first = 0
        for name, part in named:
            matrix = matrices[name][1].detach()
            ranks = slice(first, first + matrix.shape[1])
            b[part.first : part.stop, ranks] = matrix * scales[name]
            layers.append(AdaptedLayer(name, ranks, slice(part.first, part.stop), scales[name]))
            first = ranks.stop
        sites[key] = AdaptedSite(a.to(decoder.dtype), b.to(decoder.dtype), tuple(layers))
    return AppliedAdapter(sites, min(layer for layer, _ in sites))


def add_updates(
    outputs: Tensor, inputs: Tensor, spans: Sequence[AdapterSpan], key: tuple[int, Site]
) -> list[Tensor | None]:
    """Adds to a site's outputs what the adapters give; returns the products with A.

    Args:
        outputs: `[N, O]`, changed in place.
        inputs: `[N, I]`
        spans: of the stream.
        key: layer and site.

    Returns:
        For each span `[n, R]`, None where nothing was added.
    """
    low_ranks: list[Tensor | None] = []
    for span in spans:
        site = None if span.adapter is None else span.adapter.sites.get(key)
        if site is None or not span.tokens.length:
            low_ranks.append(None)
            continue
        rows = slice(span.tokens.start, span.tokens.stop)
        low_rank = linear(inputs[filled(span.tokens, len(inputs))], site.a)[: span.tokens.length]
        outputs[rows].addmm_(low_rank, site.b.t())
        low_ranks.append(low_rank)
    return low_ranks


def filled(span: Span, num_tokens: int) -> slice:
    """A span with as many of the tokens after it as make a multiple of `SIZE_STEP`, if there are.

    Whatever these belong to, what is computed for them is dropped.
    """
    stop = span.start + -(-span.length // SIZE_STEP) * SIZE_STEP
    return slice(span.start, stop if stop <= num_tokens else span.stop)


def add_update_gradients(
    gradient: Tensor,
    inputs: Tensor,
    input_gradient: Tensor | None,
    low_ranks: Sequence[Tensor | None],
    spans: Sequence[AdapterSpan],
    key: tuple[int, Site],
) -> None:
    """Adds the gradients of the adapters, and what they add to that of the inputs.

    Args:
        gradient: `[N, O]`, of the site's outputs.
        inputs: `[N, I]`
        input_gradient: `[N, I]`, changed in place; None = not wanted.
        low_ranks: from `add_updates`.
        spans: of the stream.
        key: layer and site.
    """
    for span, low_rank in zip(spans, low_ranks, strict=True):
        if low_rank is None:
            continue
        assert span.adapter is not None
        site = span.adapter.sites[key]
        rows = slice(span.tokens.start, span.tokens.stop)
        whole = filled(span.tokens, len(gradient))
        low_rank_gradient = linear_backward(gradient[whole], site.b)[: span.tokens.length]
        if input_gradient is not None:
            input_gradient[rows].addmm_(low_rank_gradient, site.a)
        for group in span.groups:
            own = slice(group.start - rows.start, group.stop - rows.start)
            absolute = slice(group.start, group.stop)
            _add_gradient(
                site, gradient[absolute], inputs[absolute], low_rank[own], low_rank_gradient[own]
            )


def _add_gradient(
    site: AdaptedSite, gradient: Tensor, inputs: Tensor, low_rank: Tensor, low_rank_gradient: Tensor
) -> None:
    a_gradient = low_rank_gradient.t() @ inputs
    b_gradients = [
        gradient[:, layer.outputs].t() @ low_rank[:, layer.ranks] for layer in site.layers
    ]
    # Sums in float64 do not depend on their order once they are rounded to float32, so a session's
    # gradient is the same to the last bit whichever rows share a stream. In float32 they would
    # differ in the last bits, which Adam makes visible where a gradient is near its epsilon.
    if site.a_gradient is None:
        dtype = sum_dtype(inputs.device)
        site.a_gradient = a_gradient.to(dtype)
        site.b_gradients = [each.to(dtype) for each in b_gradients]
    else:
        site.a_gradient += a_gradient
        for total, each in zip(site.b_gradients, b_gradients, strict=True):
            total += each


def sum_dtype(device: torch.device) -> torch.dtype:
    """What gradients are summed in: float64, which Apple's GPUs do not have."""
    return torch.float32 if device.type == "mps" else torch.float64


def gradients_of(adapter: AppliedAdapter) -> dict[str, tuple[Tensor, Tensor]]:
    """Layer name -> gradient of A and of B, float64; layers that no token reached are left out."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for site in adapter.sites.values():
        if site.a_gradient is None:
            continue
        for layer, b_gradient in zip(site.layers, site.b_gradients, strict=True):
            found[layer.name] = (
                site.a_gradient[layer.ranks],
                b_gradient * layer.scale,
            )
    return found
