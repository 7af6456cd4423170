"""What a template may leave out of a row, and what it may not without a word."""

from __future__ import annotations

import pytest

from tests.render import templates as t
from tests.render.conftest import trained_text
from tunebook.config import Mask, OnBadRow
from tunebook.errors import DataError
from tunebook.render import render_prompt
from tunebook.render.conversation import Fix
from tunebook.render.drafts import Method
from tunebook.render.lints import Rule, Severity, lint_rows

TAGS = "IMPORTANT START. The tag <think> opens and </think> closes."
CUT = f"1 row: {Fix.cut_context}"
TOOL_ROW = [
    {"role": "user", "content": "Look it up."},
    {"role": "assistant", "content": "calling"},
    {"role": "tool", "content": "RESULT42"},
    {"role": "assistant", "content": "it is 42"},
]


def texts(rendered, tokenizer):
    return [tokenizer.decode(item.tokens) for item in rendered]


@pytest.mark.parametrize(
    "template", [t.CUTS_THINK, t.OPENED_THINK, t.OPENED_THINK_AS_IS], ids=["cuts", "r1", "r1_as_is"]
)
@pytest.mark.parametrize("mask", [Mask.all_assistant, Mask.all, Mask.last_assistant])
def test_an_answer_that_is_cut_at_a_tag_in_its_text_is_a_located_problem(template, mask, render):
    """Only what follows </think> would be trained: no form of the row shows all of the answer."""
    pattern = r"rows.jsonl:1: messages\[1\].content: the chat template of made/up leaves out a part"
    with pytest.raises(DataError, match=pattern):
        render([t.make_row(t.chat("q", TAGS))], t.byte_level(template), mask=mask)


def test_an_earlier_answer_that_markers_would_cut_gets_a_datum_of_its_own(render):
    """Whole where it is trained; behind it, as a sampler would see it, with a warning."""
    tokenizer = t.byte_level(t.MARKED_CUTS_THINK)
    rendered = render([t.make_row(t.chat("q", TAGS, "r", "ok"))], tokenizer)
    assert [trained_text(rendered, i, tokenizer) for i in range(2)] == [
        f"{TAGS}<|im_end|>",
        "ok<|im_end|>",
    ]
    assert texts(rendered, tokenizer) == [
        f"<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n{TAGS}<|im_end|>\n",
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n closes.<|im_end|>\n"
        "<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n",
    ]
    assert rendered.report.warnings == [CUT]
    assert rendered.report.notes == [f"1 row: {Method.per_turn}"]


def test_an_answer_before_the_last_prompt_is_checked_as_well(render):
    """The same with the cut answer in the middle of three, and the same text thrice."""
    tokenizer = t.byte_level(t.MARKED_CUTS_THINK)
    rendered = render([t.make_row(t.chat("q", "ok", "r", TAGS, "s", TAGS))], tokenizer)
    assert [trained_text(rendered, i, tokenizer) for i in range(3)] == [
        "ok<|im_end|>",
        f"{TAGS}<|im_end|>",
        f"{TAGS}<|im_end|>",
    ]
    assert rendered.report.warnings == [CUT]
    whole = render([t.make_row(t.chat("q", "ok", "r", TAGS))], tokenizer)
    assert trained_text(whole, 0, tokenizer) == f"ok<|im_end|>{TAGS}<|im_end|>"
    assert whole.report.notes == [f"1 row: {Method.markers}"] and not whole.report.warnings


def test_an_answer_that_is_only_context_may_be_cut_with_a_warning(render):
    tokenizer = t.byte_level(t.CUTS_THINK)
    row = t.make_row(t.chat("q", TAGS, "r", "ok"), num_prompt=3)
    rendered = render([row], tokenizer)
    assert trained_text(rendered, 0, tokenizer) == "<think>\n\n</think>\n\nok<|im_end|>"
    assert "IMPORTANT" not in texts(rendered, tokenizer)[0]
    assert rendered.report.warnings == [CUT]


def test_reasoning_of_earlier_turns_is_the_templates_to_leave_out(render):
    """No warning: this is what the model's makers do."""
    tokenizer = t.byte_level(t.CUTS_THINK)
    messages = t.chat("q", "a", "r", "b")
    messages[1]["reasoning_content"] = "first"
    messages[3]["reasoning_content"] = "second"
    rendered = render([t.make_row(messages)], tokenizer)
    assert [trained_text(rendered, i, tokenizer) for i in range(2)] == [
        "<think>\nfirst\n</think>\n\na<|im_end|>",
        "<think>\nsecond\n</think>\n\nb<|im_end|>",
    ]
    assert rendered.report.warnings == []


def test_reasoning_that_equals_the_answer_is_looked_for_apart_from_it(render):
    """A template that prints no reasoning: "12" in the text is the answer, not the reasoning."""
    cutting = t.CHATML.replace("m.content", "m.content.split('</think>')[-1]")
    messages = t.chat("3*4?", "12")
    messages[1]["reasoning_content"] = "12"
    with pytest.raises(DataError, match=r"messages\[1\].reasoning_content: .*drops the reasoning"):
        render([t.make_row(messages)], t.byte_level(cutting))


@pytest.mark.parametrize("repeated", ["Hello", "Hi"])
def test_an_empty_think_block_may_be_left_out_of_earlier_answers(repeated, render):
    """Equal answers too: the first is not taken for the second, which keeps its block."""
    tokenizer = t.byte_level(t.MARKED_CUTS_THINK)
    block = "<think>\n\n</think>\n\n"
    messages = t.chat("q", f"{block}Hello", "r", f"{block}{repeated}")
    rendered = render([t.make_row(messages)], tokenizer)
    assert [trained_text(rendered, i, tokenizer) for i in range(2)] == [
        f"{block}Hello<|im_end|>",
        f"{block}{repeated}<|im_end|>",
    ]
    assert rendered.report.warnings == []


def test_an_empty_think_block_that_no_form_shows_is_noted(render):
    cutting = t.CHATML.replace("m.content", "m.content.split('</think>')[-1].lstrip('\n')")
    tokenizer = t.byte_level(cutting)
    rendered = render([t.make_row(t.chat("q", "<think>\n\n</think>\n\nHello"))], tokenizer)
    assert trained_text(rendered, 0, tokenizer) == "Hello<|im_end|>"
    assert f"1 row: {Fix.left_out_blank_think}" in rendered.report.notes


@pytest.mark.parametrize("template", [t.OPENED_THINK, t.OPENED_THINK_AS_IS], ids=["r1", "as_is"])
@pytest.mark.parametrize("answer", ["Hello", "<think>\n\n</think>\n\nHello"])
def test_an_opened_think_is_closed_at_once_where_there_is_no_reasoning(template, answer, render):
    """Two line breaks before the answer in either spelling, and a note that says what was done."""
    tokenizer = t.byte_level(template)
    rendered = render([t.make_row(t.chat("q", answer))], tokenizer)
    assert texts(rendered, tokenizer) == [
        "<s><|user|>q<|assistant|><think>\n\n</think>\n\nHello</s>"
    ]
    assert trained_text(rendered, 0, tokenizer) == "\n</think>\n\nHello</s>"
    assert f"1 row: {Fix.closed_think}" in rendered.report.notes
    assert not any(Fix.opened_think in note for note in rendered.report.notes)


@pytest.mark.parametrize("template", [t.CUTS_THINK, t.INSTRUCT], ids=["cuts", "instruct"])
@pytest.mark.parametrize("result", ["RESULT42", "42", "it is 42", "a"])
def test_tool_results_that_the_template_does_not_show_are_a_located_problem(
    template, result, render
):
    """Also where the same text stands in the answer."""
    messages = [*TOOL_ROW[:2], {"role": "tool", "content": result}, TOOL_ROW[3]]
    pattern = (
        r"rows.jsonl:1: messages\[2\].content: the chat template of made/up does not show tool "
        "results"
    )
    tokenizer = t.byte_level(template)
    with pytest.raises(DataError, match=pattern):
        render([t.make_row(messages)], tokenizer)
    with pytest.raises(DataError, match=r"messages\[2\].content: .*does not show tool results"):
        render_prompt(messages[:3], tokenizer)


def test_tool_results_that_are_shown_as_json_text_are_shown(render):
    as_json = t.CHATML.replace(
        "m.content + '<|im_end|>",
        "(m.content | tojson if m.role == 'tool' else m.content) + '<|im_end|>",
    )
    tokenizer = t.byte_level(as_json)
    messages = [*TOOL_ROW[:2], {"role": "tool", "content": 'a "b"\n'}, TOOL_ROW[3]]
    rendered = render([t.make_row(messages)], tokenizer)
    assert '<|im_start|>tool\n"a \\"b\\"\\n"<|im_end|>\n' in texts(rendered, tokenizer)[0]
    assert trained_text(rendered, 0, tokenizer) == "calling<|im_end|>it is 42<|im_end|>"


def test_a_result_that_only_this_row_loses_is_a_located_problem(render):
    """The template prints results, but only behind calls."""
    picky = t.CHATML.replace(
        "{{ '<|im_start|>' + m.role",
        "{% if m.role != 'tool' or messages[1].tool_calls %}{{ '<|im_start|>' + m.role",
    ).replace("{% endfor %}", "{% endif %}{% endfor %}")
    with pytest.raises(DataError, match=r"messages\[2\].content: .*does not show tool results"):
        render([t.make_row(TOOL_ROW)], t.byte_level(picky))


def test_a_call_that_the_answer_only_speaks_of_is_a_located_problem(render):
    """ChatML prints no calls; that the text names the function and the city does not help."""
    arguments = {"city": "Bergen"}
    messages = t.chat("Weather?", "I call get_weather with city Bergen.")
    messages[1]["tool_calls"] = [
        {"type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    ]
    with pytest.raises(DataError, match=r"messages\[1\].tool_calls: .*does not print names and"):
        render([t.make_row(messages)], t.byte_level(t.CHATML))
    first_only = t.TOOLS.replace("in m.tool_calls or []", "in (m.tool_calls or [])[:1]")
    messages[1]["content"] = "I ask for Bergen and Oslo."
    messages[1]["tool_calls"] *= 2
    messages[1]["tool_calls"][1] = {
        "type": "function",
        "function": {"name": "get_weather", "arguments": {"city": "Oslo"}},
    }
    with pytest.raises(DataError, match=r"messages\[1\]"):
        render([t.make_row(messages)], t.byte_level(first_only))
    rendered = render([t.make_row(messages)], t.byte_level(t.TOOLS))
    assert trained_text(rendered, 0, t.byte_level(t.TOOLS)) == (
        "I ask for Bergen and Oslo."
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Bergen"}}</tool_call>'
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call><|im_end|>'
    )


def test_a_message_that_repeats_another_is_not_taken_for_it(render):
    """The first user message vanishes; the second holds the same text."""
    losing = t.CHATML.replace("for m in messages %}", "for m in messages[1:] %}", 1)
    losing = "{% if messages | length < 3 %}" + t.CHATML + "{% else %}" + losing + "{% endif %}"
    with pytest.raises(DataError, match=r"messages\[\d\].content: .*does not print this"):
        render([t.make_row(t.chat("Hi", "Hello", "Hi", "Hello"))], t.byte_level(losing))


def test_system_messages_may_be_moved_to_the_front(render):
    tokenizer = t.byte_level(t.SYSTEM_FIRST)
    messages = [*t.chat("q", "a"), {"role": "system", "content": "Now rhyme."}, *t.chat("r", "b")]
    rendered = render([t.make_row(messages, num_prompt=4)], tokenizer)
    assert texts(rendered, tokenizer) == [
        "<|system|>Now rhyme.<|user|>q<|assistant|>a</s><|user|>r<|assistant|>b</s>"
    ]


@pytest.mark.parametrize("name", ["gemma", "instruct"])
def test_a_system_message_of_another_weight_is_not_trained_with_the_user_message(name, render):
    """mask=all: folded, its text would get the weight of the user message."""
    tokenizer = t.byte_level(t.NAMES[name])
    messages = t.chat("Hi", "Hello", system="Be brief.")
    messages[0]["trained"] = 0.0
    pattern = r"rows.jsonl:1: messages\[0\].weight: is 0, but the chat template of made/up has no "
    with pytest.raises(DataError, match=pattern):
        render([t.make_row(messages)], tokenizer, mask=Mask.all)
    messages[1]["trained"] = 0.0
    rendered = render([t.make_row(messages)], tokenizer, mask=Mask.all)
    trained = trained_text(rendered, 0, tokenizer)
    assert "Be brief." not in trained and "Hi" not in trained and "Hello" in trained
    answers = render([t.make_row(messages)], tokenizer)
    assert "Be brief." in texts(answers, tokenizer)[0]


def test_a_system_message_of_another_weight_is_respected_where_it_is_shown(render):
    tokenizer = t.byte_level(t.CHATML)
    messages = t.chat("Hi", "Hello", system="Be brief.")
    messages[0]["trained"] = 0.0
    item = render([t.make_row(messages)], tokenizer, mask=Mask.all)[0]
    assert tokenizer.decode(item.tokens[1:][item.mask == 0]) == "system\nBe brief.<|im_end|>\n"


def test_text_of_special_tokens_is_a_counted_warning_and_a_located_lint(render):
    tokenizer = t.byte_level(t.CHATML)
    rows = [
        t.make_row(t.chat("Hi<|im_end|>\n<|im_start|>system", "Hello"), line=1),
        t.make_row(t.chat("Hi", "Hello"), line=2),
        t.make_row(t.chat("Hi", "Hello<|im_end|>"), line=3),
    ]
    rendered = render(rows, tokenizer)
    assert rendered.report.warnings == [
        "2 rows: text of a message becomes special tokens (<|im_end|>, <|im_start|>), as if the "
        "template had printed them: it can end a turn or begin another. Remove it from the data"
    ]
    findings = [f for f in lint_rows(rows, rendered, tokenizer) if f.rule is Rule.special_text]
    assert [(f.line, f.severity) for f in findings] == [
        (1, Severity.warning),
        (1, Severity.warning),
        (3, Severity.warning),
    ]
    assert render(rows[1:2], tokenizer).report.warnings == []


def test_special_tokens_are_found_in_reasoning_calls_and_tools(render):
    tokenizer = t.byte_level(t.TOOLS)
    messages = t.chat("Weather?", "")
    messages[1]["reasoning_content"] = "hm <|user|>"
    messages[1]["tool_calls"] = [
        {"type": "function", "function": {"name": "look", "arguments": {"at": "<|eot|>"}}}
    ]
    tools = [{"type": "function", "function": {"name": "look", "description": "<pad>"}}]
    rendered = render([t.make_row(messages, tools=tools)], tokenizer)
    (warning,) = rendered.report.warnings
    assert all(text in warning for text in ("<|user|>", "<|eot|>", "<pad>"))


def test_a_plain_completion_may_end_in_the_end_token(render):
    pair = [{"role": "user", "content": "Q:"}, {"role": "assistant", "content": " 2</s>"}]
    tokenizer = t.byte_level(None)
    ended = t.make_row(pair, num_prompt=1, plain=True)
    assert render([ended], tokenizer).report.warnings == []
    twice = t.make_row([pair[0], {**pair[1], "content": " 2</s> 3</s>"}], num_prompt=1, plain=True)
    (warning,) = render([twice], tokenizer).report.warnings
    assert warning.startswith("1 row: text of a message becomes special tokens (</s>)")


def test_a_template_that_prints_the_date_is_a_warning(render):
    dated = "{{ 'Today is ' + strftime_now('%d %b %Y') + '\n' }}" + t.CHATML
    rendered = render([t.make_row(t.chat("Hi", "Hello"))], t.byte_level(dated))
    assert rendered.report.warnings == [
        "the chat template of made/up prints the date (strftime_now): the tokens depend on the day "
        "they are rendered on, so another day gives another run"
    ]


def test_rows_with_such_problems_can_be_left_out(render):
    tokenizer = t.byte_level(t.CUTS_THINK)
    rows = [
        t.make_row(t.chat("q", TAGS), line=1),
        t.make_row(TOOL_ROW, line=2),
        t.make_row(t.chat("q", "ok"), line=3),
    ]
    rendered = render(rows, tokenizer, on_bad_row=OnBadRow.skip)
    assert [(p.line, p.field) for p in rendered.report.problems] == [
        (1, "messages[1].content"),
        (2, "messages[2].content"),
    ]
    assert texts(rendered, tokenizer) == [
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nok<|im_end|>\n"
    ]


def test_calls_do_not_stand_for_the_functions_that_may_be_called(render):
    """Case 23: a template that prints calls, but no tools, names the function all the same."""
    calls_only = t.CHATML.replace(
        "m.content + '<|im_end|>\n' }}",
        "m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>"
        "{% endfor %}{{ '<|im_end|>\n' }}",
    )
    tools = [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "description": "Weather now",
                "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
            },
        }
    ]
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    tokenizer = t.byte_level(calls_only)
    assert render([t.make_row(messages)], tokenizer).report.num_data == 1
    with pytest.raises(DataError, match=r"rows.jsonl:1: tools: .*does not show the tools"):
        render([t.make_row(messages, tools=tools)], tokenizer)
