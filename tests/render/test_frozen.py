"""Rendered rows that a run keeps: linked or copied, whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.render import templates as t
from tunebook.config import OnBadRow
from tunebook.render import RenderedRows, link_rendered, read_frozen

FILES = {
    *("tokens.npy", "mask.npy", "lengths.npy", "rows.npy", "supervised.npy", "truncated.npy"),
    "report.json",
}


@pytest.fixture
def rows():
    """Three rows; the second cannot be rendered with the template of `rendered`."""
    return [
        t.make_row(t.chat("Hi", "Hello"), line=1),
        t.make_row(t.chat("Hi", "Hello")[::-1], line=2),
        t.make_row(t.chat("a", "b", "c", "d"), line=3),
    ]


@pytest.fixture
def rendered(render, rows) -> RenderedRows:
    return render(rows, t.byte_level(t.GEMMA), on_bad_row=OnBadRow.skip)


def assert_same(left: RenderedRows, right: RenderedRows) -> None:
    assert left.report == right.report
    assert len(left) == len(right) == 2
    for a, b in zip(left, right, strict=True):
        assert (a.row, a.truncated) == (b.row, b.truncated)
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.mask, b.mask)


def test_frozen_rows_are_links_and_read_back_equal(rendered, rows, tmp_path):
    target = tmp_path / "runs" / "a" / "tokens"
    link_rendered(rendered, target)
    assert {path.name for path in target.iterdir()} == FILES
    assert all((target / name).samefile(rendered.directory / name) for name in FILES)
    frozen = read_frozen(target, rows)
    assert frozen is not None
    assert frozen.directory == target
    assert [(p.line, p.field) for p in frozen.report.problems] == [(2, "messages[0].role")]
    assert_same(frozen, rendered)


def test_frozen_rows_outlive_the_cache(rendered, rows, tmp_path):
    expected = [item.tokens.tolist() for item in rendered]
    link_rendered(rendered, tmp_path / "kept")
    for path in rendered.directory.iterdir():
        path.unlink()
    frozen = read_frozen(tmp_path / "kept", rows)
    assert frozen is not None
    assert [item.tokens.tolist() for item in frozen] == expected


def test_where_links_cannot_be_made_the_files_are_copied(rendered, rows, tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    target = tmp_path / "kept"
    link_rendered(rendered, target)
    assert not any((target / name).samefile(rendered.directory / name) for name in FILES)
    frozen = read_frozen(target, rows)
    assert frozen is not None
    assert_same(frozen, rendered)


def test_a_folder_that_stood_there_is_replaced_and_nothing_else_is_left(rendered, rows, tmp_path):
    target = tmp_path / "runs" / "kept"
    target.mkdir(parents=True)
    (target / "report.json").write_text("{")
    assert read_frozen(target, rows) is None
    assert (target / "report.json").read_text() == "{"
    link_rendered(rendered, target)
    link_rendered(rendered, target)
    frozen = read_frozen(target, rows)
    assert frozen is not None
    link_rendered(frozen, target)
    assert_same(frozen, rendered)
    assert [path.name for path in target.parent.iterdir()] == ["kept"]


def test_a_failed_link_leaves_nothing(rendered, rows, tmp_path):
    (rendered.directory / "mask.npy").unlink()
    target = tmp_path / "runs" / "kept"
    with pytest.raises(FileNotFoundError):
        link_rendered(rendered, target)
    assert list(target.parent.iterdir()) == []
    assert read_frozen(target, rows) is None


@pytest.mark.parametrize("name", sorted(FILES))
@pytest.mark.parametrize("damage", ["gone", "empty", "short"])
def test_a_damaged_folder_is_not_read(rendered, rows, tmp_path, name, damage):
    target: Path = tmp_path / "kept"
    link_rendered(rendered, target)
    content = (target / name).read_bytes()
    (target / name).unlink()
    if damage != "gone":
        (target / name).write_bytes(b"" if damage == "empty" else content[:-1])
    assert read_frozen(target, rows) is None
    assert target.is_dir()


def test_other_rows_are_not_what_was_frozen(rendered, rows, tmp_path):
    link_rendered(rendered, tmp_path / "kept")
    assert read_frozen(tmp_path / "kept", [*rows, rows[0]]) is None
    assert read_frozen(tmp_path / "kept", rows[:2]) is None
