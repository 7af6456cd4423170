"""Rows loaded, split and frozen: what decides the side of a row, and what is said about it."""

import json

import pytest

from tunebook.compose import compose
from tunebook.data.rows import Kind
from tunebook.data.snapshot import write_snapshot
from tunebook.errors import ConfigError
from tunebook.preparation import prepare_rows, remember_split, rows_of_run

DUPLICATES = "tests/inputs/cases/dup_rows.jsonl"


def prepared(**overrides):
    values = {"eval.min_rows": 1}
    values.update({key.replace("__", "."): value for key, value in overrides.items()})
    return prepare_rows(compose("sft", values), kind=Kind.conversation)


def ids(rows):
    return {row.id for row in rows}


@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.3, 0.4, 0.5])
@pytest.mark.parametrize("seed", [0, 1])
def test_identical_rows_share_a_side(fraction, seed):
    """Case 37: r03 and r17 hold the same text; the seed has no say in the split."""
    rows = prepared(data__path=DUPLICATES, eval__fraction=fraction, seed=seed)
    assert len(rows.eval) == 20 * fraction
    assert ("r03" in ids(rows.eval)) == ("r17" in ids(rows.eval))
    assert ids(rows.train) | ids(rows.eval) == {f"r{n:02d}" for n in range(1, 21)}
    assert rows.split["exact_duplicates_across"] == 0
    assert rows.split == prepared(data__path=DUPLICATES, eval__fraction=fraction).split


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.5])
def test_a_group_stays_together(fraction):
    """Case 37 with a group column."""
    rows = prepared(data__path=DUPLICATES, eval__fraction=fraction, data__group_column="doc")
    docs_of_eval = {row.group for row in rows.eval}
    assert docs_of_eval.isdisjoint({row.group for row in rows.train})
    assert ("r03" in ids(rows.eval)) == ("r17" in ids(rows.eval))
    assert rows.eval


def test_one_row_and_a_share_that_takes_it():
    """Case 39: both numbers, and what to do."""
    with pytest.raises(ConfigError, match=r"1 usable rows, of which 1 are held out.*at least 2"):
        prepared(data__path=DUPLICATES, data__limit=1, eval__fraction=1.0)


@pytest.mark.parametrize(("fraction", "expected"), [(0.2, 1), (0.1, 0), (0, 0)])
def test_five_rows(fraction, expected):
    """Case 39 with the exact rule of the design: floor(5 * 0.2) = 1, floor(5 * 0.1) = 0."""
    rows = prepared(data__path=DUPLICATES, data__limit=5, eval__fraction=fraction)
    assert (len(rows.train), len(rows.eval)) == (5 - expected, expected)


def test_a_near_duplicate_across_the_split_is_reported(tmp_path):
    train, held_out = tmp_path / "train.jsonl", tmp_path / "eval.jsonl"
    for path, question in ((train, "What is two?"), (held_out, "what  is TWO")):
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "2"}]
        path.write_text(json.dumps({"messages": turns}) + "\n")
    rows = prepared(data__path=str(train), data__eval__path=str(held_out))
    assert rows.split["normalised_duplicates_across"] == 1
    assert any(f"{held_out}:1" in warning for warning in rows.warnings)


def test_frozen_rows_read_back_equal(tmp_path):
    rows = prepared(data__path=DUPLICATES, eval__fraction=0.2)
    write_snapshot(tmp_path, train=rows.train, eval=rows.eval, manifest=rows.manifest)
    again = rows_of_run(tmp_path, split=rows.split)
    assert list(again.train) == list(rows.train)
    assert list(again.eval) == list(rows.eval)
    assert again.source_weights == rows.source_weights


def test_a_source_without_a_length_needs_a_number_of_steps():
    """Case 36: refused before any model is loaded; with max_steps its rows are taken."""
    function = "tests.test_preparation.endless_rows"
    values = {"data": "function", "data.function": function}
    with pytest.raises(ConfigError, match=r"plan\.max_steps"):
        prepare_rows(compose("sft", values), kind=Kind.conversation)
    values |= {"plan.epochs": None, "plan.max_steps": 5, "plan.batch_size": 4}
    assert len(prepare_rows(compose("sft", values), kind=Kind.conversation).train) == 20


def endless_rows():
    number = 0
    while True:
        number += 1
        yield {"prompt": f"Say {number}.", "completion": str(number)}


def rows_file(path, count, **extra):
    lines = []
    for number in range(count):
        turns = [
            {"role": "user", "content": f"Say {number}."},
            {"role": "assistant", "content": str(number), **extra},
        ]
        lines.append(json.dumps({"messages": turns}))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_too_few_rows_for_an_eval_split_are_said_and_not_remembered(tmp_path):
    path = rows_file(tmp_path / "rows.jsonl", 60)
    config = compose("sft", {"data.path": path})
    rows = prepare_rows(config, kind=Kind.conversation)
    assert len(rows.eval) == 0
    [warning] = rows.warnings
    assert "0.05 of 60 rows is less than eval.min_rows=8" in warning
    remember_split(rows, config)
    rows_file(tmp_path / "rows.jsonl", 240)
    grown = prepare_rows(config, kind=Kind.conversation)
    assert any(row.line <= 60 for row in grown.eval)  # the first 60 rows are not shut out
    assert "keep the side" not in grown.split["rule"]


def test_a_look_at_the_first_rows_decides_nothing(tmp_path):
    """A limited source is another dataset than the whole of it."""
    path = rows_file(tmp_path / "rows.jsonl", 100)
    whole = compose("sft", {"data.path": path, "eval.fraction": 0.1, "eval.min_rows": 1})
    before = prepare_rows(whole, kind=Kind.conversation)
    peek = compose(
        "sft", {"data.path": path, "eval.fraction": 0.1, "eval.min_rows": 1, "data.limit": 20}
    )
    remember_split(prepare_rows(peek, kind=Kind.conversation), peek)
    assert list(prepare_rows(whole, kind=Kind.conversation).eval) == list(before.eval)


def test_remembered_rows_are_counted_in_the_rule(tmp_path):
    path = rows_file(tmp_path / "rows.jsonl", 20)
    config = compose("sft", {"data.path": path, "eval.fraction": 0.1, "eval.min_rows": 1})
    rows = prepare_rows(config, kind=Kind.conversation)
    assert "2 rows held out" in rows.split["rule"] and "keep the side" not in rows.split["rule"]
    remember_split(rows, config)
    again = prepare_rows(config, kind=Kind.conversation)
    assert "20 rows keep the side" in again.split["rule"]
    assert list(again.eval) == list(rows.eval)


@pytest.mark.parametrize("fraction", [0.3, 0.5])
def test_the_same_text_with_another_weight_stays_on_one_side(tmp_path, fraction):
    """Kind of case 37: what is trained of a row does not make it another question."""
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    rows_file(one, 10)
    rows_file(two, 10, weight=1)
    config = compose(
        "sft",
        {
            "data": "mixture",
            "data.sources": [{"path": str(one)}, {"path": str(two)}],
            "eval.fraction": fraction,
            "eval.min_rows": 1,
        },
    )
    rows = prepare_rows(config, kind=Kind.conversation)
    assert len(rows.eval) == 20 * fraction
    lines = [row.line for row in rows.eval]
    assert all(lines.count(line) == 2 for line in lines)


def test_a_secret_in_the_system_prompt_is_refused(monkeypatch):
    monkeypatch.setenv("MY_SERVICE_API_KEY", "correct-horse-battery-42")
    with pytest.raises(
        ConfigError, match=r"data\.system_prompt holds the value of a secret"
    ) as raised:
        prepared(data__system_prompt="Use correct-horse-battery-42 to log in.")
    assert "correct-horse" not in str(raised.value)
