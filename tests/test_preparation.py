"""Rows loaded, split and frozen: what decides the side of a row, and what is said about it."""

import json

import pytest

from tunebook.compose import compose
from tunebook.data.rows import Kind
from tunebook.errors import ConfigError
from tunebook.preparation import freeze_rows, prepare_rows, rows_of_run

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
    freeze_rows(rows, tmp_path)
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
