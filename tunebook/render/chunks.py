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
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tunebook.config import OnBlankAnswer
from tunebook.data.rows import Kind
from tunebook.render.cache import (
    Chunk,
)
from tunebook.render.chat_template import ChatTemplate, Message, chat_template_of
from tunebook.render.codec import Codec
from tunebook.render.conversation import (
    Unusable,
)
from tunebook.render.fitting import Fit, Settings, fit_conversation, fit_pair, fit_prompt
from tunebook.render.pairs import place_pair
from tunebook.render.placing import place_plain, place_row
from tunebook.render.prompts import place_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tunebook.data.rows import Row

ROWS_PER_CHUNK = 64
ROWS_WORTH_A_POOL = 2000
CHARACTERS_WORTH_A_POOL = 4_000_000


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
    characters = sum(len(message["content"]) for row in rows for message in all_messages(row))
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
            fit = _data_of(job, job.rows[row])
        except Unusable as problem:
            chunk.problems.append((row, problem.field, problem.reason))
            continue
        chunk.too_long += [(row, reason) for reason in fit.refused]
        if fit.left_out is not None:
            chunk.dropped.append((row, fit.left_out))
            continue
        chunk.lost_data += fit.num_lost
        for datum in fit.data:
            mask = np.asarray(datum.mask, dtype=np.float32)
            mask[0] = 0
            tokens.append(np.asarray(datum.tokens, dtype=np.int32))
            masks.append(mask)
            lengths.append(len(datum.tokens))
            owners.append(row)
            supervised.append(int(np.count_nonzero(mask)))
            truncated.append(datum.truncated)
            chunk.blank_answers += datum.blank_answers
        chunk.special_texts += [(row, text) for text in written_specials(job.codec, job.rows[row])]
        counts.update({words for datum in fit.data for words in datum.words})
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


def _data_of(job: _Job, row: Row) -> Fit:
    return _DATA_OF_KIND[job.settings.kind](job, row)


def _conversation_data(job: _Job, row: Row) -> Fit:
    mask = job.settings.mask
    assert mask is not None
    blanks_allowed = job.settings.on_blank_answer is OnBlankAnswer.end_token
    if job.template is None:
        placed = place_plain(job.codec, row, mask=mask, blanks_allowed=blanks_allowed)
    else:
        placed = place_row(job.template, row, mask=mask, blanks_allowed=blanks_allowed)
    return fit_conversation(placed, job.settings)


def _pair_data(job: _Job, row: Row) -> Fit:
    blanks_allowed = job.settings.on_blank_answer is OnBlankAnswer.end_token
    pair = place_pair(job.template, job.codec, row, blanks_allowed=blanks_allowed)
    bos_id = job.codec.tokenizer.bos_token_id
    return fit_pair(pair, job.settings, bos_id=bos_id if isinstance(bos_id, int) else None)


def _prompt_data(job: _Job, row: Row) -> Fit:
    prompt = place_prompt(job.template, job.codec, row.messages, row.tools)
    if not prompt.tokens:
        raise Unusable("prompt", "is empty, so there is nothing to sample an answer from")
    return fit_prompt(prompt, job.settings)


_DATA_OF_KIND = {
    Kind.conversation: _conversation_data,
    Kind.preference: _pair_data,
    Kind.prompt: _prompt_data,
}


def all_messages(row: Row) -> list[Message]:
    """The messages of a row: of a preference, those of the prompt and of both answers."""
    return [*row.messages, *row.chosen, *row.rejected]


def written_specials(codec: Codec, row: Row) -> list[str]:
    """The texts of special tokens in the messages and tools of a row, which no one can tell from
    those that the template prints."""
    found: set[str] = set()
    for message in all_messages(row):
        content = message["content"]
        if row.plain and message["role"] == "assistant":
            # A plain completion may end in the end token.
            content = content.removesuffix(str(codec.tokenizer.eos_token))
        found |= codec.special_texts_in(content)
        found |= codec.special_texts_in(message.get("reasoning_content", ""))
        if message.get("tool_calls"):
            found |= codec.special_texts_in(json.dumps(message["tool_calls"], ensure_ascii=False))
    if row.tools:
        found |= codec.special_texts_in(json.dumps(row.tools, ensure_ascii=False))
    return sorted(found)
