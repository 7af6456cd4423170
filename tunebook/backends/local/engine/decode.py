"""Keys and values that are kept, and attention of one new token a row to them.

What several rows begin with is kept once (`Beginning`); what each row has of its own stands in a
slot of `OwnTokens`. A new token attends to both, and the two results are joined by their
log-sum-exp, which is exact: softmax over a union is the average of the softmaxes over its parts,
weighted by their sums of exponentials.
Legend: n rows, S slots, A query heads, K key-value heads, D head size, P tokens of a beginning,
T own tokens that a slot has room for, Q queries that see the same keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from tunebook.backends.local.engine.adapters import AdapterSpan, AppliedAdapter
from tunebook.backends.local.engine.attention import Attended, AttentionRule, attend
from tunebook.backends.local.engine.decoder import Decoder
from tunebook.backends.local.engine.engine import padded
from tunebook.backends.local.engine.layers import LayerAttention, Pass, run_layers
from tunebook.backends.local.engine.layout import Group, Span, Stream, lay_out
from tunebook.types import IntArray

PIECE = 64
"""Own tokens by which the room of all slots grows."""
READ_STEP = 16
"""Own tokens are read in multiples of this, so that sums do not depend on the other rows' lengths
more than they must."""
MASKED = -1e30
"""Added to a score that must not count; finite, so that a row without any visible key in one part
has a log-sum-exp for it."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, slots=True, eq=False)
class Beginning:
    """The keys and values of a prompt."""

    keys: Tensor
    """`[layers, K, P, D]`, rotated."""
    values: Tensor
    """`[layers, K, P, D]`"""

    @property
    def length(self) -> int:
        """P"""
        return self.keys.shape[2]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and the adapter that reads it."""

    tokens: IntArray
    adapter: AppliedAdapter | None


@torch.no_grad()
def prefill(decoder: Decoder, prompts: Sequence[Prompt]) -> tuple[list[Beginning], Tensor]:
    """Keys and values of prompts, and the hidden state after the last token of each, `[n, H]`.

    Args:
        decoder: of the base.
        prompts: those of an adapter next to each other.
    """
    operations, adapters = _by_adapter(prompts)
    groups = [[Group((i,), 0, len(row)) for i, row in enumerate(rows)] for rows in operations]
    stream = padded(lay_out(operations, groups))
    places = [row for rows in stream.places for row in rows]
    beginnings = [
        Beginning(_empty(decoder, len(prompt.tokens)), _empty(decoder, len(prompt.tokens)))
        for prompt in prompts
    ]

    def attention(number: int, queries: Tensor, keys: Tensor, values: Tensor) -> Attended:
        for beginning, place in zip(beginnings, places, strict=True):
            rows = slice(int(place[0]), int(place[-1]) + 1)
            beginning.keys[number] = keys[rows].transpose(0, 1)
            beginning.values[number] = values[rows].transpose(0, 1)
        rule = decoder.layers[number].attention
        return attend(queries, keys, values, stream, rule, with_gradient=False)

    spans = [
        AdapterSpan(adapter, tokens, ())
        for adapter, tokens in zip(adapters, stream.members, strict=True)
    ]
    hidden = _run(decoder, stream, spans, attention)
    last = torch.tensor([int(place[-1]) for place in places], device=decoder.device)
    return beginnings, hidden[last]


def _by_adapter(
    prompts: Sequence[Prompt],
) -> tuple[list[list[IntArray]], list[AppliedAdapter | None]]:
    operations: list[list[IntArray]] = []
    adapters: list[AppliedAdapter | None] = []
    for prompt in prompts:
        if not adapters or adapters[-1] is not prompt.adapter:
            operations.append([])
            adapters.append(prompt.adapter)
        operations[-1].append(prompt.tokens)
    return operations, adapters


def _empty(decoder: Decoder, length: int) -> Tensor:
    return torch.empty(
        (len(decoder.layers), decoder.num_kv_heads, length, decoder.head_dim),
        dtype=decoder.attention_dtype,
        device=decoder.device,
    )


def _run(
    decoder: Decoder, stream: Stream, spans: Sequence[AdapterSpan], attention: LayerAttention
) -> Tensor:
    positions = torch.from_numpy(stream.positions).to(decoder.device)
    given = Pass(decoder, stream, spans, decoder.rotations(positions), attention=attention)
    return run_layers(given, first_trained=None, recompute=False).hidden


class OwnTokens:
    """Keys and values of the tokens that each row has for itself; rows stand in slots 0, 1, ..."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.keys = self._zeros(0, 0)
        """`[layers, S, K, T, D]`, rotated."""
        self.values = self._zeros(0, 0)

    @property
    def num_slots(self) -> int:
        """S"""
        return self.keys.shape[1]

    @property
    def room(self) -> int:
        """T"""
        return self.keys.shape[3]

    @torch.no_grad()
    def reserve(self, num_slots: int, length: int) -> None:
        """Makes room for rows and their tokens; what is there stays."""
        if num_slots <= self.num_slots and length <= self.room:
            return
        num_slots = max(num_slots, self.num_slots)
        room = max(-(-length // PIECE) * PIECE, self.room)
        # One after the other: the old and the new of both at once would be twice the memory.
        self.keys = self._grown(self.keys, num_slots, room)
        self.values = self._grown(self.values, num_slots, room)

    @torch.no_grad()
    def begin(self, slot: int, beginning: Beginning) -> None:
        """Writes a prompt as a slot's first tokens."""
        self.keys[:, slot, :, : beginning.length] = beginning.keys
        self.values[:, slot, :, : beginning.length] = beginning.values

    @torch.no_grad()
    def move(self, slots: Sequence[tuple[int, int]], length: int) -> None:
        """Copies the first tokens of slots to others.

        Args:
            slots: from and to.
            length: tokens of the longest of them.
        """
        if slots:
            sources, targets = ([pair[side] for pair in slots] for side in (0, 1))
            for tensor in (self.keys, self.values):
                tensor[:, targets, :, :length] = tensor[:, sources, :, :length]

    @torch.no_grad()
    def clear(self, slots: Sequence[int]) -> None:
        """Makes all that slots hold 0."""
        if slots:
            self.keys[:, list(slots)] = 0
            self.values[:, list(slots)] = 0

    def _grown(self, old: Tensor, num_slots: int, room: int) -> Tensor:
        new = self._zeros(num_slots, room)
        new[:, : old.shape[1], :, : old.shape[3]] = old
        return new

    def _zeros(self, num_slots: int, room: int) -> Tensor:
        # Zeros, because what is masked is still multiplied: by 0, which must not meet a NaN.
        decoder = self.decoder
        return torch.zeros(
            (len(decoder.layers), num_slots, decoder.num_kv_heads, room, decoder.head_dim),
            dtype=decoder.attention_dtype,
            device=decoder.device,
        )


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Rows, next to each other, that have a beginning in common."""

    rows: Span
    beginning: Beginning


@dataclass(frozen=True, slots=True)
class Lineup:
    """The rows that take a step together. It holds until a row leaves or enters."""

    slots: IntArray
    """`[n]`, of each row; together 0 to n - 1."""
    offsets: IntArray
    """`[n]` position of a row's first own token."""
    spans: tuple[AdapterSpan, ...]
    shared: tuple[SharedRows, ...]


@torch.no_grad()
def decode(own: OwnTokens, lineup: Lineup, tokens: IntArray, lengths: IntArray) -> Tensor:
    """Hidden states after one more token of each row, `[n, H]`; its keys and values are kept.

    Args:
        own: has room for the tokens.
        lineup: the rows.
        tokens: `[n]`
        lengths: `[n]` own tokens of each row before this one.
    """
    positions = (lineup.offsets + lengths).astype(np.int32)
    stream = Stream(tokens, positions, (), (), (), (), ())
    attention = _StepAttention(own, lineup, positions, lengths)
    return _run(own.decoder, stream, lineup.spans, attention)


class _StepAttention:
    """Attention of one step, in every layer."""

    def __init__(
        self, own: OwnTokens, lineup: Lineup, positions: IntArray, lengths: IntArray
    ) -> None:
        decoder = own.decoder
        self._own = own
        self._decoder = decoder
        self._num_rows = num_rows = len(positions)
        device = decoder.device
        rows = np.empty(num_rows, np.int64)
        rows[lineup.slots] = np.arange(num_rows)
        in_order = bool((rows == np.arange(num_rows)).all())
        self._slots = torch.from_numpy(lineup.slots.astype(np.int64)).to(device)
        """`[n]` slot of each row"""
        self._rows = None if in_order else torch.from_numpy(rows).to(device)
        """`[n]` row of each slot; None = the same."""
        self._lengths = torch.from_numpy(lengths.astype(np.int64)).to(device)
        self._length = min(own.room, -(-(int(lengths.max()) + 1) // READ_STEP) * READ_STEP)
        windows = {layer.attention.window for layer in decoder.layers}
        columns = np.arange(self._length)
        lengths_S, positions_S = lengths[rows, None], positions[rows, None]
        offsets_S = lineup.offsets[rows, None]
        self._masks = {
            window: self._mask(columns <= lengths_S, positions_S - offsets_S - columns, window)
            for window in windows
        }
        """Window -> what is added to the scores of own tokens, `[S, 1, 1, T]`."""
        self._shared: list[tuple[slice, Beginning, dict[int | None, Tensor | None]]] = []
        for group in lineup.shared:
            members = slice(group.rows.start, group.rows.stop)
            distance = positions[members, None] - np.arange(group.beginning.length)
            masks = {window: self._shared_mask(distance, window) for window in windows}
            self._shared.append((members, group.beginning, masks))
        if self._shared:
            shape = (num_rows, decoder.num_heads, decoder.head_dim)
            self._output = torch.zeros(shape, dtype=decoder.attention_dtype, device=device)
            self._lse = torch.full(shape[:2], MASKED, device=device)

    def _mask(self, visible: np.ndarray, distance: np.ndarray, window: int | None) -> Tensor:
        if window is not None:
            visible = visible & (distance < window)
        mask = np.where(visible, np.float32(0), np.float32(MASKED))
        return torch.from_numpy(mask)[:, None, None].to(self._decoder.device)

    def _shared_mask(self, distance: np.ndarray, window: int | None) -> Tensor | None:
        """`[1, 1, Q, P]`, None where nothing is hidden."""
        if window is None or int(distance.max()) < window:
            return None
        repeats = self._decoder.num_heads // self._decoder.num_kv_heads
        mask = np.where(distance < window, np.float32(0), np.float32(MASKED))
        return torch.from_numpy(mask.repeat(repeats, axis=0))[None, None].to(self._decoder.device)

    def __call__(self, number: int, queries: Tensor, keys: Tensor, values: Tensor) -> Attended:
        rule = self._decoder.layers[number].attention
        own_keys, own_values = self._own.keys[number], self._own.values[number]
        own_keys[self._slots, :, self._lengths] = keys
        own_values[self._slots, :, self._lengths] = values
        num_rows, num_kv_heads = self._num_rows, self._decoder.num_kv_heads
        in_slots = queries if self._rows is None else queries[self._rows]
        output, lse = attention_part(
            in_slots.reshape(num_rows, num_kv_heads, -1, queries.shape[2]),
            own_keys[:num_rows, :, : self._length],
            own_values[:num_rows, :, : self._length],
            self._masks[rule.window],
            rule,
        )
        output, lse = output.reshape(queries.shape), lse.reshape(queries.shape[:2])
        if self._rows is not None:
            output, lse = output[self._slots], lse[self._slots]
        if self._shared:
            self._attend_shared(number, queries, rule)
            share = torch.sigmoid(self._lse - lse)
            output = torch.lerp(output, self._output, share[..., None].to(output.dtype))
        return Attended(output, None, _no_backward)

    def _attend_shared(self, number: int, queries: Tensor, rule: AttentionRule) -> None:
        """Attention of rows to what they begin with, into `_output` and `_lse`."""
        num_kv_heads, head_dim = self._decoder.num_kv_heads, self._decoder.head_dim
        for members, beginning, masks in self._shared:
            # Every row of the group and every query head of a key-value head: one product.
            by_head = queries[members].unflatten(1, (num_kv_heads, -1)).transpose(0, 1)
            output, lse = attention_part(
                by_head.reshape(1, num_kv_heads, -1, head_dim),
                beginning.keys[number][None],
                beginning.values[number][None],
                masks[rule.window],
                rule,
            )
            self._output[members].unflatten(1, (num_kv_heads, -1)).copy_(
                output.view(by_head.shape).transpose(0, 1)
            )
            self._lse[members].unflatten(1, (num_kv_heads, -1)).copy_(
                lse.view(by_head.shape[:3]).transpose(0, 1)
            )


def attention_part(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, rule: AttentionRule
) -> tuple[Tensor, Tensor]:
    """Attention to some of the keys, `[B, K, Q, D]`, and its log-sum-exp, `[B, K, Q]` float32.

    Args:
        queries: `[B, K, Q, D]`
        keys: `[B, K, T, D]`
        values: `[B, K, T, D]`
        mask: added to the scores, `[1 or B, 1, 1 or Q, T]` float32.
        rule: of the layer; its window is in the mask.
    """
    if queries.device.type == "cpu" and rule.softcap is None and queries.dtype == torch.float32:
        return _flash(queries, keys, values, 0.0, False, attn_mask=mask, scale=rule.scaling)
    scores = (queries @ keys.transpose(2, 3)).float() * rule.scaling
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if mask is not None:
        scores += mask
    lse = scores.logsumexp(dim=-1)
    weights = (scores - lse[..., None]).exp_()
    return weights.to(values.dtype) @ values, lse


def _no_backward(*_: object) -> NoReturn:
    raise AssertionError("decoding has no backward pass")
