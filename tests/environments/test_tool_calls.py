"""Tool calls read from what a model wrote."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunebook.environments.tool_calls import assistant_message, read_answer

CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "1 + 1"}}</tool_call>'


def test_a_call_and_the_text_around_it():
    answer = read_answer(f"Let me see.\n{CALL}\n")
    assert answer.content == "Let me see." and not answer.errors
    (call,) = answer.calls
    assert (call.name, dict(call.arguments)) == ("calculate", {"expression": "1 + 1"})
    assert assistant_message("", answer) == {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": "calculate", "arguments": {"expression": "1 + 1"}},
            }
        ],
    }


def test_several_calls_have_ids_of_their_own():
    answer = read_answer(CALL + "\n" + CALL)
    assert [call.id for call in answer.calls] == ["call00000", "call00001"]
    assert answer.content == ""


def test_arguments_as_json_text():
    text = json.dumps({"name": "calculate", "arguments": '{"expression": "2"}'})
    (call,) = read_answer(f"<tool_call>\n{text}\n</tool_call>").calls
    assert dict(call.arguments) == {"expression": "2"}


def test_a_call_without_arguments():
    (call,) = read_answer('<tool_call>{"name": "now"}</tool_call>').calls
    assert dict(call.arguments) == {}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<tool_call>{</tool_call>", "not JSON"),
        ("<tool_call></tool_call>", "not JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not JSON"),
        ("<tool_call>[1]</tool_call>", "has to be"),
        ('<tool_call>{"name": 3}</tool_call>', "has to be"),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "have to be a JSON object"),
        ('<tool_call>{"name": "f", "arguments": "{"}</tool_call>', "arguments of f are not JSON"),
        ('Hm <tool_call>{"name": "f", "arguments": {', "not closed"),
    ],
)
def test_what_cannot_be_read_is_said(text, error):
    answer = read_answer(text)
    assert not answer.calls and len(answer.errors) == 1 and error in answer.errors[0]
    assert assistant_message(text, answer) == {"role": "assistant", "content": text}


def test_a_good_call_beside_a_bad_one():
    text = CALL + "<tool_call>{</tool_call>"
    answer = read_answer(text)
    assert len(answer.calls) == len(answer.errors) == 1
    assert answer.content == text


@given(
    st.lists(st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "f"}', "{", "text ", CALL]))
)
def test_no_text_raises(parts):
    text = "".join(parts)
    answer = read_answer(text)
    if "<tool_call>" not in text:
        assert answer.content == text.strip() and not answer.calls
