"""Which tokens carry loss: every template kind, every mask, every case of kind 2 of the case log."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.render import templates as t
from tests.render.conftest import case_rows, trained_text
from tunebook.config import Mask, OnBadRow, OnBlankAnswer
from tunebook.errors import ConfigError, DataError, NothingSupervisedError
from tunebook.models import load_tokenizer, packaged_path
from tunebook.render import render_prompt
from tunebook.render.chat_template import TurnEndKind, chat_template_of
from tunebook.render.drafts import Method
from tunebook.render.placing import place_row

TOKENIZERS = {"bytes": t.byte_level, "merging": t.merging, "metaspace": t.metaspace}


def trained_parts(tokenizer, row, mask=Mask.all_assistant):
    """The trained text of every span of a row, in order."""
    template = chat_template_of(tokenizer)
    placed = place_row(template, row, mask=mask, blanks_allowed=False)
    return [
        template.codec.decode(item.tokens[start:end])
        for item in placed
        for start, end in zip(item.starts, item.ends, strict=True)
    ]


@pytest.mark.parametrize("name", t.NAMES)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_every_answer_is_trained_through_its_turn_end_behind_its_sampling_prompt(name, kind):
    """Cases 9, 20, 22: user/assistant/user/assistant, for every template and tokenizer."""
    template = t.NAMES[name]
    tokenizer = TOKENIZERS[kind](template)
    messages = t.chat("Hi", "Hello", "And now?", "Hello again")
    chat_template = chat_template_of(tokenizer)
    placed = place_row(
        chat_template, t.make_row(messages), mask=Mask.all_assistant, blanks_allowed=False
    )
    spans = [
        (item, span.index, start, end)
        for item in placed
        for span, start, end in zip(item.draft.spans, item.starts, item.ends, strict=True)
    ]
    assert [index for _, index, _, _ in spans] == [1, 3]
    for item, index, start, end in spans:
        prompt = render_prompt(messages[:index], tokenizer)
        assert item.tokens[:start] == prompt
        assert start < len(item.tokens)
        assert item.mask[start:end] == [1.0] * (end - start)
        assert tokenizer.decode([item.tokens[end - 1]]).strip() == t.END[template]
        trained = chat_template.codec.decode(item.tokens[start:end])
        assert (
            trained.strip()
            .removesuffix(t.END[template])
            .endswith(messages[index]["content"] + ("\n" if template == t.WORDS else ""))
        )
        assert tokenizer.convert_tokens_to_ids("<s>") not in item.tokens[1:]
    outside = np.array(placed[0].mask)
    for item, _, start, end in spans:
        if item is placed[0]:
            outside[start:end] = 0
    assert not outside.any()


def test_chatml_exact_ids_and_weights():
    """Case 21: header 0, content and <|im_end|> 1, the line break after it 0."""
    tokenizer = t.byte_level(t.CHATML)
    (placed,) = place_row(
        chat_template_of(tokenizer),
        t.make_row(t.chat("Hi", "Hello")),
        mask=Mask.all_assistant,
        blanks_allowed=False,
    )
    start, end = (tokenizer.convert_tokens_to_ids(s) for s in ("<|im_start|>", "<|im_end|>"))

    def plain(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    answer = plain("Hello")
    header = [start, *plain("user\nHi"), end, *plain("\n"), start, *plain("assistant\n")]
    assert placed.tokens == [*header, *answer, end, *plain("\n")]
    assert placed.mask == [0.0] * len(header) + [1.0] * (len(answer) + 1) + [0.0]


@pytest.mark.parametrize("name", ["llama3", "gemma", "instruct"])
def test_one_begin_token_at_the_start(name, render):
    """Case 9: the template prints the begin token and the tokenizer would add one too."""
    tokenizer = t.byte_level(t.NAMES[name], adds_bos=True)
    bos = tokenizer.bos_token_id
    assert tokenizer("a")["input_ids"][0] == bos
    messages = t.chat("Hi", "Hello")
    item = render([t.make_row(messages)], tokenizer)[0]
    prompt = render_prompt(messages[:1], tokenizer)
    for ids in (item.tokens.tolist(), prompt):
        assert ids[0] == bos and ids.count(bos) == 1
    assert item.tokens[: len(prompt)].tolist() == prompt and len(prompt) < len(item.tokens)


@pytest.mark.parametrize("name", ["chatml", "chatml_marked", "chatml_marked_short"])
def test_message_weights_choose_the_third_answer(name, render):
    """Case 10, inputs/weights.jsonl: only charlie and its end of turn."""
    tokenizer = t.byte_level(t.NAMES[name])
    rendered = render(case_rows("weights.jsonl"), tokenizer)
    assert trained_text(rendered, 0, tokenizer) == "charlie<|im_end|>"
    assert set(rendered[0].mask.tolist()) == {0.0, 1.0}


def test_a_fractional_message_weight_is_applied_as_written(render):
    """Case 10: 0.5 on one answer, 1 on the other."""
    tokenizer = t.byte_level(t.CHATML)
    messages = t.chat("Hi", "alpha", "More?", "bravo")
    messages[1]["trained"] = 0.5
    item = render([t.make_row(messages)], tokenizer)[0]
    targets = item.tokens[1:]
    assert tokenizer.decode(targets[item.mask == 0.5]) == "alpha<|im_end|>"
    assert tokenizer.decode(targets[item.mask == 1.0]) == "bravo<|im_end|>"


def test_reasoning_of_every_trained_turn_is_kept(render):
    """Case 11, inputs/thinking_multiturn.jsonl line 1: one datum per turn, each with reasoning."""
    tokenizer = t.byte_level(t.QWEN3)
    rendered = render(case_rows("thinking_multiturn.jsonl")[:1], tokenizer)
    assert rendered.data_of_row(0) == range(0, 2)
    assert [trained_text(rendered, i, tokenizer) for i in range(2)] == [
        "<think>\nthree fours are twelve\n</think>\n\n12<|im_end|>",
        "<think>\ntwelve over two\n</think>\n\n6<|im_end|>",
    ]
    # The second datum shows the first turn as a sampler would see it.
    assert "three fours" not in tokenizer.decode(rendered[1].tokens)
    assert any(Method.per_turn in note for note in rendered.report.notes)


def test_a_closing_tag_alone_becomes_one_think_block(render):
    """Case 12, inputs/thinking_multiturn.jsonl line 2."""
    tokenizer = t.byte_level(t.QWEN3)
    rendered = render(case_rows("thinking_multiturn.jsonl")[1:], tokenizer)
    text = tokenizer.decode(rendered[0].tokens)
    assert text.count("<think>") == text.count("</think>") == 1
    assert trained_text(rendered, 0, tokenizer) == "<think>\none and one\n</think>\n\n2<|im_end|>"


def test_reasoning_stands_behind_the_think_that_the_prompt_opens(render):
    """Case 12: the template opens <think> in the prompt and prints no reasoning afterwards."""
    tokenizer = t.byte_level(t.OPENED_THINK)
    rows = case_rows("thinking_multiturn.jsonl")
    rendered = render(rows, tokenizer)
    assert [trained_text(rendered, i, tokenizer) for i in range(3)] == [
        "three fours are twelve\n</think>\n\n12</s>",
        "twelve over two\n</think>\n\n6</s>",
        "one and one\n</think>\n\n2</s>",
    ]
    for i, prompt in enumerate((rows[0].messages[:1], rows[0].messages[:3], rows[1].messages[:1])):
        ids = render_prompt(prompt, tokenizer)
        assert rendered[i].tokens[: len(ids)].tolist() == ids
        assert tokenizer.decode(rendered[i].tokens).count("<think>") == 1


def test_a_template_without_reasoning_gets_it_inside_the_answer(render):
    """Case 11: plain ChatML prints only content, so the reasoning is written into it."""
    tokenizer = t.byte_level(t.CHATML)
    rendered = render(case_rows("thinking_multiturn.jsonl")[:1], tokenizer)
    assert trained_text(rendered, 0, tokenizer) == (
        "<think>\nthree fours are twelve\n</think>\n\n12<|im_end|>"
        "<think>\ntwelve over two\n</think>\n\n6<|im_end|>"
    )
    assert any("written into the answer" in note for note in rendered.report.notes)


def test_reasoning_that_no_form_shows_is_a_located_problem(render):
    """Case 11: a template that cuts everything up to </think> and opens no block itself."""
    cutting = t.CHATML.replace("m.content", "m.content.split('</think>')[-1]")
    with pytest.raises(DataError, match=r":1: messages\[1\].reasoning_content: .*drops") as caught:
        render(case_rows("thinking_multiturn.jsonl")[:1], t.byte_level(cutting))
    assert [problem.line for problem in caught.value.problems] == [1]


@pytest.mark.parametrize("template", [t.TOOLS, t.TOOLS_AS_TEXT])
def test_string_and_object_arguments_give_the_same_tokens(template, render):
    """Cases 14, 23, inputs/tool_calls_str.jsonl: same ids and masks, nothing escaped twice."""
    tokenizer = t.byte_level(template)
    rendered = render(case_rows("tool_calls_str.jsonl"), tokenizer)
    first, second = rendered[0], rendered[1]
    assert first.tokens.tolist() == second.tokens.tolist()
    assert first.mask.tolist() == second.mask.tolist()
    text = tokenizer.decode(first.tokens)
    assert '"arguments": {"city": "Bergen", "days": 2}}' in text and '\\"' not in text
    assert all(name in text for name in ("get_weather", "city", "days"))
    assert trained_text(rendered, 0, tokenizer) == (
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Bergen", "days": 2}}</tool_call>'
        "<|im_end|>Rain for two days.<|im_end|>"
    )


def test_a_template_that_escapes_arguments_twice_is_refused(render):
    """Case 14."""
    with pytest.raises(DataError, match=r":1: messages\[1\].tool_calls: .*as they are"):
        render(case_rows("tool_calls_str.jsonl"), t.byte_level(t.TOOLS_TWICE))


def test_a_template_without_tools_is_refused(render):
    """Case 23: located, naming the template."""
    with pytest.raises(DataError, match=r":1: tools: the chat template of made/up does not show"):
        render(case_rows("tool_calls_str.jsonl"), t.byte_level(t.CHATML))


def test_next_role_marker_ends_a_turn_that_calls_a_tool(render):
    """Case 20: <|observation|> after a call, <|user|> after the last answer."""
    tokenizer = t.byte_level(t.GLM)
    rendered = render(case_rows("tool_calls_str.jsonl")[:1], tokenizer)
    assert trained_text(rendered, 0, tokenizer) == (
        '\n<tool_call>get_weather {"city": "Bergen", "days": 2}</tool_call><|observation|>'
        "Rain for two days.<|user|>"
    )
    assert any("next role's marker" in note for note in rendered.report.notes)


def test_pad_token_equal_to_end_token_changes_nothing(render):
    """Case 15: masks are never found by id."""
    rows = [t.make_row(t.chat("Hi", "Hello")), t.make_row(t.chat("Hi", "Hello there", "x", "y"))]
    same = t.byte_level(t.CHATML, pad="<|im_end|>")
    same.eos_token = "<|im_end|>"
    other = t.byte_level(t.CHATML)
    first, second = render(rows, same), render(rows, other)
    for i, turns in ((0, 1), (1, 2)):
        assert first[i].tokens.tolist() == second[i].tokens.tolist()
        assert first[i].mask.tolist() == second[i].mask.tolist()
        trained = first[i].tokens[1:][first[i].mask != 0].tolist()
        assert trained.count(same.pad_token_id) == turns


@pytest.mark.parametrize("name", t.NAMES)
def test_odd_roles_work_or_are_located(name, render):
    """Case 17, inputs/roles_odd.jsonl: the system text never vanishes; line 3 trains on Hello."""
    tokenizer = t.byte_level(t.NAMES[name])
    rows = case_rows("roles_odd.jsonl", on_bad_row=OnBadRow.skip)
    assert [row.line for row in rows] == [1, 2, 3]
    rendered = render(rows, tokenizer)
    texts = [tokenizer.decode(rendered[i].tokens) for i in range(3)]
    assert "Be brief." in texts[0] and "Hi" in texts[0]
    assert "Hi" in texts[1] and "Are you there?" in texts[1]
    assert "Bye" not in texts[2]
    assert "Hello" in trained_text(rendered, 2, tokenizer)
    folds = [note for note in rendered.report.notes if "system text" in note]
    assert folds == (
        ["1 row: the system text was put in front of the first user message"]
        if name in ("gemma", "instruct")
        else []
    )
    merges = [note for note in rendered.report.notes if "joined" in note]
    assert merges == (["1 row: user messages in a row were joined"] if name == "gemma" else [])


def test_a_role_the_template_refuses_is_located(render):
    """Case 17: file, line, message and role, and what the template said."""
    messages = [*t.chat("Hi", "Hello"), {"role": "assistant", "content": "Again"}]
    pattern = (
        r"rows.jsonl:7: messages\[2\].role: .* refuses this assistant message: Conv.* alternate"
    )
    with pytest.raises(DataError, match=pattern):
        render([t.make_row(messages, line=7)], t.byte_level(t.GEMMA))


def test_blank_answers_are_refused_or_train_only_the_end(render):
    """Case 18, inputs/blank_content.jsonl."""
    tokenizer = t.byte_level(t.CHATML)
    rows = case_rows("blank_content.jsonl")
    with pytest.raises(DataError, match="3 rows are not rendered") as caught:
        render(rows, tokenizer)
    assert [problem.line for problem in caught.value.problems] == [1, 2, 3]
    skipped = render(rows, tokenizer, on_bad_row=OnBadRow.skip)
    assert skipped.report.kept_rows == [3] and skipped.report.dropped == {"bad_row": 3}
    rendered = render(rows, tokenizer, on_blank_answer=OnBlankAnswer.end_token)
    trained = [trained_text(rendered, i, tokenizer) for i in range(4)]
    assert trained == ["<|im_end|>"] * 3 + ["ok<|im_end|>"]
    assert rendered.supervised.tolist()[:3] == [1, 1, 1]
    assert rendered.report.blank_answers == 3
    assert "3 blank answers: only the end of the turn is trained" in rendered.report.notes


def test_rows_without_a_trained_token_are_counted_and_all_of_them_is_an_error(render):
    """Case 19: the error names template and option."""
    tokenizer = t.byte_level(t.CHATML)
    good = t.make_row(t.chat("Hi", "Hello"))
    bare = t.make_row(t.chat("Hi"))
    rendered = render([bare, good, bare], tokenizer)
    assert rendered.report.dropped == {"nothing_supervised": 2}
    assert rendered.report.kept_rows == [1] and rendered.data_of_row(0) == range(0, 0)
    with pytest.raises(NothingSupervisedError, match=r"made/up.*data.mask=all_assistant"):
        render([bare] * 4, tokenizer)


@pytest.mark.parametrize("answer", ["\nHello world", " Hello world", "Hello world", "\n\nHello"])
@pytest.mark.parametrize("name", ["chatml", "chatml_marked", "instruct", "glm", "words"])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_no_answer_loses_its_first_character(kind, name, answer, render):
    """Case 22: tokens that would span prompt and answer are split there."""
    tokenizer = TOKENIZERS[kind](t.NAMES[name])
    messages = t.chat("Hi", answer)
    item = render([t.make_row(messages)], tokenizer)[0]
    prompt = render_prompt(messages[:1], tokenizer)
    assert item.tokens[: len(prompt)].tolist() == prompt
    codec = chat_template_of(tokenizer).codec
    whole = codec.decode(item.tokens.tolist())
    assert answer in whole[len(codec.decode(prompt)) :]
    assert item.mask[: len(prompt) - 1].sum() == 0 and item.mask[len(prompt) - 1] == 1
    assert any(item.mask == 1)


@pytest.mark.parametrize("name", [name for name in t.NAMES if name not in ("glm", "words")])
def test_white_space_is_what_the_template_makes_of_it(name, render):
    """Case 25: ids equal the tokenizer's own chat template; no list of exceptions is needed."""
    tokenizer = t.byte_level(t.NAMES[name])
    for texts in (("hi\n", "Hello"), ("  hi", "Hello"), ("hi", "ok ")):
        messages = t.chat(*texts)
        own = tokenizer.apply_chat_template(messages, return_dict=False)
        item = render([t.make_row(messages)], tokenizer)[0]
        assert tokenizer.decode(item.tokens) == tokenizer.decode(own)
        prompt = tokenizer.apply_chat_template(
            messages[:1], add_generation_prompt=True, return_dict=False
        )
        assert render_prompt(messages[:1], tokenizer) == prompt
        assert item.tokens[: len(prompt)].tolist() == prompt


def test_content_parts_and_nulls_render_like_plain_strings(render):
    """Cases 103, 104: joined text parts, an empty system message, null keys as absent ones."""
    tokenizer = t.byte_level(t.CHATML)
    parts = case_rows("content_parts.jsonl", on_bad_row=OnBadRow.skip)
    plain = [
        t.make_row(t.chat("Two words: red fox", "red fox")),
        t.make_row(t.chat("Hi", "Hello", system="")),
    ]
    for ours, theirs in zip(render(parts, tokenizer), render(plain, tokenizer), strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
    nulls = render(case_rows("nulls.jsonl", on_bad_row=OnBadRow.skip), tokenizer)
    bare = render([t.make_row(t.chat("Name a bird.", "Heron."))], tokenizer)
    assert nulls[0].tokens.tolist() == bare[0].tokens.tolist()


def test_last_assistant_trains_one_answer(render):
    """A turn after the last trained one is not even rendered."""
    tokenizer = t.byte_level(t.QWEN3)
    messages = t.chat("Hi", "alpha", "More?", "bravo", "Bye")
    messages[1]["reasoning_content"] = "because"
    rendered = render([t.make_row(messages)], tokenizer, mask=Mask.last_assistant)
    assert len(rendered) == 1
    assert trained_text(rendered, 0, tokenizer).endswith("bravo<|im_end|>")
    assert "Bye" not in tokenizer.decode(rendered[0].tokens)


@pytest.mark.parametrize("name", t.NAMES)
def test_mask_all_trains_everything_but_a_prompt(name, render):
    """Everything after the first token; of prompt/completion rows only the completion."""
    tokenizer = t.byte_level(t.NAMES[name])
    messages = t.chat("Hi", "Hello")
    everything = render([t.make_row(messages)], tokenizer, mask=Mask.all)[0]
    assert everything.mask.tolist() == [1.0] * (len(everything.tokens) - 1)
    completion = render([t.make_row(messages, num_prompt=1)], tokenizer, mask=Mask.all)[0]
    prompt = render_prompt(messages[:1], tokenizer)
    assert completion.mask[: len(prompt) - 1].sum() == 0
    assert (completion.mask[len(prompt) - 1 :] == 1).all()


def test_mask_all_obeys_message_weights(render):
    """A user turn of weight 0 in the middle."""
    tokenizer = t.byte_level(t.CHATML)
    messages = t.chat("Hi", "alpha", "More?", "bravo")
    messages[2]["trained"] = False
    item = render([t.make_row(messages)], tokenizer, mask=Mask.all)[0]
    assert tokenizer.decode(item.tokens[1:][item.mask == 0]) == (
        "<|im_start|>user\nMore?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_prompt_part_of_a_row_is_never_trained(render):
    """num_prompt cuts off earlier assistant turns too."""
    tokenizer = t.byte_level(t.CHATML)
    row = t.make_row(t.chat("Hi", "alpha", "More?", "bravo"), num_prompt=3)
    assert trained_text(render([row], tokenizer), 0, tokenizer) == "bravo<|im_end|>"


def test_markers_are_used_only_where_they_agree():
    """A marker block that leaves out the end token is extended; one in the wrong place is not."""
    short = chat_template_of(t.byte_level(t.CHATML_MARKED_SHORT))
    assert short.profile.markers
    misplaced = t.CHATML_MARKED.replace(
        "{{ '<|im_start|>assistant\n' }}{% generation %}",
        "{% generation %}{{ '<|im_start|>assistant\n' }}",
    )
    tokenizer = t.byte_level(misplaced)
    assert not chat_template_of(tokenizer).profile.markers
    parts = trained_parts(tokenizer, t.make_row(t.chat("Hi", "Hello")))
    assert parts == ["Hello<|im_end|>"]


def test_an_assistant_turn_before_any_user_turn_is_trained(render):
    """No prompt of no messages exists: what the template prints before the greeting is it."""
    tokenizer = t.byte_level(t.CHATML)
    messages = [{"role": "assistant", "content": "Welcome."}, *t.chat("Hi", "Hello")]
    rendered = render([t.make_row(messages)], tokenizer)
    assert trained_text(rendered, 0, tokenizer) == "Welcome.<|im_end|>Hello<|im_end|>"


def test_turn_ends_of_every_template():
    kinds = {
        name: chat_template_of(t.byte_level(source)).profile.turn_end.kind
        for name, source in t.NAMES.items()
    }
    assert {name for name, kind in kinds.items() if kind is not TurnEndKind.own} == {"glm", "words"}
    assert kinds["glm"] is TurnEndKind.next_role and kinds["words"] is TurnEndKind.eos


def test_templates_that_cannot_be_trained_are_refused():
    broken = t.CHATML + "{{ raise_exception('not today') }}"
    with pytest.raises(ConfigError, match=r"not today. Set model.chat_template"):
        chat_template_of(t.byte_level(broken))
    unasked = t.CHATML.replace("{% if add_generation_prompt %}", "{% if true %}")
    with pytest.raises(ConfigError, match="unasked"):
        chat_template_of(t.byte_level(unasked))
    endless = t.wrap(t.byte_level_core(use_regex=True), t.WORDS)
    endless.eos_token = None
    with pytest.raises(ConfigError, match="no end token"):
        chat_template_of(endless)


@pytest.mark.parametrize("folder", ["tiny_model"])
def test_the_built_in_model_uses_its_markers(folder, render):
    tokenizer = load_tokenizer(str(packaged_path(f"pkg://tunebook/assets/{folder}")))
    rows = [*case_rows("weights.jsonl"), *case_rows("tool_calls_str.jsonl")]
    rendered = render(rows, tokenizer)
    assert trained_text(rendered, 0, tokenizer) == "charlie<|im_end|>"
    assert '\\"' not in tokenizer.decode(rendered[1].tokens)
    assert f"1 row: {Method.markers}" in rendered.report.notes


texts = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="<>[]"), min_size=1, max_size=30
).filter(lambda text: bool(text.strip()))


@pytest.mark.parametrize("name", t.NAMES)
@pytest.mark.parametrize("kind", ["bytes", "merging"])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(conversation=st.lists(st.tuples(texts, texts), min_size=1, max_size=3))
def test_any_conversation_trains_exactly_its_answers(name, kind, conversation):
    """decode(trained) is answer + end of turn, whatever the text, for every template."""
    template = t.NAMES[name]
    tokenizer = TOKENIZERS[kind](template)
    messages = t.chat(*[text for pair in conversation for text in pair])
    parts = trained_parts(tokenizer, t.make_row(messages))
    before = {t.INSTRUCT: " ", t.WORDS: " ", t.QWEN3: "<think>\n\n</think>\n\n"}.get(template, "")
    after = "\n" if template == t.WORDS else ""
    trims = template in (t.LLAMA3, t.GEMMA)
    assert parts == [
        before + (answer.strip() if trims else answer) + after + t.END[template]
        for _, answer in conversation
    ]
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = render_prompt(messages[:i], tokenizer)
            assert prompt == list(
                tokenizer.apply_chat_template(
                    messages[:i], add_generation_prompt=True, return_dict=False
                )
            )
