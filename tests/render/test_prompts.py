"""Sampling prompts and preference pairs."""

from __future__ import annotations

import pytest

from tests.render import templates as t
from tests.render.conftest import case_rows
from tunebook.data.rows import Kind
from tunebook.errors import DataError
from tunebook.render import render_preference, render_prompt


def pair(prompt, chosen, rejected, **fields):
    return t.make_row(
        prompt,
        kind=Kind.preference,
        chosen=[{"role": "assistant", **chosen}],
        rejected=[{"role": "assistant", **rejected}],
        **fields,
    )


def full_render(tokenizer, messages):
    """What the tokenizer's own chat template gives, with the end that it leaves to us."""
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    ends = {t.GLM: "<|user|>", t.WORDS: "</s>"}
    end = ends.get(tokenizer.chat_template)
    return [*ids, tokenizer.convert_tokens_to_ids(end)] if end else ids


@pytest.mark.parametrize("name", t.NAMES)
def test_prompt_and_answer_are_the_full_render(name):
    """Cases 24, 53, 60, inputs/pref_implicit_prompt.jsonl: both spellings, one end token each."""
    tokenizer = t.byte_level(t.NAMES[name])
    implicit, explicit = case_rows("pref_implicit_prompt.jsonl", kind=Kind.preference)
    rendered = render_preference(implicit, tokenizer)
    assert rendered == render_preference(explicit, tokenizer)
    decode = tokenizer.decode
    for side, message in (("chosen", "It is sweet."), ("rejected", "No.")):
        answer, mask = getattr(rendered, side), getattr(rendered, f"{side}_mask")
        messages = [*implicit.messages, {"role": "assistant", "content": message}]
        whole = [*rendered.prompt, *answer]
        assert decode(whole) == decode(full_render(tokenizer, messages))
        trained = [token for token, weight in zip(answer, mask, strict=True) if weight]
        end = t.END[t.NAMES[name]]
        assert decode(trained).endswith(message + ("\n" if name == "words" else "") + end)
        assert trained.count(tokenizer.convert_tokens_to_ids(end)) == 1
    assert rendered.prompt == render_prompt(implicit.messages, tokenizer)
    assert not rendered.truncated_prompt


def test_reasoning_in_one_answer_only():
    """Case 60: the prompt is what both share; each side is its whole conversation."""
    tokenizer = t.byte_level(t.QWEN3)
    messages = t.chat("3*4?")
    row = pair(messages, {"content": "12", "reasoning_content": "three fours"}, {"content": "13"})
    rendered = render_preference(row, tokenizer)
    assert tokenizer.decode(rendered.chosen).startswith("<think>\nthree fours\n</think>\n\n12<|im")
    assert tokenizer.decode(rendered.rejected).startswith("<think>\n\n</think>\n\n13<|im")
    assert rendered.prompt == render_prompt(messages, tokenizer)


def test_a_prompt_that_depends_on_the_answer_is_cut_to_what_both_share():
    """Case 60: this template says in front whether a conversation holds reasoning."""
    mode = (
        "{% set think = messages | selectattr('reasoning_content') | list | length > 0 %}"
        "{{ 'mode: think\n' if think else 'mode: talk\n' }}"
    )
    tokenizer = t.byte_level(mode + t.QWEN3)
    messages = t.chat("3*4?")
    answers = {"chosen": {"content": "12", "reasoning_content": "x"}, "rejected": {"content": "13"}}
    rendered = render_preference(pair(messages, **answers), tokenizer)
    assert rendered.truncated_prompt
    assert tokenizer.decode(rendered.prompt).startswith("mode:")
    assert "think" not in tokenizer.decode(rendered.prompt)
    for side, trained in (
        ("chosen", "<think>\nx\n</think>\n\n12<|im_end|>"),
        ("rejected", "<think>\n\n</think>\n\n13<|im_end|>"),
    ):
        answer, mask = getattr(rendered, side), getattr(rendered, f"{side}_mask")
        whole = [*messages, {"role": "assistant", **answers[side]}]
        own = tokenizer.apply_chat_template(whole, return_dict=False)
        assert [*rendered.prompt, *answer] == own
        assert tokenizer.decode([x for x, w in zip(answer, mask, strict=True) if w]) == trained


def test_plain_pairs_get_one_end_token():
    """Case 24: also where the completion already holds one."""
    tokenizer = t.byte_level(None)
    row = pair(
        [{"role": "user", "content": "Q:"}],
        {"content": " yes"},
        {"content": " no</s>"},
        plain=True,
    )
    rendered = render_preference(row, tokenizer)
    assert tokenizer.decode(rendered.prompt) == "Q:"
    assert tokenizer.decode(rendered.chosen) == " yes</s>"
    assert tokenizer.decode(rendered.rejected) == " no</s>"
    assert rendered.chosen_mask == [1.0] * len(rendered.chosen)


def test_turns_of_the_user_inside_a_completion_carry_no_loss():
    tokenizer = t.byte_level(t.CHATML)
    row = t.make_row(
        t.chat("Hi"),
        kind=Kind.preference,
        chosen=[{"role": "assistant", "content": "a"}, *t.chat("More?", "b")],
        rejected=[{"role": "assistant", "content": "c"}],
    )
    rendered = render_preference(row, tokenizer)
    trained = [x for x, w in zip(rendered.chosen, rendered.chosen_mask, strict=True) if w]
    assert tokenizer.decode(trained) == "a<|im_end|>b<|im_end|>"


def test_an_answer_of_a_pair_that_cannot_be_rendered_is_located():
    row = pair(t.chat("Hi", "Hello"), {"content": "a"}, {"content": "b"})
    with pytest.raises(DataError, match=r"rows.jsonl:1: chosen: messages\[2\].role: .*refuses"):
        render_preference(row, t.byte_level(t.GEMMA))


def test_prompts_are_fixed_as_training_rows_are():
    """Case 17: the folded system text stands in the sampling prompt too."""
    tokenizer = t.byte_level(t.GEMMA)
    prompt = render_prompt(t.chat("Hi", system="Be brief."), tokenizer)
    assert tokenizer.decode(prompt) == (
        "<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n"
    )
    with pytest.raises(DataError, match=r"messages\[0\].role"):
        render_prompt([{"role": "assistant", "content": "Hi"}], tokenizer)


def test_tools_stand_in_the_prompt():
    """Case 23."""
    (row, _) = case_rows("tool_calls_str.jsonl")
    tokenizer = t.byte_level(t.TOOLS)
    text = tokenizer.decode(render_prompt(row.messages[:1], tokenizer, row.tools))
    assert all(name in text for name in ("get_weather", "city", "days"))
    with pytest.raises(DataError, match="does not show the tools"):
        render_prompt(row.messages[:1], t.byte_level(t.CHATML), row.tools)
