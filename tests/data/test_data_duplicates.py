"""Duplicates across the split, exact and normalised."""

import json

import pytest

from tunebook.data.duplicates import cross_split_duplicates, normalised_text
from tunebook.data.load import load_rows
from tunebook.data.rows import Kind


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("What is  Red?", "what is\nred", True),
        ("“Hello,” she said.", '"hello" she said', True),
        ("\uff21bc", "abc", True),
        ("cafe\u0301", "caf\u00e9", True),
        ("STRASSE", "straße", True),
        ("3.5", "35", False),
        ("3 * 4", "3 / 4", False),
        ("-5", "5", False),
        ("🦊", "🦉", False),
        ("", "...", True),
    ],
)
def test_normalised_text(one, other, same):
    assert (normalised_text(one) == normalised_text(other)) is same


def test_report_across_the_split(tmp_path, make_data):
    def row(prompt, answer, **columns):
        return {"prompt": prompt, "completion": answer, **columns}

    def load(name, rows):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_rows(make_data(path), kind=Kind.conversation).rows

    train = load("train.jsonl", [row("a?", "1"), row("A!", "1"), row("b", "2"), row("c", "3")])
    held_out = load(
        "eval.jsonl", [row("b", "2", id="x"), row("a", "1."), row("c", "4"), row("d", "5")]
    )
    report = cross_split_duplicates(train, held_out)
    assert [(one.line, two.line) for one, two in report.exact] == [(1, 3)]
    assert [(one.line, two.line) for one, two in report.normalised] == [(2, 1)]
    exact, normalised = report.lines()
    assert exact == (
        f"exact duplicates across the split: 1 (eval = train: {tmp_path}/eval.jsonl:1 = "
        f"{tmp_path}/train.jsonl:3)"
    )
    assert "punctuation across the split: 1 (" in normalised
    clean = cross_split_duplicates(train[3:], held_out[3:])
    assert clean.lines()[0] == "exact duplicates across the split: 0"


def test_a_prompt_on_both_sides_counts_whatever_its_columns(tmp_path, make_data):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "2+2?", "answer": "4"}\n{"prompt": "2+2?", "answer": "four"}\n')
    one, other = load_rows(make_data(path), kind=Kind.prompt).rows
    report = cross_split_duplicates([one], [other])
    assert (len(report.exact), len(report.normalised)) == (0, 1)


def test_a_message_moved_from_prompt_to_answer_is_another_row(tmp_path, make_data):
    rows = [
        {"prompt": "p", "chosen": "a", "rejected": "b"},
        {"prompt": "p", "chosen": "b", "rejected": "a"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    one, other = load_rows(make_data(path), kind=Kind.preference).rows
    report = cross_split_duplicates([one], [other])
    assert report.exact == report.normalised == ()
