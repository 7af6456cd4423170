"""What each format and each spelling of a message becomes, and how bad rows are refused."""

import csv
import json

import pytest

from tunebook.config import Mask, OnBadRow, RowFormat
from tunebook.data.load import load_rows
from tunebook.data.rows import Kind
from tunebook.errors import ConfigError, DataError, NoTextError

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}


@pytest.fixture
def load(tmp_path, make_data):
    """Loads rows given as Python values."""

    def load(*values, kind=Kind.conversation, **settings):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
        return load_rows(make_data(path, **settings), kind=kind)

    return load


@pytest.fixture
def problem(load):
    """The only problem of one row."""

    def problem(value, kind=Kind.conversation, **settings):
        with pytest.raises(DataError) as caught:
            load(value, kind=kind, **settings)
        (found,) = caught.value.problems
        assert found.line == 1
        return found.field, found.reason

    return problem


def answer(**fields):
    return {"messages": [USER, {"role": "assistant", "content": "x", **fields}]}


def test_plain_prompt_and_completion(load):
    (row,) = load({"prompt": "a", "completion": "b", "answer": 3}).rows
    assert row.messages == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    assert (row.num_prompt, row.plain, row.columns) == (1, True, {"answer": 3})


def test_message_lists_as_prompt_and_completion(load):
    (row,) = load({"prompt": [USER, ANSWER, USER], "completion": ANSWER}).rows
    assert row.messages == [USER, ANSWER, USER, ANSWER]
    assert (row.num_prompt, row.plain) == (3, False)


def test_prompt_rows_keep_their_answer_columns(load):
    rows = load(
        {"prompt": "2+2?", "answer": "4", "level": None},
        {"messages": [USER], "answer": "5"},
        {"prompt": [USER], "answer": "6", "id": 7},
        kind=Kind.prompt,
    ).rows
    assert [row.columns for row in rows] == [
        {"answer": "4"},
        {"answer": "5"},
        {"answer": "6", "id": 7},
    ]
    assert [row.plain for row in rows] == [True, False, False]
    assert rows[1].messages == rows[2].messages == [USER]
    assert rows[2].id == "7"


def test_prompt_hash_covers_answers_but_not_identity(load):
    rows = load(
        {"prompt": "q", "answer": "1", "id": "a", "doc": "x"},
        {"prompt": "q", "answer": "1", "id": "b", "doc": "y"},
        {"prompt": "q", "answer": "2", "id": "c", "doc": "x"},
        kind=Kind.prompt,
        group_column="doc",
    ).rows
    assert rows[0].content_hash == rows[1].content_hash != rows[2].content_hash


def test_a_prompt_must_leave_the_answer_open(problem):
    assert problem({"prompt": [USER, ANSWER]}, kind=Kind.prompt)[0] == "prompt"


def test_preference_strings_and_repeated_prompts(load):
    rows = load(
        {"prompt": "p", "chosen": "a", "rejected": "b"},
        {
            "prompt": "Hi",
            "chosen": [USER, ANSWER],
            "rejected": [USER, {"role": "assistant", "content": "Go away"}],
        },
        {"prompt": [USER], "chosen": "a", "rejected": "b"},
        kind=Kind.preference,
    ).rows
    assert [row.plain for row in rows] == [True, False, False]
    assert rows[1].messages == [USER] and rows[1].chosen == [ANSWER]
    assert rows[2].chosen == [{"role": "assistant", "content": "a"}]


def test_several_rejected_samples_are_pairs_that_stay_together(load):
    row = {
        "id": "s",
        "messages": [USER],
        "samples": [
            {"content": "bad", "score": 0},
            {"content": "good", "score": 1},
            {"content": "worse", "score": 0.0},
        ],
    }
    loaded = load(row, kind=Kind.preference)
    first, second = loaded.rows
    assert [one.rejected[0]["content"] for one in (first, second)] == ["bad", "worse"]
    assert first.chosen == second.chosen == [{"role": "assistant", "content": "good"}]
    assert first.group is not None and first.group == second.group
    assert (first.line, second.line, loaded.num_read, loaded.warnings) == (1, 1, 1, [])


@pytest.mark.parametrize(
    ("row", "field", "words"),
    [
        ({"chosen": [USER, ANSWER], "rejected": [USER]}, "rejected", "only the beginning"),
        ({"chosen": [USER], "rejected": [USER, ANSWER]}, "chosen", "only the beginning"),
        ({"chosen": "a", "rejected": "b"}, "prompt", "is missing"),
        ({"chosen": [USER, ANSWER], "rejected": [ANSWER]}, "prompt", "do not begin with"),
        (
            {"prompt": "p", "chosen": [USER, ANSWER], "rejected": "b"},
            "chosen",
            "is not the prompt's",
        ),
        ({"prompt": "Hi", "chosen": [USER], "rejected": "b"}, "chosen", "no answer"),
        ({"prompt": "p", "chosen": [ANSWER, USER], "rejected": "b"}, "chosen", "ends with a user"),
        ({"prompt": "p", "chosen": 3, "rejected": "b"}, "chosen", "is a number"),
        ({"prompt": "p", "rejected": "b"}, "chosen", "is missing"),
        (
            {
                "chosen": [USER, ANSWER, USER, ANSWER],
                "rejected": [USER, ANSWER, {"role": "user", "content": "?"}, ANSWER],
            },
            "chosen",
            "starts with a user message after the prompt",
        ),
        (
            {"prompt": "p", "samples": [{"content": "a", "score": 1}]},
            "samples",
            "0 of score 0",
        ),
        (
            {
                "prompt": "p",
                "samples": [{"content": "a", "score": 1}, {"content": "a", "score": 0}],
            },
            "samples",
            "identical",
        ),
        ({"prompt": "p", "samples": [{"content": "a"}]}, "samples[0].score", "missing"),
        ({"prompt": "p", "samples": [{"content": "a", "score": True}]}, "samples[0].score", "true"),
        ({"prompt": "p", "samples": ["a"]}, "samples[0]", "is a string"),
    ],
)
def test_bad_preferences(row, field, words, problem):
    found, reason = problem(row, kind=Kind.preference)
    assert found == field and words in reason


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"content": 3}, "messages[1].content", "is a number"),
        ({"content": [{"type": "audio"}]}, "messages[1].content[0]", "audio part"),
        ({"content": [{"type": "text"}]}, "messages[1].content[0].text", "is null"),
        ({"content": [{"type": "code", "text": "x"}]}, "messages[1].content[0].type", "'code'"),
        ({"content": [3]}, "messages[1].content[0]", "is a number"),
        ({"role": ["user"]}, "messages[1].role", "must be one of"),
        ({"weight": "yes"}, "messages[1].weight", '"yes"'),
        ({"weight": 2}, "messages[1].weight", "is 2"),
        ({"weight": -0.5}, "messages[1].weight", "is -0.5"),
        ({"trainable": "no"}, "messages[1].trainable", "must be 0, 1"),
        ({"weight": 0, "train": True}, "messages[1]", "disagree"),
        ({"loss": False}, "messages[1].loss", "weight"),
        ({"function_call": {"name": "f"}}, "messages[1].function_call", "tool_calls"),
        ({"name": 3}, "messages[1].name", "must be a string"),
        ({"reasoning": "a", "thinking": "b"}, "messages[1]", "differ"),
        ({"reasoning": 3}, "messages[1].reasoning", "must be a string"),
        (
            {"reasoning": "a", "content": "<think>b</think>c"},
            "messages[1].content",
            "differs from the message's",
        ),
        ({"tool_calls": {"name": "f"}}, "messages[1].tool_calls", "must be a list"),
        ({"tool_calls": ["f"]}, "messages[1].tool_calls[0]", "must be an object"),
        ({"tool_calls": [{"function": "f"}]}, "messages[1].tool_calls[0].function", "an object"),
        (
            {"tool_calls": [{"function": {"arguments": {}}}]},
            "messages[1].tool_calls[0].function.name",
            "is null",
        ),
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": "{'a': 1}"}}]},
            "messages[1].tool_calls[0].function.arguments",
            "not valid JSON",
        ),
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
            "messages[1].tool_calls[0].function.arguments",
            "is a list",
        ),
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": '{"a": "\\ud83e"}'}}]},
            "messages[1].tool_calls[0].function.arguments.a",
            "lone surrogate",
        ),
    ],
)
def test_bad_messages(fields, field, words, problem):
    found, reason = problem(answer(**fields))
    assert found == field and words in reason


@pytest.mark.parametrize(
    ("row", "field", "words"),
    [
        ({"messages": [USER]}, "messages", "no assistant message"),
        ({"messages": "not json"}, "messages", "not a JSON list"),
        ({"messages": 3}, "messages", "must be a string or a list"),
        ({"messages": ["x"]}, "messages[0]", "must be an object"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "is missing"),
        ({"messages": [{**USER, "tool_calls": [{"name": "f"}]}]}, "messages[0].tool_calls", "user"),
        ({"conversations": [{"from": "bot", "value": "x"}]}, "conversations[0].from", "'bot'"),
        ({**answer(), "tools": {"a": 1}}, "tools", "must be a list"),
        ({**answer(), "tools": [{"a": 1}]}, "tools[0]", "not a tool schema"),
        ({**answer(), "tools": "[{]"}, "tools", "not a JSON list"),
        ({"prompt": "a", "completion": [USER]}, "completion", "no assistant message"),
        ({"prompt": [], "completion": "x"}, "prompt", "is empty"),
        ({"messages": None}, "messages", "is null"),
        ({"a": 1, "b": None}, "", "the columns are a."),
    ],
)
def test_bad_conversations(row, field, words, problem):
    found, reason = problem(row)
    assert found == field and words in reason


@pytest.mark.parametrize(
    ("value", "trained"),
    [(0, False), (1, True), (0.0, False), (True, True), (False, False), (0.25, 0.25), (None, None)],
)
@pytest.mark.parametrize("key", ["weight", "trainable", "train"])
def test_marks_of_what_is_trained(key, value, trained, load):
    (row,) = load(answer(**{key: value})).rows
    assert row.messages[1].get("trained") is trained or row.messages[1]["trained"] == trained
    assert type(row.messages[1].get("trained")) is type(trained)


@pytest.mark.parametrize(
    ("content", "reasoning", "rest"),
    [
        ("<think>\nwhy\n</think>\n\n2", "why", "2"),
        ("why</think>2", "why", "2"),
        ("</think>\n\n2", None, "2"),
        ("<think>\n\n</think>\n\n2", None, "<think>\n\n</think>\n\n2"),
        ("the tag <think> ends with </think>", None, "the tag <think> ends with </think>"),
        ("<think>never closed", None, "<think>never closed"),
        ("2", None, "2"),
    ],
)
def test_think_tags(content, reasoning, rest, load):
    (row,) = load(answer(content=content)).rows
    assert row.messages[1].get("reasoning_content") == reasoning
    assert row.messages[1]["content"] == rest


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_spellings_of_reasoning(key, load):
    rows = load(answer(**{key: "why"}), answer(content="<think>why</think>x")).rows
    assert rows[0].messages == rows[1].messages
    assert rows[0].messages[1]["reasoning_content"] == "why"


def test_sharegpt(load):
    (row,) = load(
        {
            "system": "Be brief.",
            "tools": '[{"name": "add", "parameters": {}}]',
            "conversations": [
                {"from": "human", "value": "1+1?"},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                {"from": "observation", "value": "2"},
                {"from": "gpt", "value": "2", "weight": 0.5},
            ],
        }
    ).rows
    assert row.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
            ],
        },
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "2", "trained": 0.5},
    ]
    assert row.tools == [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    assert row.columns == {}


SYSTEM = {"role": "system", "content": "Be brief."}
PROMPT = [SYSTEM, {"role": "user", "content": "p"}]


@pytest.mark.parametrize(
    ("row", "kind", "messages"),
    [
        ({"messages": [USER, ANSWER]}, Kind.conversation, [SYSTEM, USER, ANSWER]),
        ({"messages": [SYSTEM, USER, ANSWER]}, Kind.conversation, [SYSTEM, USER, ANSWER]),
        (
            {"prompt": "p", "completion": "c"},
            Kind.conversation,
            [*PROMPT, {"role": "assistant", "content": "c"}],
        ),
        ({"prompt": "p", "chosen": "a", "rejected": "b"}, Kind.preference, PROMPT),
        (
            {"chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "content": "No"}]},
            Kind.preference,
            [SYSTEM, USER],
        ),
        (
            {
                "prompt": "p",
                "samples": [{"content": "a", "score": 1}, {"content": "b", "score": 0}],
            },
            Kind.preference,
            PROMPT,
        ),
        ({"prompt": "p", "answer": "4"}, Kind.prompt, PROMPT),
        ({"messages": [USER]}, Kind.prompt, [SYSTEM, USER]),
    ],
)
def test_a_system_column_goes_first_in_every_format(row, kind, messages, load):
    loaded = load({"system": "Be brief.", **row}, {"system": "", **row}, kind=kind)
    first, empty = loaded.rows
    assert first.messages == messages
    if row.get("messages", [None])[0] != SYSTEM:
        assert empty.messages == messages[1:]
    if "completion" in row:
        assert (first.num_prompt, empty.num_prompt) == (2, 1)
    assert "system" not in first.columns and "system" not in empty.columns
    assert not any("nothing reads" in warning for warning in loaded.warnings)


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_a_system_column_beside_another_system_message_is_refused(key, load, problem):
    row = {"system": "Be kind.", key: [SYSTEM, USER, ANSWER]}
    assert problem(row) == (
        "system",
        "is a second system message beside that of the messages; keep one",
    )
    with pytest.raises(ConfigError, match="1 of 1 rows already have a system message"):
        load({"system": "Be kind.", "prompt": "a", "completion": "b"}, system_prompt="Be brief.")


def test_columns_that_nothing_reads_are_named_once(load, tmp_path):
    row = {"prompt": "a", "input": "x", "id": 1, "key": 2, "doc": "d", "note": None}
    pair = {"chosen": "b", "rejected": "c", "score_chosen": 2}
    named = f"columns of {tmp_path / 'rows.jsonl'} that nothing reads: "
    columns = {"id_column": "key", "group_column": "doc"}
    sft = load(
        {**row, "completion": "b"}, {**row, "key": 3, "completion": "b", "lang": "en"}, **columns
    )
    assert sft.warnings[0] == named + "input, lang"
    dpo = load({**row, **pair}, kind=Kind.preference, **columns)
    assert dpo.warnings == [named + "input, score_chosen"]
    assert load({**row, "answer": "4"}, kind=Kind.prompt, **columns).warnings == []


def test_functions_are_the_old_form_of_tools(load, problem):
    schemas = [{"name": "add", "parameters": {}}]
    for value in (schemas, json.dumps(schemas)):
        field, reason = problem({**answer(), "functions": value})
        assert field == "functions" and "data.columns={tools: functions}" in reason
    (row,) = load({**answer(), "functions": schemas}, columns={"tools": "functions"}).rows
    assert row.tools == [{"type": "function", "function": schemas[0]}]
    (row,) = load({"prompt": "a", "functions": ["f(x)"]}, kind=Kind.prompt).rows
    assert row.columns == {"functions": ["f(x)"]}
    assert load({**answer(), "functions": []}).rows[0].tools is None


@pytest.mark.parametrize("dumps", [json.dumps, lambda value: json.dumps(value, indent=2)])
@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"prompt": [USER], "completion": [ANSWER]}, Kind.conversation),
        ({"prompt": USER, "completion": ANSWER}, Kind.conversation),
        ({"prompt": "p", "completion": [{"from": "gpt", "value": "v"}]}, Kind.conversation),
        (
            {
                "prompt": [USER],
                "completion": [{"role": "assistant", "tool_calls": [{"name": "f"}]}],
            },
            Kind.conversation,
        ),
        (
            {"chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "content": "No"}]},
            Kind.preference,
        ),
        ({"prompt": [USER], "chosen": [USER, ANSWER], "rejected": "No"}, Kind.preference),
        ({"prompt": [USER], "answer": [USER]}, Kind.prompt),
    ],
)
def test_messages_as_json_text_are_the_messages(row, kind, dumps, load):
    as_text = {
        key: value if isinstance(value, str) or key == "answer" else dumps(value)
        for key, value in row.items()
    }
    plain, unpacked = load(row, as_text, kind=kind).rows
    assert (unpacked.messages, unpacked.chosen, unpacked.rejected, unpacked.columns) == (
        plain.messages,
        plain.chosen,
        plain.rejected,
        plain.columns,
    )
    assert unpacked.content_hash == plain.content_hash and not unpacked.plain


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        "[]",
        '{"a": 1}',
        '[{"role": "CEO", "name": "Ann"}]',
        '[{"name": "f", "arguments": {"from": "a"}}]',
        "[{'value': 1}]",
        '{"name": "cut',
        "[INST] 'role': 'content': ",
    ],
)
def test_other_json_text_stays_text(text, load):
    (row,) = load({"prompt": text, "completion": text}).rows
    assert [message["content"] for message in row.messages] == [text, text]
    assert row.plain


@pytest.mark.parametrize(
    "text",
    [
        str([USER, ANSWER]),
        str(ANSWER),
        "[{'content': 'Hi', 'role': 'user'}\n {'content': 'Hello', 'role': 'assistant'}]",
        json.dumps([USER, ANSWER])[:-3],
        "[{'from': 'human', 'value': 'Hi'}]",
    ],
)
def test_messages_that_are_no_json_are_refused(text, problem):
    row = {"prompt": "p", "chosen": text, "rejected": "b"}
    field, reason = problem(row, kind=Kind.preference)
    assert field == "chosen" and reason.startswith("looks like messages, but is not JSON")
    assert "json.dumps" in reason


def test_a_pair_from_a_csv_export(tmp_path, make_data):
    sides = [[USER, {**ANSWER, "content": text}] for text in ("a", "b")]
    path = tmp_path / "pairs.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["chosen", "rejected"], map(json.dumps, sides)])
    (row,) = load_rows(make_data(path), kind=Kind.preference).rows
    assert (row.messages, row.chosen, row.rejected) == ([USER], sides[0][1:], sides[1][1:])


def test_developer_is_system_and_unread_keys_are_told(load):
    loaded = load({"messages": [{"role": "developer", "content": "s", "cache": 1}, USER, ANSWER]})
    assert loaded.rows[0].messages[0] == {"role": "system", "content": "s"}
    assert loaded.warnings == ["message keys that nothing reads, with their counts: cache (1)"]


def test_arguments_keep_their_order(load):
    def call(arguments):
        return answer(tool_calls=[{"name": "f", "arguments": arguments}])

    rows = load(call({"b": 1, "a": 2}), call({"a": 2, "b": 1})).rows
    assert list(rows[0].messages[1]["tool_calls"][0]["function"]["arguments"]) == ["b", "a"]
    assert rows[0].content_hash != rows[1].content_hash


def test_key_order_of_rows_and_messages_does_not_matter(load):
    one = {"messages": [USER, {"role": "assistant", "content": "x", "weight": 1}], "tools": None}
    other = {
        "messages": [
            dict(reversed(USER.items())),
            {"weight": 1.0, "content": "x", "role": "assistant"},
        ]
    }
    first, second = load(one, other).rows
    assert first.content_hash == second.content_hash


def test_system_prompt_goes_first(load):
    conversation, prompted = load(
        {"messages": [USER, ANSWER]}, {"prompt": "a", "completion": "b"}, system_prompt="Be brief."
    ).rows
    system = {"role": "system", "content": "Be brief."}
    assert conversation.messages == [system, USER, ANSWER]
    assert prompted.messages[0] == system and prompted.num_prompt == 2
    (pair,) = load(
        {"prompt": "a", "chosen": "b", "rejected": "c"}, kind=Kind.preference, system_prompt="s"
    ).rows
    assert [message["role"] for message in pair.messages] == ["system", "user"]


def test_system_prompt_refuses_rows_that_have_one(load):
    system = {"role": "system", "content": "Mine."}
    rows = [{"messages": [USER, ANSWER]}, {"messages": [system, USER, ANSWER]}] * 2
    with pytest.raises(ConfigError, match="2 of 4 rows already have a system message") as caught:
        load(*rows, system_prompt="Be brief.")
    assert "rows.jsonl:2)" in str(caught.value)


def test_data_of_another_recipe(load):
    pairs = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 3
    with pytest.raises(DataError) as caught:
        load(*pairs, on_bad_row=OnBadRow.skip)
    message = str(caught.value)
    assert "none of the 3 rows is for this recipe" in message
    assert (
        "preference training such as DPO" in message
        and "data.columns={completion: chosen}" in message
    )
    with pytest.raises(DataError, match=r"supervised fine-tuning \(recipes\.sft\)"):
        load({"prompt": "a", "completion": "b"}, kind=Kind.preference)
    with pytest.raises(DataError, match="rewards such as GRPO"):
        load({"prompt": "a", "answer": "b"})
    with pytest.raises(DataError, match="such as DPO"):
        load({"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]}, kind=Kind.prompt)
    with pytest.raises(ConfigError, match=r"data\.format=preference.*such as DPO"):
        load(*pairs, format=RowFormat.preference)


def test_the_advice_of_that_error_works(load):
    pairs = {"prompt": "a", "chosen": "b", "rejected": "c"}
    (row,) = load(pairs, columns={"completion": "chosen"}).rows
    assert row.messages[1]["content"] == "b"
    whole = {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]}
    (row,) = load(whole, columns={"messages": "chosen"}).rows
    assert row.messages == [USER, ANSWER]


def test_forced_format_overrides_detection(load):
    row = {"messages": [USER, ANSWER], "prompt": "a", "completion": "b"}
    assert load(row).rows[0].messages == [USER, ANSWER]
    forced = load(row, format=RowFormat.prompt_completion).rows[0]
    assert forced.messages[0]["content"] == "a"
    with pytest.raises(DataError, match="messages: is missing or null"):
        load({"prompt": "a", "completion": "b"}, format=RowFormat.messages)


def test_identity_columns(load, problem):
    rows = [{"key": 7, "doc": "d", **answer()}, {"key": "8", "doc": "e", **answer(content="y")}]
    loaded = load(*rows, id_column="key", group_column="doc").rows
    assert [(row.id, row.group) for row in loaded] == [("7", "d"), ("8", "e")]
    assert problem({"key": None, **answer()}, id_column="key")[0] == "key"
    assert problem({"doc": [1], **answer()}, group_column="doc")[0] == "doc"
    with pytest.raises(ConfigError, match=r"data\.group_column=dok.*Its columns are: doc, key"):
        load(*rows, group_column="dok")
    assert load({"id": [1], **answer()}).rows[0].id is None


def test_rows_without_text(load):
    blank = {"messages": [{"role": "user", "content": " "}, {"role": "assistant", "content": "\n"}]}
    with pytest.raises(NoTextError, match="2 rows, but no message of any row has text"):
        load(blank, blank)
    assert len(load(blank, answer()).rows) == 2
    with pytest.raises(NoTextError):
        load({"prompt": " "}, kind=Kind.prompt)


def test_all_rows_skipped_is_an_error(load):
    with pytest.raises(DataError, match="every row was skipped") as caught:
        load({"messages": []}, {"messages": 3}, on_bad_row=OnBadRow.skip)
    assert len(caught.value.problems) == 2


def test_equal_problems_are_listed_once_and_all_are_counted(load):
    with pytest.raises(DataError) as caught:
        load(*[{"messages": []}] * 25, answer())
    message = str(caught.value)
    assert "25 of 26 rows cannot be used" in message
    assert "rows.jsonl:3: " in message and "rows.jsonl:4: " not in message
    assert "the same in line 4, 5, 6, 7, 8, 9, 10, 11, 12, 13 and 12 more" in message
    assert len(caught.value.problems) == 25


def test_twenty_different_problems_are_listed(load):
    with pytest.raises(DataError) as caught:
        load(*[{"messages": [{"role": f"role{n}", "content": "x"}]} for n in range(25)])
    message = str(caught.value)
    assert "rows.jsonl:20: " in message and "rows.jsonl:21: " not in message
    assert "and 5 more kinds of problems" in message


def test_mask_all_may_train_on_text_without_an_answer(load):
    assert len(load({"messages": [USER]}, mask=Mask.all).rows) == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"prompt": "a", "completion": "b", "n": NaN}', "NaN is not a JSON value"),
        (b'{"prompt": "a", "completion": "b", "n": -Infinity}', "-Infinity is not a JSON value"),
        (b'{"prompt": "a", "completion": "b", "n": 1e999}', "n: is an infinite number"),
        (b'{"prompt": "a", "completion": "b", "prompt": "c"}', "'prompt' appears twice"),
        (b'{"prompt": "\xff", "completion": "b"}', "not UTF-8 (byte 13 of the line)"),
        ('{"prompt": "a"}'.encode("utf-16-le"), "as UTF-16 without a mark does"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"prompt": "a", "completion": "b", "n": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"prompt": "a", "completion": "b"} {}', "Extra data at column 36"),
    ],
)
def test_lines_that_are_no_json(line, words, tmp_path, make_data):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a", "completion": "b"}\n' + line)
    with pytest.raises(DataError) as caught:
        load_rows(make_data(path), kind=Kind.conversation)
    assert f"{path}:2: " in str(caught.value) and words in str(caught.value)
    assert len(caught.value.problems) == 1


def test_a_broken_utf16_file_is_located(tmp_path, make_data):
    path = tmp_path / "rows.jsonl"
    path.write_bytes('{"prompt": "a", "completion": "b"}\n'.encode("utf-16") + b"\x00\xd8\x00")
    with pytest.raises(DataError, match=r"rows\.jsonl:2: the file announces UTF-16.*iconv"):
        load_rows(make_data(path), kind=Kind.conversation)


def test_twenty_thousand_rows_load(tmp_path, make_data):
    path = tmp_path / "rows.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for i in range(20_000):
            file.write(json.dumps(answer(content=f"answer {i}")) + "\n")
    loaded = load_rows(make_data(path), kind=Kind.conversation)
    assert len(loaded.rows) == 20_000
    assert loaded.rows[19_999].messages[-1]["content"] == "answer 19999"
