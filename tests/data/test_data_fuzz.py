"""Whatever stands in a row, loading gives rows or a DataError, and what loads can be frozen."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tunebook.config import OnBadRow
from tunebook.data.duplicates import normalised_key
from tunebook.data.load import load_rows
from tunebook.data.rows import Kind
from tunebook.data.snapshot import read_snapshot, write_snapshot
from tunebook.errors import DataError

TEXT = st.text(st.characters(exclude_categories=[]), max_size=8) | st.sampled_from(
    [
        *("", " ", "</think>x", "<think>", "user", "assistant", "[]", "{}", "[1]", "\ud83e"),
        *('{"a": 1}', '[{"role": "user", "content": "a"}]', "{'from': 'human', 'value': 'a'}"),
    ]
)
KEYS = st.sampled_from(
    [
        "role",
        "content",
        "from",
        "value",
        "weight",
        "train",
        "name",
        "tool_calls",
        "tool_call_id",
        "function",
        "arguments",
        "reasoning",
        "type",
        "text",
        "score",
        "id",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | TEXT, inner, max_size=4),
    max_leaves=8,
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "tool", "system"]) | JSON,
        "content": TEXT | JSON,
    },
    optional={
        "tool_calls": JSON,
        "weight": JSON,
        "reasoning_content": JSON,
        "name": JSON,
        "tool_call_id": JSON,
    },
)
TURNS = st.lists(MESSAGE, max_size=4) | JSON
ROW = st.fixed_dictionaries(
    {},
    optional={
        "messages": TURNS,
        "conversations": TURNS,
        "prompt": TURNS | TEXT,
        "completion": TURNS | TEXT,
        "chosen": TURNS | TEXT,
        "rejected": TURNS | TEXT,
        "samples": st.lists(JSON, max_size=3) | JSON,
        "tools": JSON,
        "system": JSON,
        "id": JSON,
        "answer": JSON,
    },
)


def load_or_none(path, make_data, kind, **settings):
    try:
        return load_rows(make_data(path, **settings), kind=kind)
    except DataError as error:
        assert str(error)
        return None


@pytest.mark.parametrize("kind", list(Kind))
@settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    derandomize=True,
    database=None,
)
@given(rows=st.lists(ROW | JSON, min_size=1, max_size=4))
def test_arbitrary_values_never_raise_anything_else(rows, kind, tmp_path: Path, make_data):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    strict = load_or_none(path, make_data, kind)
    loose = load_or_none(path, make_data, kind, on_bad_row=OnBadRow.skip)
    if strict is not None:
        assert loose is not None and loose.rows == strict.rows
    if loose is None:
        return
    assert loose.num_read == len(rows)
    assert len({row.line for row in loose.rows}) + len(loose.problems) == len(rows)
    for row in loose.rows:
        assert normalised_key(row)
    write_snapshot(tmp_path / "data", train=loose.rows, eval=[], manifest={})
    assert read_snapshot(tmp_path / "data").train == loose.rows


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
    database=None,
)
@given(
    content=st.binary(max_size=60)
    | st.lists(
        st.sampled_from(
            [
                b'{"prompt": "a", "completion": "b"}',
                b"\n",
                b"\r",
                b",",
                b"[",
                b"]",
                b'"',
                b"\xff",
                b"\x00",
                b"\xff\xfe",
                b"\xef\xbb\xbf",
                b"{",
                b"a,b",
                b"prompt,completion",
            ]
        ),
        max_size=8,
    ).map(b"".join),
    name=st.sampled_from(["r.jsonl", "r.json", "r.csv", "r.tsv", "r.parquet", "r.jsonl.gz"]),
)
def test_arbitrary_bytes_never_raise_anything_else(content, name, tmp_path: Path, make_data):
    path = tmp_path / name
    path.write_bytes(content)
    load_or_none(path, make_data, Kind.conversation)
