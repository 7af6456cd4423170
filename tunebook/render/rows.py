"""Conversations, preference pairs and prompts to data, through the cache."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tunebook.config import Mask, OnBadRow, OnBlankAnswer, OnLongRow
from tunebook.data.rows import Kind
from tunebook.errors import ConfigError
from tunebook.render.cache import (
    ArrayWriter,
    Chunk,
    RenderedRows,
    new_directory,
    put_in_place,
    read_rendered,
    render_key,
    write_report,
)
from tunebook.render.chunks import render_chunks
from tunebook.render.fitting import Settings
from tunebook.render.prompts import no_template
from tunebook.render.report import Total, raise_problems, report_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tunebook.data.rows import Row

PROGRESS_EVERY_S = 0.1

Progress = Callable[[int, int], None]


def render_rows(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    *,
    mask: Mask,
    max_seq_len: int,
    on_long_row: OnLongRow,
    on_blank_answer: OnBlankAnswer,
    on_bad_row: OnBadRow,
    cache_dir: Path,
    progress: Progress | None = None,
    num_workers: int | None = None,
) -> RenderedRows:
    """The data of conversation rows: tokens, and a mask that says which of them carry loss.

    Args:
        max_seq_len: tokens of the longest datum.
        cache_dir: rendered rows are kept under `<cache_dir>/render/`.
        progress: called with (rows done, rows in all), at most ten times a second.
        num_workers: processes; None = one a core for many rows, none for few; 0 = none.

    Raises:
        ConfigError: the tokenizer has no chat template that can render these rows.
        DataError: rows that cannot be rendered, each with its location.
        NothingSupervisedError: no row has a token that carries loss.
    """
    settings = Settings(
        Kind.conversation, mask, max_seq_len, on_long_row, on_blank_answer, on_bad_row
    )
    return _render(rows, tokenizer, settings, cache_dir, progress, num_workers)


def render_pairs(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_seq_len: int,
    on_long_row: OnLongRow,
    on_blank_answer: OnBlankAnswer,
    on_bad_row: OnBadRow,
    cache_dir: Path,
    progress: Progress | None = None,
    num_workers: int | None = None,
) -> RenderedRows:
    """The data of preference rows, two a row: chosen, then rejected.

    The mask is 1 on the assistant's tokens of the answer, its end of turn included. A row keeps
    both of its data or neither. As `render_rows` otherwise.

    Args:
        max_seq_len: tokens of the longest datum.
        on_long_row: truncate = cut both sides on the right, and leave out pairs of which a side
            keeps no answer or which become equal; truncate_prompt = cut both prompts on the left by
            the same tokens, and leave out pairs whose answers are too long for that; skip; error.

    Raises:
        ConfigError: the tokenizer has no chat template that can render these rows.
        DataError: pairs that cannot be rendered or whose sides render to the same tokens, located.
        NothingSupervisedError: no pair is left.
    """
    settings = Settings(
        Kind.preference,
        Mask.all_assistant,
        max_seq_len,
        on_long_row,
        on_blank_answer,
        on_bad_row,
    )
    return _render(rows, tokenizer, settings, cache_dir, progress, num_workers)


def render_prompts(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int,
    on_long_row: OnLongRow,
    on_bad_row: OnBadRow,
    cache_dir: Path,
    progress: Progress | None = None,
    num_workers: int | None = None,
) -> RenderedRows:
    """The data of prompt rows, one a row: the tokens that a sampler is given, with mask 0.

    As `render_rows` otherwise.

    Args:
        max_tokens: of the longest prompt: what `max_seq_len` leaves beside the completion.
        on_long_row: truncate and skip = a longer prompt is left out, since one that is cut asks for
            something else; error.

    Raises:
        ConfigError: the tokenizer has no chat template that can render these rows.
        DataError: prompts that cannot be rendered, each with its location; or none is left.
    """
    settings = Settings(Kind.prompt, None, max_tokens, on_long_row, None, on_bad_row)
    return _render(rows, tokenizer, settings, cache_dir, progress, num_workers)


def _render(
    given: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    settings: Settings,
    cache_dir: Path,
    progress: Progress | None,
    num_workers: int | None,
) -> RenderedRows:
    _check(settings)
    rows = list(given)
    _require_template(rows, tokenizer)
    target = cache_dir / "render" / render_key(rows, tokenizer, settings.to_json())
    cached = read_rendered(target, rows)
    if cached is not None:
        if progress is not None:
            progress(len(rows), len(rows))
        return cached
    directory = new_directory(target)
    writer = ArrayWriter(directory)
    try:
        total = Total()
        chunks = render_chunks(rows, tokenizer, settings, num_workers)
        for chunk in _with_progress(chunks, len(rows), progress):
            writer.append(chunk.arrays)
            total.add(chunk)
        writer.close()
        raise_problems(total, rows, tokenizer, settings)
        report = report_of(total, rows, tokenizer, settings, writer.lengths)
        write_report(directory, report, total.problems)
        put_in_place(directory, target)
    finally:
        writer.abandon()
        shutil.rmtree(directory, ignore_errors=True)
    rendered = read_rendered(target, rows)
    assert rendered is not None
    return rendered


def _with_progress(
    chunks: Iterator[Chunk], num_rows: int, progress: Progress | None
) -> Iterator[Chunk]:
    done, told_at = 0, 0.0
    for chunk in chunks:
        yield chunk
        done += chunk.num_rows
        now = time.monotonic()
        if progress is not None and (now - told_at >= PROGRESS_EVERY_S or done == num_rows):
            progress(done, num_rows)
            told_at = now


def _check(settings: Settings) -> None:
    if settings.max_seq_len < 2 and settings.kind is not Kind.prompt:
        raise ConfigError(f"max_seq_len={settings.max_seq_len}: needs at least 2 tokens")
    if settings.max_seq_len < 1:
        raise ConfigError("max_seq_len: leaves no token for a prompt, beside its completion")
    cuts_prompts = settings.on_long_row is OnLongRow.truncate_prompt
    if cuts_prompts and settings.kind is not Kind.preference:
        raise ConfigError(
            "data.on_long_row=truncate_prompt: is for preference pairs only; "
            "set truncate, skip or error"
        )


def _require_template(rows: list[Row], tokenizer: PreTrainedTokenizerBase) -> None:
    if tokenizer.chat_template is None:
        for row in rows:
            if not row.plain:
                raise no_template(row, tokenizer)
