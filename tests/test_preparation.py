"""Rows loaded, split and frozen: what decides the side of a row, and what is said about it."""

import json

import pytest

from tunebook.compose import compose
from tunebook.data.ledger import dataset_key, write_ledger
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


@pytest.mark.parametrize("min_rows", [0, 1, 8])
def test_a_share_below_one_row_is_said(tmp_path, min_rows):
    """No eval.min_rows makes a row of 0.05 of 10 rows."""
    path = rows_file(tmp_path / "rows.jsonl", 10)
    [warning] = prepared(data__path=path, eval__min_rows=min_rows).warnings
    assert "0.05 of 10 rows is less than one row" in warning
    assert "Raise eval.fraction" in warning and "min_rows" not in warning


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


def user(text):
    return [{"role": "user", "content": text}]


def assistant(text):
    return [{"role": "assistant", "content": text}]


SPELLINGS = [
    (
        Kind.conversation,
        lambda n: {"prompt": f"Say {n}.", "completion": f"{n}"},
        lambda n: {"messages": user(f"Say {n}.") + assistant(f"{n}")},
    ),
    (
        Kind.conversation,
        lambda n: {"prompt": f"Say {n}.", "completion": [{**assistant(f"{n}")[0], "weight": 1}]},
        lambda n: {"messages": user(f"Say {n}.") + assistant(f"{n}")},
    ),
    (
        Kind.preference,
        lambda n: {"prompt": f"Say {n}.", "chosen": f"{n}", "rejected": "no"},
        lambda n: {
            "prompt": user(f"Say {n}."), "chosen": assistant(f"{n}"), "rejected": assistant("no")
        },
    ),
    (
        Kind.prompt,
        lambda n: {"prompt": f"Say {n}.", "answer": n},
        lambda n: {"messages": user(f"Say {n}."), "answer": n},
    ),
]  # fmt: skip


def spelled(tmp_path, kind, *spellings, count=20, **overrides):
    """A config over `count` rows in each spelling, a file a spelling."""
    sources = []
    for number, spelling in enumerate(spellings):
        path = tmp_path / f"spelling{number}.jsonl"
        path.write_text("".join(json.dumps(spelling(n)) + "\n" for n in range(count)))
        sources.append({"path": str(path)})
    recipe = {Kind.conversation: "sft", Kind.preference: "dpo", Kind.prompt: "grpo"}[kind]
    values = {"data": "mixture", "data.sources": sources, "eval.fraction": 0.2, "eval.min_rows": 1}
    return compose(recipe, values | overrides)


@pytest.mark.parametrize(("kind", "one", "other"), SPELLINGS)
def test_two_spellings_of_a_row_share_a_side(tmp_path, kind, one, other):
    """Kind of case 37: prompt and completion, or the same turns as messages."""
    rows = prepare_rows(spelled(tmp_path, kind, one, other), kind=kind)
    assert len(rows.eval) == 8
    lines = [row.line for row in rows.eval]
    assert all(lines.count(line) == 2 for line in lines)
    assert rows.split["exact_duplicates_across"] == 0


@pytest.mark.parametrize(("kind", "one", "other"), SPELLINGS)
def test_a_duplicate_in_another_spelling_is_exact(tmp_path, kind, one, other):
    path = tmp_path / "held_out.jsonl"
    path.write_text(json.dumps(other(3)) + "\n")
    config = spelled(tmp_path, kind, one, **{"data.eval.path": str(path)})
    rows = prepare_rows(config, kind=kind)
    assert rows.split["exact_duplicates_across"] == 1


@pytest.mark.parametrize(("kind", "one", "other"), SPELLINGS)
def test_a_file_rewritten_in_another_spelling_sits_the_same_exam(tmp_path, kind, one, other):
    config = spelled(tmp_path, kind, one)
    rows = prepare_rows(config, kind=kind)
    remember_split(rows, config)
    again = prepare_rows(spelled(tmp_path, kind, other), kind=kind)
    assert [row.line for row in again.eval] == [row.line for row in rows.eval]
    assert "20 rows keep the side" in again.split["rule"]


def test_prompts_with_other_columns_are_other_rows(tmp_path):
    config = spelled(tmp_path, Kind.prompt, lambda n: {"prompt": "Play.", "board": n})
    assert len(prepare_rows(config, kind=Kind.prompt).eval) == 4


def test_rows_that_a_ledger_knows_by_their_spelling_do_not_move(tmp_path):
    """A ledger that put two spellings of a row on both sides is kept, and the duplicates said."""
    kind, one, other = SPELLINGS[0]
    config = spelled(tmp_path, kind, one, other)
    rows = prepare_rows(config, kind=kind)
    every = sorted([*rows.train, *rows.eval], key=lambda row: (row.source, row.line))
    sides = ["eval" if row.line <= 4 and row.source == 0 else "train" for row in every]
    names = [f"content:{row.content_hash}" for row in every]
    key = dataset_key(config.data, fraction=0.2, min_rows=1, max_rows=512)
    write_ledger(key, dict(zip(names, sides, strict=True)))
    again = prepare_rows(config, kind=kind)
    assert [(row.source, row.line) for row in again.eval] == [(0, line) for line in (1, 2, 3, 4)]
    assert again.split["exact_duplicates_across"] == 4
    remember_split(again, config)
    assert list(prepare_rows(config, kind=kind).eval) == list(again.eval)


def test_a_secret_in_the_system_prompt_is_refused(monkeypatch):
    monkeypatch.setenv("MY_SERVICE_API_KEY", "correct-horse-battery-42")
    with pytest.raises(
        ConfigError, match=r"data\.system_prompt holds the value of a secret"
    ) as raised:
        prepared(data__system_prompt="Use correct-horse-battery-42 to log in.")
    assert "correct-horse" not in str(raised.value)
