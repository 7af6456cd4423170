"""Causal attention over a stream in which rows may share their beginning, and its gradient.

Each segment of the stream attends to itself; rows with a shared beginning also attend to all of it
(a cross). The two results are joined by their log-sum-exp, which is exact: softmax over a union is
the average of the softmaxes over its parts, weighted by their sums of exponentials. The gradient of
a part needs nothing but the joined result and the joined log-sum-exp.
Legend: N tokens of the stream, A query heads, K key-value heads, D head size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tunebook.backends.local.engine.layout import Cross, Span, Stream

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


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
    if query.device.type == "cpu" and rule.softcap is None and not hides(rule, stream):
        return _attend_flash(query, key, value, stream, rule)
    if not with_gradient:
        return Attended(_masked_output(query, key, value, stream, rule), None, _masked_gradients)
    return _attend_masked(query, key, value, stream, rule)


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


def _heads_first(tensor: Tensor, span: Span) -> Tensor:
    return tensor[span.start : span.stop].transpose(0, 1)[None]


def _attend_flash(
    query: Tensor, key: Tensor, value: Tensor, stream: Stream, rule: AttentionRule
) -> Attended:
    output = torch.empty(query.shape, dtype=query.dtype)
    lse = torch.empty(query.shape[:2], dtype=torch.float32)

    def part(queries: Span, keys: Span, *, causal: bool) -> tuple[Tensor, Tensor]:
        found, found_lse = _flash(
            _heads_first(query, queries),
            _heads_first(key, keys),
            _heads_first(value, keys),
            0.0,
            causal,
            scale=rule.scaling,
        )
        return found[0].transpose(0, 1), found_lse[0].transpose(0, 1)

    for span in stream.segments:
        own, own_lse = part(span, span, causal=True)
        output[span.start : span.stop] = own
        lse[span.start : span.stop] = own_lse
    for cross in stream.crosses:
        shared, shared_lse = part(cross.queries, cross.keys, causal=False)
        rows = slice(cross.queries.start, cross.queries.stop)
        joined = torch.logaddexp(lse[rows], shared_lse)
        own = output[rows] * (lse[rows] - joined).exp_()[..., None]
        output[rows] = own.addcmul(shared, (shared_lse - joined).exp_()[..., None])
        lse[rows] = joined
    return Attended(output, lse, _flash_gradients)


def _flash_gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Attended,
    stream: Stream,
    rule: AttentionRule,
) -> tuple[Tensor, Tensor, Tensor]:
    query_gradient = torch.empty_like(query, memory_format=torch.contiguous_format)
    key_gradient = torch.empty_like(key, memory_format=torch.contiguous_format)
    value_gradient = torch.empty_like(value, memory_format=torch.contiguous_format)
    lse: Tensor = attended.saved

    def part(queries: Span, keys: Span, *, causal: bool) -> list[Tensor]:
        found = _flash_backward(
            _heads_first(gradient, queries),
            _heads_first(query, queries),
            _heads_first(key, keys),
            _heads_first(value, keys),
            _heads_first(attended.output, queries),
            lse[queries.start : queries.stop].t()[None],
            0.0,
            causal,
            scale=rule.scaling,
        )
        return [each[0].transpose(0, 1) for each in found]

    for span in stream.segments:
        rows = slice(span.start, span.stop)
        own = part(span, span, causal=True)
        query_gradient[rows], key_gradient[rows], value_gradient[rows] = own
    for cross in stream.crosses:
        shared = part(cross.queries, cross.keys, causal=False)
        query_gradient[cross.queries.start : cross.queries.stop] += shared[0]
        key_gradient[cross.keys.start : cross.keys.stop] += shared[1]
        value_gradient[cross.keys.start : cross.keys.stop] += shared[2]
    return query_gradient, key_gradient, value_gradient


def _attend_masked(
    query: Tensor, key: Tensor, value: Tensor, stream: Stream, rule: AttentionRule
) -> Attended:
    """Attention with explicit scores, for windows and soft caps, and on other devices."""
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    with torch.enable_grad():
        output = _masked_output(*leaves, stream, rule)
    return Attended(output.detach(), (output, leaves), _masked_gradients)


def _masked_gradients(
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


def _masked_output(
    query: Tensor, key: Tensor, value: Tensor, stream: Stream, rule: AttentionRule
) -> Tensor:
    positions = torch.from_numpy(stream.positions).to(query.device)
    beginnings: dict[int, Cross] = {
        span.start: cross
        for cross in stream.crosses
        for span in stream.segments
        if cross.queries.start <= span.start < cross.queries.stop
    }
    pieces: list[Tensor] = []
    for span in stream.segments:
        cross = beginnings.get(span.start)
        spans = [span] if cross is None else [cross.keys, span]
        keys = torch.cat([key[each.start : each.stop] for each in spans])
        values = torch.cat([value[each.start : each.stop] for each in spans])
        key_positions = torch.cat([positions[each.start : each.stop] for each in spans])
        distance = positions[span.start : span.stop, None] - key_positions[None, :]
        visible = distance >= 0
        if rule.window is not None:
            visible &= distance < rule.window
        pieces.append(_softmax_attention(query[span.start : span.stop], keys, values, visible, rule))
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
