"""Rendering with the settings most tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tunebook.config import DataConfig, Mask, OnBadRow, OnBlankAnswer, OnLongRow, RowFormat
from tunebook.data.load import load_rows
from tunebook.data.rows import Kind, Row
from tunebook.render import RenderedRows, render_rows

CASES = Path(__file__).parents[1] / "inputs" / "cases"


@pytest.fixture
def render(tmp_path: Path) -> Callable[..., RenderedRows]:
    """`render_rows` with default settings and a cache of the test's own."""

    def call(rows: list[Row], tokenizer: Any, **settings: Any) -> RenderedRows:
        defaults: dict[str, Any] = {
            "mask": Mask.all_assistant,
            "max_seq_len": 4096,
            "on_long_row": OnLongRow.truncate,
            "on_blank_answer": OnBlankAnswer.error,
            "on_bad_row": OnBadRow.fail,
            "cache_dir": tmp_path,
        }
        return render_rows(rows, tokenizer, **{**defaults, **settings})

    return call


def case_rows(
    name: str, *, kind: Kind = Kind.conversation, on_bad_row: OnBadRow = OnBadRow.fail
) -> list[Row]:
    """The rows of a case file, loaded as a recipe loads them."""
    data = DataConfig(
        path=str(CASES / name),
        format=RowFormat.auto,
        mask=Mask.all_assistant,
        on_bad_row=on_bad_row,
        on_long_row=OnLongRow.truncate,
        on_blank_answer=OnBlankAnswer.error,
    )
    return load_rows(data, kind=kind).rows


def trained_text(rendered: RenderedRows, datum: int, tokenizer: Any) -> str:
    """The text of the tokens of a datum that carry loss."""
    item = rendered[datum]
    return tokenizer.decode(item.tokens[1:][item.mask != 0])
