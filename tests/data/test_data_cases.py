"""Every file of tests/inputs/cases, as far as loading decides what becomes of it."""

import json

import pytest

from tunebook.config import OnBadRow
from tunebook.data.duplicates import cross_split_duplicates
from tunebook.data.load import load_rows
from tunebook.data.rows import Kind
from tunebook.errors import DataError, EmptyDataError

OK_MESSAGES = [
    [("user", "Name a primary colour."), ("assistant", "Red.")],
    [("user", "日本の首都は?"), ("assistant", "東京です。")],
    [("user", "Fox and owl emoji?"), ("assistant", "🦊🦉")],
    [("user", "Übersetze: fjord"), ("assistant", "Fjord – schmale Bucht")],
]


def turns(row):
    return [(message["role"], message["content"]) for message in row.messages]


def problems_of(path, make_data, kind=Kind.conversation):
    """{line: (field, reason)} in the failing mode, after checking that skipping agrees."""
    with pytest.raises(DataError) as caught:
        load_rows(make_data(path), kind=kind)
    problems = caught.value.problems
    for problem in problems:
        assert str(problem) in str(caught.value)
        assert problem.file == str(path)
    skipped = load_rows(make_data(path, on_bad_row=OnBadRow.skip), kind=kind)
    assert skipped.problems == list(problems)
    assert len(skipped.rows) + len(problems) == skipped.num_read
    assert any(f"{len(problems)} bad rows" in warning for warning in skipped.warnings)
    return {problem.line: (problem.field, problem.reason) for problem in problems}, skipped


@pytest.mark.parametrize("name", ["ok_sft", "crlf", "bom", "utf16"])
def test_encodings_give_the_same_rows_and_fingerprint(name, cases, make_data):
    loaded = load_rows(make_data(cases / f"{name}.jsonl"), kind=Kind.conversation)
    assert [turns(row) for row in loaded.rows] == OK_MESSAGES
    assert [row.line for row in loaded.rows] == [1, 2, 3, 4]
    plain = load_rows(make_data(cases / "ok_sft.jsonl"), kind=Kind.conversation)
    assert loaded.fingerprint == plain.fingerprint
    assert loaded.sources[0].fingerprint == plain.sources[0].fingerprint
    text = json.dumps([row.to_json() for row in loaded.rows])
    assert "\\r" not in text and "\\ufeff" not in text


def test_access_by_index_equals_reading_in_order(cases, make_data):
    rows = load_rows(make_data(cases / "ok_sft.jsonl"), kind=Kind.conversation).rows
    again = load_rows(make_data(cases / "ok_sft.jsonl"), kind=Kind.conversation).rows
    assert [again[i] for i in (3, 0, 2, 1)] == [rows[3], rows[0], rows[2], rows[1]]


def test_malformed_lines_are_located_together(cases, make_data):
    path = cases / "malformed_line.jsonl"
    problems, loaded = problems_of(path, make_data)
    assert sorted(problems) == [3, 5, 6]
    assert "not valid JSON" in problems[3][1] and "conte" in problems[3][1]
    assert problems[5][1] == "row must be an object, this is a list"
    assert problems[6][1] == "row must be an object, this is a string"
    assert [row.line for row in loaded.rows] == [1, 2, 4, 7]


def test_empty_file_is_an_error_of_its_own(cases, make_data):
    path = cases / "empty.jsonl"
    with pytest.raises(EmptyDataError, match="0 rows in ") as caught:
        load_rows(make_data(path), kind=Kind.conversation)
    assert str(path) in str(caught.value)


def test_blank_lines_keep_physical_line_numbers(cases, make_data):
    loaded = load_rows(make_data(cases / "blank_lines.jsonl"), kind=Kind.conversation)
    assert [turns(row) for row in loaded.rows] == OK_MESSAGES[:3]
    assert [row.line for row in loaded.rows] == [2, 5, 7]


def test_null_keys_are_absent_keys(cases, make_data, tmp_path):
    problems, loaded = problems_of(cases / "nulls.jsonl", make_data)
    assert {line: field for line, (field, _) in problems.items()} == {
        2: "messages[1].content",
        3: "messages",
        4: "messages[0].content",
    }
    bare = tmp_path / "bare.jsonl"
    messages = [
        {"role": "user", "content": "Name a bird."},
        {"role": "assistant", "content": "Heron."},
    ]
    bare.write_text(json.dumps({"messages": messages}))
    other = load_rows(make_data(bare), kind=Kind.conversation).rows[0]
    assert loaded.rows[0].content_hash == other.content_hash
    assert loaded.rows[0].messages == other.messages == messages
    assert loaded.rows[0].tools is None


def test_blank_answers_are_left_to_the_renderer(cases, make_data):
    loaded = load_rows(make_data(cases / "blank_content.jsonl"), kind=Kind.conversation)
    assert [row.messages[1]["content"] for row in loaded.rows] == ["", " ", "\n", "ok"]


def test_tool_arguments_as_text_equal_tool_arguments_as_object(cases, make_data):
    as_text, as_object = load_rows(
        make_data(cases / "tool_calls_str.jsonl"), kind=Kind.conversation
    ).rows
    assert as_text.messages == as_object.messages
    assert as_text.content_hash == as_object.content_hash
    assert as_text.messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": {"city": "Bergen", "days": 2}},
            }
        ],
    }
    assert as_text.messages[2] == {
        "role": "tool",
        "content": '{"sky":"rain"}',
        "tool_call_id": "c1",
    }
    assert as_text.tools is not None
    assert as_text.tools[0]["function"]["name"] == "get_weather"


def test_content_parts_are_joined_and_images_refused(cases, make_data):
    problems, loaded = problems_of(cases / "content_parts.jsonl", make_data)
    field, reason = problems[3]
    assert field == "messages[0].content[1]"
    assert reason.startswith("image part with a text-only model")
    assert turns(loaded.rows[0]) == [("user", "Two words: red fox"), ("assistant", "red fox")]
    assert turns(loaded.rows[1]) == [("system", ""), ("user", "Hi"), ("assistant", "Hello")]


def test_surrogates(cases, make_data):
    problems, loaded = problems_of(cases / "surrogate.jsonl", make_data)
    assert list(problems) == [2]
    assert problems[2][0] == "messages[0].content"
    assert "lone surrogate \\ud83e" in problems[2][1]
    assert [row.messages[0]["content"] for row in loaded.rows] == ["pair 🦊 ok", "fine"]


def test_repeated_ids_and_rows_are_named(cases, make_data):
    path = cases / "dup_ids.jsonl"
    loaded = load_rows(make_data(path), kind=Kind.conversation)
    assert [row.id for row in loaded.rows] == ["a1", "a2", "a1", "a2"]
    conflict, repeats = loaded.warnings
    assert conflict == f"ids with more than one content: 1 (a1 at {path}:1, {path}:3)"
    assert repeats.startswith("1 row repeats an earlier row exactly; it is kept")


def test_equal_text_has_equal_content_hash(cases, make_data):
    rows = load_rows(
        make_data(cases / "dup_rows.jsonl", group_column="doc"), kind=Kind.conversation
    ).rows
    assert len(rows) == 20
    by_id = {row.id: row for row in rows}
    assert by_id["r03"].content_hash == by_id["r17"].content_hash
    assert len({row.content_hash for row in rows}) == 19
    assert [row.group for row in rows[:4]] == ["d01", "d01", "d02", "d02"]
    report = cross_split_duplicates(rows[:10], rows[10:])
    assert [(one.id, two.id) for one, two in report.exact] == [("r17", "r03")]
    assert report.normalised == ()


def test_long_rows_load_whole(cases, make_data):
    rows = load_rows(make_data(cases / "long_row.jsonl"), kind=Kind.conversation).rows
    assert len(rows) == 4


def test_weights_say_what_is_trained(cases, make_data):
    (row,) = load_rows(make_data(cases / "weights.jsonl"), kind=Kind.conversation).rows
    marks = [message.get("trained") for message in row.messages]
    assert marks == [None, False, None, False, None, True]


def test_odd_roles(cases, make_data):
    problems, loaded = problems_of(cases / "roles_odd.jsonl", make_data)
    assert problems[4] == (
        "messages[1].role",
        "is 'bot'; must be one of system, user, assistant, tool",
    )
    assert problems[5][0] == "messages"
    assert [[role for role, _ in turns(row)] for row in loaded.rows] == [
        ["system", "user", "assistant"],
        ["user", "user", "assistant"],
        ["user", "assistant", "user"],
    ]


def test_reasoning_is_kept_and_a_closing_tag_alone_is_split(cases, make_data):
    first, second = load_rows(
        make_data(cases / "thinking_multiturn.jsonl"), kind=Kind.conversation
    ).rows
    assert first.messages[1] == {
        "role": "assistant",
        "content": "12",
        "reasoning_content": "three fours are twelve",
    }
    assert first.messages[3]["reasoning_content"] == "twelve over two"
    assert second.messages[1] == {
        "role": "assistant",
        "content": "2",
        "reasoning_content": "one and one",
    }


def test_implicit_prompt_is_the_shared_beginning(cases, make_data):
    implicit, explicit = load_rows(
        make_data(cases / "pref_implicit_prompt.jsonl"), kind=Kind.preference
    ).rows
    assert turns(implicit) == [
        ("user", "Pick a fruit."),
        ("assistant", "Pear."),
        ("user", "Why?"),
    ]
    assert implicit.chosen == [{"role": "assistant", "content": "It is sweet."}]
    assert implicit.rejected == [{"role": "assistant", "content": "No."}]
    for name in ("messages", "chosen", "rejected", "content_hash", "plain"):
        assert getattr(implicit, name) == getattr(explicit, name)


def test_identical_sides_are_refused_also_after_stripping(cases, make_data):
    problems, loaded = problems_of(cases / "pref_identical.jsonl", make_data, Kind.preference)
    assert list(problems) == [1, 2]
    assert "identical" in problems[1][1]
    assert "only in white space" in problems[2][1]
    (row,) = loaded.rows
    assert (row.line, row.plain) == (3, True)
    assert (row.chosen[0]["content"], row.rejected[0]["content"]) == ("Yes.", "No.")


def test_bad_preference_rows(cases, make_data):
    problems, loaded = problems_of(cases / "pref_bad_rows.jsonl", make_data, Kind.preference)
    assert loaded.num_read == 6 and len(loaded.problems) == 5
    expected = {
        2: ("samples[0].score", "graded scores"),
        3: ("samples", "2 of score 1"),
        4: ("samples", "must be a list"),
        5: ("rejected", "missing"),
        6: ("", "no known format: the columns are foo"),
    }
    assert {line: field for line, (field, _) in problems.items()} == {
        line: field for line, (field, _) in expected.items()
    }
    for line, (_, words) in expected.items():
        assert words in problems[line][1]
    (row,) = loaded.rows
    assert turns(row) == [("user", "Rate tea.")]
    assert row.chosen == [{"role": "assistant", "content": "Good."}]
    assert row.rejected == [{"role": "assistant", "content": "Bad."}]
