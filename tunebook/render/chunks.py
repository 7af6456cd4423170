"""The data of many rows, in this process or in a pool: the same function either way."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tunebook.config import Mask, OnBadRow, OnBlankAnswer, OnLongRow
from tunebook.render.cache import (
    Chunk,
)
from tunebook.render.chat_template import ChatTemplate, chat_template_of
from tunebook.render.codec import Codec
from tunebook.render.conversation import (
    Unusable,
)
from tunebook.render.placing import (
    Placed,
    place_plain,
    place_row,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tunebook.data.rows import Row

ROWS_PER_CHUNK = 64
ROWS_WORTH_A_POOL = 2000
CHARACTERS_WORTH_A_POOL = 4_000_000

NOTHING_SUPERVISED = "nothing_supervised"
NO_TARGET_AFTER_TRUNCATION = "no_target_after_truncation"
TOO_LONG = "too_long"
BAD_ROW = "bad_row"


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything but rows and tokenizer that decides what is rendered."""

    mask: Mask
    max_seq_len: int
    on_long_row: OnLongRow
    on_blank_answer: OnBlankAnswer
    on_bad_row: OnBadRow

    def to_json(self) -> dict[str, Any]:
        """The settings as JSON values."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class _Job:
    rows: Sequence[Row]
    codec: Codec
    template: ChatTemplate | None
    settings: Settings


_job: _Job | None = None


def render_chunks(
    rows: list[Row],
    tokenizer: PreTrainedTokenizerBase,
    settings: Settings,
    num_workers: int | None,
) -> Iterator[Chunk]:
    template = None if tokenizer.chat_template is None else chat_template_of(tokenizer)
    codec = Codec(tokenizer) if template is None else template.codec
    job = _Job(rows, codec, template, settings)
    parts = [
        range(start, min(start + ROWS_PER_CHUNK, len(rows)))
        for start in range(0, len(rows), ROWS_PER_CHUNK)
    ]
    workers = _num_workers(rows) if num_workers is None else num_workers
    if workers < 2:
        return (_render_chunk(job, part) for part in parts)
    return _pooled_chunks(job, parts, workers)


def _num_workers(rows: list[Row]) -> int:
    characters = sum(len(message["content"]) for row in rows for message in row.messages)
    if len(rows) < ROWS_WORTH_A_POOL and characters < CHARACTERS_WORTH_A_POOL:
        return 0
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _pooled_chunks(job: _Job, parts: list[range], workers: int) -> Iterator[Chunk]:
    """Chunks in order. Few are under way at a time, so the results never pile up in memory."""
    method = "fork" if sys.platform == "linux" else "spawn"
    context = multiprocessing.get_context(method)
    with (
        _quiet_fork(),
        ProcessPoolExecutor(
            workers, mp_context=context, initializer=_start_worker, initargs=(job,)
        ) as pool,
    ):
        waiting: deque[Future[Chunk]] = deque()
        try:
            for part in parts:
                waiting.append(pool.submit(_render_in_worker, part))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


@contextmanager
def _quiet_fork() -> Iterator[None]:
    """No complaint of tokenizers or Python about the fork: workers call neither its thread pool nor
    torch."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
            yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def _start_worker(job: _Job) -> None:
    global _job
    _job = job


def _render_in_worker(part: range) -> Chunk:
    assert _job is not None
    return _render_chunk(_job, part)


def _render_chunk(job: _Job, part: range) -> Chunk:
    """The data of some rows. A row that cannot be rendered is a problem in the chunk."""
    chunk = Chunk(len(part), {}, [], [], [], {}, 0, 0, [])
    counts: Counter[str] = Counter()
    tokens: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    lengths: list[int] = []
    owners: list[int] = []
    supervised: list[int] = []
    truncated: list[bool] = []
    for row in part:
        try:
            placed = _place(job, job.rows[row])
        except Unusable as problem:
            chunk.problems.append((row, problem.field, problem.reason))
            continue
        kept, reason = _fit(placed, row, job.settings, chunk)
        if not kept:
            chunk.dropped.append((row, reason))
            continue
        chunk.lost_data += len(placed) - len(kept)
        for item, is_cut in kept:
            mask = np.asarray(item.mask, dtype=np.float32)
            mask[0] = 0
            tokens.append(np.asarray(item.tokens, dtype=np.int32))
            masks.append(mask)
            lengths.append(len(item.tokens))
            owners.append(row)
            supervised.append(int(np.count_nonzero(mask)))
            truncated.append(is_cut)
            chunk.blank_answers += sum(span.end_only for span in item.draft.spans)
        chunk.special_texts += [(row, text) for text in written_specials(job.codec, job.rows[row])]
        counts.update({item.draft.method.value for item, _ in kept})
        counts.update({fix.value for item, _ in kept for fix in item.draft.fixes})
    chunk.counts = dict(counts)
    chunk.arrays = {
        "tokens": np.concatenate(tokens) if tokens else np.zeros(0, dtype=np.int32),
        "mask": np.concatenate(masks) if masks else np.zeros(0, dtype=np.float32),
        "lengths": np.asarray(lengths, dtype=np.int32),
        "rows": np.asarray(owners, dtype=np.int32),
        "supervised": np.asarray(supervised, dtype=np.int32),
        "truncated": np.asarray(truncated, dtype=np.bool_),
    }
    return chunk


def _place(job: _Job, row: Row) -> list[Placed]:
    settings = job.settings
    blanks_allowed = settings.on_blank_answer is OnBlankAnswer.end_token
    if job.template is None:
        return place_plain(job.codec, row, mask=settings.mask, blanks_allowed=blanks_allowed)
    return place_row(job.template, row, mask=settings.mask, blanks_allowed=blanks_allowed)


def written_specials(codec: Codec, row: Row) -> list[str]:
    """The texts of special tokens in the messages and tools of a row, which no one can tell from
    those that the template prints."""
    found: set[str] = set()
    for message in row.messages:
        content = message["content"]
        if row.plain and message is row.messages[-1]:
            # A plain completion may end in the end token.
            content = content.removesuffix(str(codec.tokenizer.eos_token))
        found |= codec.special_texts_in(content)
        found |= codec.special_texts_in(message.get("reasoning_content", ""))
        if message.get("tool_calls"):
            found |= codec.special_texts_in(json.dumps(message["tool_calls"], ensure_ascii=False))
    if row.tools:
        found |= codec.special_texts_in(json.dumps(row.tools, ensure_ascii=False))
    return sorted(found)


def _fit(
    placed: list[Placed], row: int, settings: Settings, chunk: Chunk
) -> tuple[list[tuple[Placed, bool]], str]:
    """The data that can be trained on, each with whether it was cut, and why there is none."""
    kept: list[tuple[Placed, bool]] = []
    reason = NOTHING_SUPERVISED
    for item in placed:
        if not any(item.mask[1:]):
            continue
        if len(item.tokens) <= settings.max_seq_len:
            kept.append((item, False))
            continue
        if settings.on_long_row is OnLongRow.error:
            chunk.too_long.append(
                (row, f"is {len(item.tokens)} tokens long, more than max_seq_len")
            )
        if settings.on_long_row is not OnLongRow.truncate:
            reason = TOO_LONG
            continue
        cut = replace(
            item,
            tokens=item.tokens[: settings.max_seq_len],
            mask=item.mask[: settings.max_seq_len],
        )
        if any(cut.mask[1:]):
            kept.append((cut, True))
        else:
            reason = NO_TARGET_AFTER_TRUNCATION
    return kept, reason
