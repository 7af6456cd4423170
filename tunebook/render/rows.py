"""Conversation rows to data, through the cache."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tunebook.config import Mask, OnBadRow, OnBlankAnswer, OnLongRow
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
from tunebook.render.chunks import (
    Settings,
    render_chunks,
)
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
    if max_seq_len < 2:
        raise ConfigError(f"max_seq_len={max_seq_len}: needs at least 2 tokens")
    rows = list(rows)
    _require_template(rows, tokenizer)
    settings = Settings(mask, max_seq_len, on_long_row, on_blank_answer, on_bad_row)
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


def _require_template(rows: list[Row], tokenizer: PreTrainedTokenizerBase) -> None:
    if tokenizer.chat_template is None:
        for row in rows:
            if not row.plain:
                raise no_template(row, tokenizer)
