"""Continuous batching: rows of all requests decode together, leave when done, and others enter."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tunebook.backends.local.completions import Row, draw_tokens
from tunebook.backends.local.engine.adapters import AdapterSpan, AppliedAdapter
from tunebook.backends.local.engine.decode import (
    Beginning,
    Lineup,
    OwnTokens,
    Prompt,
    SharedRows,
    decode,
    prefill,
)
from tunebook.backends.local.engine.engine import Engine
from tunebook.backends.local.engine.head import rows_at_once
from tunebook.backends.local.engine.layout import Span
from tunebook.backends.local.engine.packed import MIN_TOKENS, Packed, can_pack, pack

MAX_ROWS = 256
"""Rows that decode at once; more hardly go faster and take memory for logits."""
CACHE_BYTES_PER_TOKEN = 2**18
"""Bytes of keys and values for each of the `batch_tokens`: 1 GiB for 4,096."""
MIN_SHARED_TOKENS = 256
"""Tokens not read again, from which on a beginning is kept once for all its rows: fewer are read
faster as a part of each row's own."""


@dataclass(slots=True, eq=False)
class Request:
    """Rows to complete with one adapter."""

    rows: Sequence[Row]
    adapter: AppliedAdapter | None
    """None = the weights are those to sample."""

    @property
    def num_tokens(self) -> int:
        """Tokens that it can come to, prompts left out."""
        return sum(row.max_tokens for row in self.rows)


@dataclass(slots=True, eq=False)
class _Group:
    """The rows of a request with the same prompt."""

    number: int
    """Its place among all groups; those of a request follow each other."""
    prompt: Prompt
    waiting: deque[Row] = field(default_factory=deque)
    num_rows: int = 0
    beginning: Beginning | None = None
    """None = not read yet, or no longer needed."""
    logits: Tensor | None = None
    """`[V]`, of the first token."""

    @property
    def length(self) -> int:
        return len(self.prompt.tokens)

    @property
    def is_shared(self) -> bool:
        """Whether its beginning is kept once; it depends on nothing but the request."""
        return (self.num_rows - 1) * self.length >= MIN_SHARED_TOKENS

    @property
    def offset(self) -> int:
        """Position of the first token that each row has for itself."""
        return self.length if self.is_shared else 0


@dataclass(slots=True, eq=False)
class _Active:
    """A row that is decoding."""

    row: Row
    group: _Group
    slot: int

    @property
    def own(self) -> int:
        """Own tokens that are kept: all but the last, which is fed next."""
        return self.group.length - self.group.offset + len(self.row.tokens) - 1

    @property
    def most(self) -> int:
        """Own tokens that it can come to."""
        return _most(self.row, self.group)


def _most(row: Row, group: _Group) -> int:
    return group.length - group.offset + row.max_tokens


class Batch:
    """Requests being completed."""

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        *,
        batch_tokens: int,
        packed: Packed | None = None,
    ) -> None:
        """Takes requests; nothing is computed yet.

        Args:
            engine: the fast path.
            requests: of any sessions.
            batch_tokens: prompt tokens that are read at once; the memory for keys and values grows
                with it, see `CACHE_BYTES_PER_TOKEN`.
            packed: weights laid out for the requests; None = the engine's own.
        """
        decoder = engine.decoder if packed is None else packed.decoder
        self._engine = engine
        self._decoder = decoder
        self._head = None if packed is None else packed.head
        self._batch_tokens = batch_tokens
        self._waiting = deque(_groups(requests))
        self._active: list[_Active] = []
        self._own = OwnTokens(decoder)
        token_bytes = (
            2 * len(decoder.layers) * decoder.num_kv_heads * decoder.head_dim
        ) * decoder.attention_dtype.itemsize
        self._max_kept = CACHE_BYTES_PER_TOKEN * batch_tokens // token_bytes
        """Tokens whose keys and values may be kept."""
        self._lineup: Lineup | None = None

    def steps(self) -> Iterator[None]:
        """Completes all rows; yields after each step, in which every row there takes a token."""
        while self._waiting or self._active:
            if self._active:
                self._step()
                self._leave()
            self._enter()
            self._leave()
            yield

    @torch.no_grad()
    def _enter(self) -> None:
        """Lets waiting rows in while there is room; each takes its first token."""
        entering: list[tuple[_Group, Row]] = []
        groups = dict.fromkeys(active.group for active in self._active)
        longest = max((active.most for active in self._active), default=0)
        while self._waiting:
            group = self._waiting[0]
            count = len(self._active) + len(entering) + 1
            longest = max(longest, _most(group.waiting[0], group))
            groups[group] = None
            kept = count * longest + sum(each.offset for each in groups)
            if count > 1 and (count > MAX_ROWS or kept > self._max_kept):
                break
            entering.append((group, group.waiting.popleft()))
            if not group.waiting:
                self._waiting.popleft()
        if entering:
            self._begin(entering)

    def _begin(self, entering: Sequence[tuple[_Group, Row]]) -> None:
        new = [group for group in dict.fromkeys(g for g, _ in entering) if group.logits is None]
        for chunk in _chunks(new, self._batch_tokens):
            beginnings, hidden = prefill(self._decoder, [group.prompt for group in chunk])
            logits = self._engine.logits(hidden, self._head)
            for number, (group, beginning) in enumerate(zip(chunk, beginnings, strict=True)):
                group.beginning, group.logits = beginning, logits[number]
        limit = self._rows_of_logits
        for first in range(0, len(entering), limit):
            part = entering[first : first + limit]
            draw_tokens(
                [row for _, row in part],
                torch.stack([group.logits for group, _ in part if group.logits is not None]),
            )
        staying = [(group, row) for group, row in entering if not row.finished]
        first = len(self._active)
        self._active.extend(
            _Active(row, group, first + i) for i, (group, row) in enumerate(staying)
        )
        if staying:
            self._reserve()
            self._lineup = None
        for active in self._active[first:]:
            if not active.group.is_shared:
                assert active.group.beginning is not None
                self._own.begin(active.slot, active.group.beginning)
        for group in dict.fromkeys(group for group, _ in entering):
            if not group.waiting:
                group.logits = None
                if not group.is_shared:
                    group.beginning = None

    @property
    def _rows_of_logits(self) -> int:
        """Rows whose logits exist at once."""
        return rows_at_once(self._engine.base.vocab_size)

    def _reserve(self) -> None:
        self._own.reserve(len(self._active), max(active.own for active in self._active) + 1)

    def _leave(self) -> None:
        """Takes finished rows out; the last slots move into theirs."""
        staying = [active for active in self._active if not active.row.finished]
        if len(staying) == len(self._active):
            return
        # What is not a number stays so when it is masked: the next row of the slot would meet it.
        self._own.clear([active.slot for active in self._active if active.row.broken])
        taken = {active.slot for active in staying}
        free = [slot for slot in range(len(staying)) if slot not in taken]
        beyond = [active for active in staying if active.slot >= len(staying)]
        moves: list[tuple[int, int]] = []
        for active, slot in zip(beyond, free, strict=True):
            moves.append((active.slot, slot))
            active.slot = slot
        self._own.move(moves, max((active.own for active in beyond), default=0))
        self._active = staying
        self._lineup = None

    @torch.no_grad()
    def _step(self) -> None:
        if self._lineup is None:
            self._active.sort(key=lambda active: active.group.number)
            self._lineup = _lineup(self._active)
        self._reserve()
        hidden = decode(
            self._own,
            self._lineup,
            np.array([active.row.tokens[-1] for active in self._active], np.int32),
            np.array([active.own for active in self._active], np.int32),
        )
        rows = [active.row for active in self._active]
        limit = self._rows_of_logits
        for first in range(0, len(rows), limit):
            part = slice(first, first + limit)
            draw_tokens(rows[part], self._engine.logits(hidden[part], self._head))


def serve(engine: Engine, requests: Sequence[Request], *, batch_tokens: int) -> None:
    """Completes requests: large ones each with weights laid out for it, the others together.

    Which way a request goes depends on the request alone, and so do the bits of its log-probs.

    Args:
        engine: the fast path.
        requests: of any sessions.
        batch_tokens: see `Batch`.
    """
    packs = can_pack(engine.decoder, engine.head_weight)
    together: list[Request] = []
    for request in requests:
        if not packs or request.adapter is None or request.num_tokens < MIN_TOKENS:
            together.append(request)
            continue
        packed = pack(engine.decoder, engine.head_weight, request.adapter)
        alone = Request(request.rows, packed.adapter)
        _complete(Batch(engine, [alone], batch_tokens=batch_tokens, packed=packed))
    _complete(Batch(engine, together, batch_tokens=batch_tokens))


def _complete(batch: Batch) -> None:
    for _ in batch.steps():
        pass


def _groups(requests: Sequence[Request]) -> list[_Group]:
    groups: list[_Group] = []
    for request in requests:
        by_prompt: dict[tuple[int, ...], _Group] = {}
        for row in request.rows:
            group = by_prompt.get(row.prompt)
            if group is None:
                prompt = Prompt(np.array(row.prompt, np.int32), request.adapter)
                group = by_prompt[row.prompt] = _Group(len(groups), prompt)
                groups.append(group)
            group.waiting.append(row)
            group.num_rows += 1
    return groups


def _chunks(groups: Sequence[_Group], max_tokens: int) -> Iterator[list[_Group]]:
    """Groups, in order, in parts of at most `max_tokens` prompt tokens or of a single group."""
    chunk: list[_Group] = []
    for group in groups:
        if chunk and sum(other.length for other in chunk) + group.length > max_tokens:
            yield chunk
            chunk = []
        chunk.append(group)
    if chunk:
        yield chunk


def _lineup(rows: Sequence[_Active]) -> Lineup:
    spans: list[AdapterSpan] = []
    shared: list[SharedRows] = []
    for first, stop in _runs([id(active.group.prompt.adapter) for active in rows]):
        spans.append(AdapterSpan(rows[first].group.prompt.adapter, Span(first, stop), ()))
    for first, stop in _runs([active.group.number for active in rows]):
        group = rows[first].group
        if group.is_shared:
            assert group.beginning is not None
            shared.append(SharedRows(Span(first, stop), group.beginning))
    return Lineup(
        slots=np.array([active.slot for active in rows], np.int32),
        offsets=np.array([active.group.offset for active in rows], np.int32),
        spans=tuple(spans),
        shared=tuple(shared),
    )


def _runs(keys: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Stretches of equal keys."""
    first = 0
    for number in range(1, len(keys) + 1):
        if number == len(keys) or keys[number] != keys[first]:
            yield first, number
            first = number
