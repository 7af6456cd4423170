"""Causal attention over a stream in which rows may share their beginning, and its gradient.

A token sees the tokens before it in its row: those of its own segment, and all of the beginning
that the row shares with others. On a CPU queries are taken in blocks, each with just the keys that
it can see, as batched products with explicit weights; torch's own attention spends half again as
long on the gradient of rows of a few hundred tokens.
Legend: N tokens of the stream, A query heads, K key-value heads, R query heads for each of them,
D head size, Q queries of a block, T keys that they see.
"""

import functools
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from tunebook.backends.local.engine.layout import Stream, groups_of, lay_out

logger = logging.getLogger(__name__)

BLOCK = 128
"""Queries of a block: enough for the products, few enough to skip most of what is hidden."""
KEPT_KEYS = 1024
"""Keys up to which the weights of a block are kept for the gradient; else they are computed again,
so that memory grows with the length of a row and not with its square."""


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """What one layer's attention computes."""

    scaling: float
    """Of the scores."""
    window: int | None
    """Tokens a token can see, itself included; None = all before it."""
    softcap: float | None
    """Scores become `softcap * tanh(score / softcap)`; None = as they are."""


@dataclass(frozen=True, slots=True)
class Attended:
    """Attention over a stream, and what its gradient needs."""

    output: Tensor
    """`[N, A, D]`"""
    saved: Any
    backward: "AttentionBackward"


AttentionBackward: TypeAlias = Callable[
    [Tensor, Tensor, Tensor, Tensor, Attended, Stream, AttentionRule], tuple[Tensor, Tensor, Tensor]
]
"""`(gradient of output, query, key, value, attended, stream, rule) -> their gradients`"""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    stream: Stream,
    rule: AttentionRule,
    *,
    with_gradient: bool,
) -> Attended:
    """Attention of every token of a stream to those it can see.

    Args:
        query: `[N, A, D]`
        key: `[N, K, D]`, K dividing A.
        value: `[N, K, D]`
        stream: which tokens see which.
        rule: of the layer.
        with_gradient: keep what `attend_backward` needs.
    """
    if query.device.type == "cpu" and rule.softcap is None:
        return _attend_blocks(query, key, value, stream, rule, with_gradient=with_gradient)
    compute = masked_output
    if query.device.type == "cuda" and flex_agrees(query.device, query.dtype):
        compute = flex_output
    if not with_gradient:
        return Attended(compute(query, key, value, stream, rule), None, _graph_gradients)
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    with torch.enable_grad():
        output = compute(leaves[0], leaves[1], leaves[2], stream, rule)
    return Attended(output.detach(), (output, leaves), _graph_gradients)


def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Attended,
    stream: Stream,
    rule: AttentionRule,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value from that of the output; shapes as in `attend`."""
    return attended.backward(gradient, query, key, value, attended, stream, rule)


def hides(rule: AttentionRule, stream: Stream) -> bool:
    """Whether the window hides a token from another of the same row."""
    return rule.window is not None and int(stream.positions.max()) >= rule.window


@dataclass(frozen=True, slots=True)
class Block:
    """Queries and the keys that they see together."""

    queries: slice
    shared: slice | None
    """Keys of the beginning that the row shares; every query sees them, but for a window."""
    own: slice
    """Keys of the segment up to the last query, which each sees up to itself."""

    @property
    def num_queries(self) -> int:
        """Q"""
        return self.queries.stop - self.queries.start

    def keys_of(self, tensor: Tensor) -> Tensor:
        """`[K, T, D]` of `[K, N, D]`."""
        if self.shared is None:
            return tensor[:, self.own]
        return torch.cat([tensor[:, self.shared], tensor[:, self.own]], dim=1)

    def add_to_keys(self, total: Tensor, addend: Tensor) -> None:
        """Adds `[K, T, D]` to the places of the keys in `[K, N, D]`."""
        num_shared = 0
        if self.shared is not None:
            num_shared = self.shared.stop - self.shared.start
            total[:, self.shared] += addend[:, :num_shared]
        total[:, self.own] += addend[:, num_shared:]


def blocks_of(stream: Stream) -> list[Block]:
    """The blocks of a stream's queries."""
    blocks: list[Block] = []
    for segment in stream.segments:
        span, keys = segment.tokens, segment.shared
        shared = None if keys is None else slice(keys.start, keys.stop)
        for start in range(span.start, span.stop, BLOCK):
            stop = min(start + BLOCK, span.stop)
            blocks.append(Block(slice(start, stop), shared, slice(span.start, stop)))
    return blocks


def _attend_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    stream: Stream,
    rule: AttentionRule,
    *,
    with_gradient: bool,
) -> Attended:
    query, key, value = _laid_out(query, key, value, rule)
    output = torch.empty_like(query)
    kept: list[Tensor | None] = []
    for block in blocks_of(stream):
        weights = _block_weights(query, key, block, stream, rule)
        num_kv_heads, num_queries = len(query), block.num_queries
        output[:, block.queries] = torch.bmm(weights, block.keys_of(value)).view(
            num_kv_heads, num_queries, *query.shape[2:]
        )
        kept.append(weights if with_gradient and weights.shape[-1] <= KEPT_KEYS else None)
    heads = output.permute(1, 0, 2, 3).flatten(1, 2)
    return Attended(heads, kept, _block_gradients)


def _laid_out(
    query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
) -> tuple[Tensor, Tensor, Tensor]:
    """Scaled queries `[K, N, R, D]`, keys and values `[K, N, D]`, contiguous."""
    num_kv_heads = key.shape[1]
    grouped = query.unflatten(1, (num_kv_heads, -1)).permute(1, 0, 2, 3)
    return (
        torch.mul(grouped, rule.scaling, out=torch.empty(grouped.shape, dtype=query.dtype)),
        key.transpose(0, 1).contiguous(),
        value.transpose(0, 1).contiguous(),
    )


def _block_weights(
    query: Tensor, key: Tensor, block: Block, stream: Stream, rule: AttentionRule
) -> Tensor:
    """How much each query of a block takes from each key, `[K, Q R, T]`."""
    num_kv_heads, num_queries = len(query), block.num_queries
    rows = query[:, block.queries].reshape(num_kv_heads, -1, query.shape[-1])
    scores = torch.bmm(rows, block.keys_of(key).transpose(1, 2))
    by_query = scores.view(num_kv_heads, num_queries, -1, scores.shape[-1])
    if hides(rule, stream):
        by_query.masked_fill_(_hidden(block, stream, rule)[None, :, None, :], -torch.inf)
    else:
        # Only the last keys can be hidden: they are the queries' own places.
        last = by_query[..., scores.shape[-1] - num_queries :]
        later = torch.ones(num_queries, num_queries, dtype=torch.bool).triu_(1)
        last.masked_fill_(later[None, :, None, :], -torch.inf)
    return torch.softmax(scores, dim=-1)


def _hidden(block: Block, stream: Stream, rule: AttentionRule) -> Tensor:
    """`[Q, T]` bool, True where a query does not see a key."""
    positions = torch.from_numpy(stream.positions)
    keys = positions[block.own]
    if block.shared is not None:
        keys = torch.cat([positions[block.shared], keys])
    distance = positions[block.queries, None] - keys[None, :]
    hidden = distance < 0
    return hidden if rule.window is None else hidden | (distance >= rule.window)


def _block_gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Attended,
    stream: Stream,
    rule: AttentionRule,
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = _laid_out(query, key, value, rule)
    num_kv_heads, head_dim = len(query), query.shape[-1]
    outer = gradient.unflatten(1, (num_kv_heads, -1)).permute(1, 0, 2, 3).contiguous()
    query_gradient = torch.empty_like(query)
    key_gradient = torch.zeros_like(key)
    value_gradient = torch.zeros_like(value)
    for block, kept in zip(blocks_of(stream), attended.saved, strict=True):
        weights = _block_weights(query, key, block, stream, rule) if kept is None else kept
        rows = query[:, block.queries].reshape(num_kv_heads, -1, head_dim)
        outer_rows = outer[:, block.queries].reshape(num_kv_heads, -1, head_dim)
        block.add_to_keys(value_gradient, torch.bmm(weights.transpose(1, 2), outer_rows))
        inner = torch.bmm(outer_rows, block.keys_of(value).transpose(1, 2))
        inner = torch.ops.aten._softmax_backward_data(inner, weights, -1, weights.dtype)
        query_gradient[:, block.queries] = torch.bmm(inner, block.keys_of(key)).view(
            num_kv_heads, block.num_queries, *query.shape[2:]
        )
        block.add_to_keys(key_gradient, torch.bmm(inner.transpose(1, 2), rows))
    return (
        query_gradient.mul_(rule.scaling).permute(1, 0, 2, 3).flatten(1, 2),
        key_gradient.transpose(0, 1),
        value_gradient.transpose(0, 1),
    )


def _graph_gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Attended,
    stream: Stream,
    rule: AttentionRule,
) -> tuple[Tensor, Tensor, Tensor]:
    del query, key, value, stream, rule
    output, leaves = attended.saved
    query_gradient, key_gradient, value_gradient = torch.autograd.grad(output, leaves, gradient)
    return query_gradient, key_gradient, value_gradient


def masked_output(
    query: Tensor, key: Tensor, value: Tensor, stream: Stream, rule: AttentionRule
) -> Tensor:
    """Attention row by row with explicit masks, for soft caps and on other devices, `[N, A, D]`."""
    positions = torch.from_numpy(stream.positions).to(query.device)
    pieces: list[Tensor] = []
    for segment in stream.segments:
        span, shared = segment.tokens, segment.shared
        spans = [span] if shared is None else [shared, span]
        keys = torch.cat([key[each.start : each.stop] for each in spans])
        values = torch.cat([value[each.start : each.stop] for each in spans])
        key_positions = torch.cat([positions[each.start : each.stop] for each in spans])
        distance = positions[span.start : span.stop, None] - key_positions[None, :]
        visible = distance >= 0
        if rule.window is not None:
            visible &= distance < rule.window
        pieces.append(
            _softmax_attention(query[span.start : span.stop], keys, values, visible, rule)
        )
    return torch.cat(pieces)


def _softmax_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, rule: AttentionRule
) -> Tensor:
    """`[Q, A, D]` for queries `[Q, A, D]`, keys `[T, K, D]` and a mask `[Q, T]`."""
    repeats = query.shape[1] // key.shape[1]
    query = query.transpose(0, 1)
    key = key.transpose(0, 1).repeat_interleave(repeats, dim=0)
    value = value.transpose(0, 1).repeat_interleave(repeats, dim=0)
    if rule.softcap is None:
        attended = torch.nn.functional.scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask=visible, scale=rule.scaling
        )[0]
        return attended.transpose(0, 1)
    scores = (query @ key.transpose(1, 2)).float() * rule.scaling
    scores = rule.softcap * torch.tanh(scores / rule.softcap)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return (weights.to(value.dtype) @ value).transpose(0, 1)


def flex_output(
    query: Tensor, key: Tensor, value: Tensor, stream: Stream, rule: AttentionRule
) -> Tensor:
    """Attention of the whole stream as one fused kernel with a block mask, `[N, A, D]`.

    Source: arXiv:2412.05496 (FlexAttention).
    """
    cap = rule.softcap

    def capped(score: Tensor, *_place: Tensor) -> Tensor:
        return score if cap is None else cap * torch.tanh(score / cap)

    output = _flex(query.device)(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        score_mod=None if cap is None else capped,
        block_mask=_block_mask(stream, rule.window, query.device),
        scale=rule.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, Tensor)
    return output[0].transpose(0, 1)


@functools.cache
def _flex(device: torch.device) -> Callable[..., Any]:
    # Without compilation every score is held at once; a CPU is for tests of the mask.
    compiled = torch.compile(flex_attention, dynamic=True)
    return compiled if device.type == "cuda" else flex_attention


_MASKS: "weakref.WeakKeyDictionary[Stream, dict[int | None, BlockMask]]" = (
    weakref.WeakKeyDictionary()
)


def _block_mask(stream: Stream, window: int | None, device: torch.device) -> BlockMask:
    """Which tokens of a stream see which; made once for all layers of one window."""
    masks = _MASKS.setdefault(stream, {})
    if window not in masks:
        owner = np.zeros(stream.num_tokens, np.int64)
        shared = np.full(stream.num_tokens, -1)
        for segment in stream.segments:
            rows = slice(segment.tokens.start, segment.tokens.stop)
            owner[rows] = segment.tokens.start
            if segment.shared is not None:
                shared[rows] = segment.shared.start
        owners, seen = (torch.from_numpy(each).to(device) for each in (owner, shared))
        positions = torch.from_numpy(stream.positions).to(device)

        def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            found = (owners[query] == owners[key]) | (seen[query] == owners[key])
            found = found & (query >= key)
            if window is None:
                return found
            return found & (positions[query] - positions[key] < window)

        num = stream.num_tokens
        masks[window] = create_block_mask(sees, None, None, num, num, device=str(device))
    return masks[window]


@functools.cache
def flex_agrees(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the fused kernel runs here and gives the output and gradients of explicit masks."""
    rows = [np.arange(length, dtype=np.int32) for length in (70, 90, 40)]
    groups = groups_of(rows, rows_per_unit=1, max_tokens=1000, share=True)
    stream = lay_out([rows], [groups])
    generator = torch.Generator().manual_seed(0)
    num = stream.num_tokens
    values = [torch.randn(num, heads, 64, generator=generator) for heads in (4, 2, 2, 4)]
    *leaves, outer = (each.to(device, dtype) for each in values)
    rule = AttentionRule(scaling=0.125, window=50, softcap=None)
    found: list[list[Tensor]] = []
    try:
        for compute in (masked_output, flex_output):
            inputs = [each.detach().requires_grad_() for each in leaves]
            with torch.enable_grad():
                output = compute(inputs[0], inputs[1], inputs[2], stream, rule)
            found.append([output.detach(), *torch.autograd.grad(output, inputs, outer)])
    except Exception:
        # A compiler that is missing or fails raises anything; rows are then computed one by one.
        logger.warning("flex attention does not run on %s; rows are computed singly", device)
        return False
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    return all(
        float((ours - theirs).norm()) <= tolerance * float(theirs.norm())
        for theirs, ours in zip(*found, strict=True)
    )
