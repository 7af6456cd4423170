"""The frozen data of a run: equal to what was loaded, paged after the source is gone, tamper-proof."""

import json
from dataclasses import replace

import pytest

from tunebook.data.load import load_rows
from tunebook.data.rows import Kind, Row
from tunebook.data.snapshot import page_snapshot, read_manifest, read_snapshot, write_snapshot
from tunebook.errors import ConfigError, DataError


@pytest.fixture
def frozen(tmp_path, make_data):
    """A snapshot of 60 training and 3 eval rows, its source deleted."""
    source = tmp_path / "source.jsonl"
    with source.open("w", encoding="utf-8") as file:
        for i in range(63):
            values = {
                "messages": [
                    {"role": "user", "content": f"Frage {i} über Füchse"},
                    {"role": "assistant", "content": f"answer {i}", "reasoning": f"because {i}"},
                ],
                "topic": ["Even", "Odd"][i % 2],
            }
            file.write(json.dumps(values) + "\n")
    rows = load_rows(make_data(source), kind=Kind.conversation).rows
    directory = tmp_path / "run" / "data"
    fingerprint = write_snapshot(
        directory, train=rows[:60], eval=rows[60:], manifest={"sources": ["x"], "skipped": []}
    )
    source.unlink()
    return directory, rows, fingerprint


def test_rows_come_back_equal(frozen):
    directory, rows, fingerprint = frozen
    snapshot = read_snapshot(directory)
    assert snapshot.train == rows[:60]
    assert snapshot.eval == rows[60:]
    assert snapshot.fingerprint == fingerprint == snapshot.manifest["fingerprint"]
    assert snapshot.manifest["rows"] == {"train": 60, "eval": 3}
    assert snapshot.manifest["sources"] == ["x"]
    assert sorted(path.name for path in directory.iterdir()) == [
        "eval.jsonl",
        "manifest.json",
        "train.jsonl",
    ]
    line = json.loads((directory / "eval.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert (line["split"], line["line"], line["file"]) == ("eval", 61, rows[60].file)


@pytest.mark.parametrize(
    "case", ["pref_implicit_prompt", "tool_calls_str", "weights", "thinking_multiturn"]
)
def test_every_kind_of_row_survives(case, cases, make_data, tmp_path):
    kind = Kind.preference if case.startswith("pref") else Kind.conversation
    rows = load_rows(make_data(cases / f"{case}.jsonl"), kind=kind).rows
    write_snapshot(tmp_path / "data", train=rows, eval=[], manifest={})
    again = read_snapshot(tmp_path / "data").train
    assert again == rows
    assert [repr(row) for row in again] == [repr(row) for row in rows]


def test_fingerprint_follows_content_order_and_split(frozen, tmp_path):
    _, rows, fingerprint = frozen

    def written(train, held_out):
        return write_snapshot(tmp_path / "other", train=train, eval=held_out, manifest={})

    assert written(rows[:60], rows[60:]) == fingerprint
    assert written(rows[1:60] + rows[:1], rows[60:]) != fingerprint
    assert written(rows[:59], rows[59:]) != fingerprint
    assert written(rows[:60], []) != fingerprint


def test_pages_tile_the_split(frozen):
    directory, rows, _ = frozen
    first = page_snapshot(directory)
    assert (len(first.rows), first.total, first.next_offset) == (25, 60, 25)
    seen, offset = [], 0
    while offset is not None:
        page = page_snapshot(directory, split="train", offset=offset, limit=7)
        assert page.indices == list(range(offset, offset + len(page.rows)))
        seen += page.rows
        offset = page.next_offset
    assert seen == rows[:60]
    assert page_snapshot(directory, split="eval").rows == rows[60:]
    assert page_snapshot(directory, offset=60).rows == []


@pytest.mark.parametrize(
    ("search", "indices"),
    [
        ("ANSWER 7", [7]),
        ("fÜCHSE", list(range(60))),
        ("because 1", [1, *range(10, 20)]),
        ("odd", list(range(1, 60, 2))),
        ("nowhere", []),
    ],
)
def test_search_looks_through_text_and_columns_whatever_the_case(search, indices, frozen):
    page = page_snapshot(frozen[0], search=search, limit=200)
    assert page.indices == indices
    assert page.total is None and page.next_offset is None
    second = page_snapshot(frozen[0], search=search, offset=1, limit=2)
    assert second.indices == indices[1:3]
    assert second.next_offset == (3 if len(indices) > 3 else None)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"split": "test"}, "split=test: must be one of train, eval"),
        ({"limit": 0}, "limit=0"),
        ({"limit": 201}, "between 1 and 200"),
        ({"offset": -1}, "offset=-1"),
    ],
)
def test_questions_out_of_range(settings, words, frozen):
    with pytest.raises(ConfigError) as caught:
        page_snapshot(frozen[0], **settings)
    assert words in str(caught.value)


def test_an_edited_row_is_found_out(frozen):
    directory, _, _ = frozen
    path = directory / "train.jsonl"
    path.write_bytes(path.read_bytes().replace(b"answer 7", b"answer 8", 1))
    for read in (read_snapshot, page_snapshot):
        with pytest.raises(DataError, match=r"train\.jsonl was changed after the run froze"):
            read(directory)
    assert len(page_snapshot(directory, split="eval").rows) == 3


def test_an_edited_manifest_is_found_out(frozen):
    directory, _, _ = frozen
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "fingerprint": "0" * 32}))
    with pytest.raises(DataError, match=r"manifest\.json was changed"):
        read_snapshot(directory)
    for text in ("{", "[]", '{"rows": {}}', '{"rows": 3, "sha256": 4}'):
        path.write_text(text)
        with pytest.raises(DataError, match=r"manifest\.json was changed"):
            read_manifest(directory)


def test_an_incomplete_snapshot_is_none(frozen):
    directory, _, _ = frozen
    (directory / "eval.jsonl").unlink()
    with pytest.raises(DataError, match=r"eval\.jsonl is missing"):
        read_snapshot(directory)
    (directory / "manifest.json").unlink()
    with pytest.raises(DataError, match="no complete snapshot"):
        page_snapshot(directory)


def test_a_failed_write_leaves_the_old_snapshot(frozen):
    directory, rows, _ = frozen

    def failing():
        yield rows[0]
        raise RuntimeError("stop")

    class Failing(list):
        def __iter__(self):
            return failing()

    with pytest.raises(RuntimeError, match="stop"):
        write_snapshot(directory, train=Failing(), eval=[], manifest={})
    assert read_snapshot(directory).train == rows[:60]
    assert len(list(directory.iterdir())) == 3


def test_rows_frozen_without_a_text_hash_are_read(tmp_path, make_data):
    """Runs that an earlier version prepared can go on."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    [row] = load_rows(make_data(path), kind=Kind.conversation).rows
    assert row.text_hash != row.content_hash
    values = row.to_json()
    del values["text_hash"]
    assert Row.from_json(values) == replace(row, text_hash=row.content_hash)
