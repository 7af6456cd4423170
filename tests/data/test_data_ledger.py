"""The split ledger: stable names, nothing moves, no lost writes, damage is said."""

import json
import subprocess
import sys

import pytest

from tunebook.config import OnBadRow, SourceConfig
from tunebook.data.ledger import dataset_key, ledger_path, read_ledger, write_ledger
from tunebook.errors import DataError

EXAM = {"fraction": 0.05, "min_rows": 8, "max_rows": 512}


def test_key_names_places_not_contents(tmp_path, monkeypatch, make_data):
    path = tmp_path / "rows.jsonl"
    path.write_text("one")
    key = dataset_key(make_data(path), **EXAM)
    path.write_text("another")
    monkeypatch.chdir(tmp_path)
    assert dataset_key(make_data("rows.jsonl"), **EXAM) == key
    assert dataset_key(make_data(f"{tmp_path}/./rows.jsonl"), **EXAM) == key
    same = {
        "columns": {"a": "b"},
        "system_prompt": "s",
        "on_bad_row": OnBadRow.skip,
        "weight": 2.0,
    }
    assert dataset_key(make_data(path, **same), **EXAM) == key
    assert dataset_key(make_data(path, limit=5), **EXAM) != key


def test_key_changes_with_the_exam(tmp_path, make_data):
    path = tmp_path / "rows.jsonl"
    keys = [
        dataset_key(make_data(path), **EXAM),
        dataset_key(make_data(tmp_path / "other.jsonl"), **EXAM),
        dataset_key(make_data(path, id_column="id"), **EXAM),
        dataset_key(make_data(path, group_column="id"), **EXAM),
        dataset_key(make_data(path), **{**EXAM, "fraction": 0.1}),
        dataset_key(make_data(path), **{**EXAM, "min_rows": 9}),
        dataset_key(make_data(path), **{**EXAM, "max_rows": 9}),
        dataset_key(make_data(hub="a/b"), **EXAM),
        dataset_key(make_data(hub="a/b", split="test"), **EXAM),
        dataset_key(make_data(hub="a/b", subset="s"), **EXAM),
        dataset_key(make_data(function="a.b"), **EXAM),
        dataset_key(make_data(function="a.b", function_args={"n": 1}), **EXAM),
    ]
    assert len(set(keys)) == len(keys)
    assert dataset_key(make_data(hub="a/b", revision="v2"), **EXAM) == keys[7]
    assert dataset_key(make_data(hub="a/b", split="train"), **EXAM) == keys[7]


def test_order_of_sources_does_not_matter(make_data):
    sources = [SourceConfig(hub="a/b"), SourceConfig(hub="c/d", weight=3.0)]
    one = dataset_key(make_data(sources=sources), **EXAM)
    assert dataset_key(make_data(sources=sources[::-1]), **EXAM) == one
    assert dataset_key(make_data(sources=sources[:1]), **EXAM) != one


def test_what_was_assigned_stays(home):
    assert read_ledger("k") == {}
    assert write_ledger("k", {"a": "eval", "b": "train"}) == {"a": "eval", "b": "train"}
    merged = write_ledger("k", {"a": "train", "c": "eval"})
    assert merged == {"a": "eval", "b": "train", "c": "eval"}
    assert read_ledger("k") == merged
    assert read_ledger("other") == {}
    assert ledger_path("k") == home / "ledgers" / "k.json"


def test_an_unchanged_ledger_is_not_rewritten(home):
    write_ledger("k", {"a": "eval"})
    before = ledger_path("k").stat()
    write_ledger("k", {"a": "train"})
    after = ledger_path("k").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


WRITER = """
import sys
from tunebook.data.ledger import write_ledger
name = sys.argv[1]
for i in range(20):
    write_ledger("k", {f"{name}-{i}": "eval", f"shared-{i}": "train" if name == "a" else "eval"})
"""


def test_concurrent_writers_lose_nothing(home):
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, name]) for name in "abc"]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0, 0]
    ledger = read_ledger("k")
    assert len(ledger) == 3 * 20 + 20
    assert all(ledger[f"{name}-{i}"] == "eval" for name in "abc" for i in range(20))
    names = {path.name for path in (home / "ledgers").iterdir()}
    assert names - {"k.json.lock"} == {"k.json"}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"assignments": 3}',
        json.dumps({"assignments": {"a": "test"}}).encode(),
        json.dumps({"assignments": {"a": ["eval"]}}).encode(),
    ],
)
def test_damage_is_said_and_not_overwritten(content, home):
    write_ledger("k", {"a": "eval"})
    ledger_path("k").write_bytes(content)
    for use in (lambda: read_ledger("k"), lambda: write_ledger("k", {"b": "train"})):
        with pytest.raises(DataError) as caught:
            use()
        assert str(ledger_path("k")) in str(caught.value) and "delete it" in str(caught.value)
    assert ledger_path("k").read_bytes() == content
