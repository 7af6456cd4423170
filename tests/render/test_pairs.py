"""Preference pairs and prompts to data: both sides or none, length policies, counts, lints."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.render import templates as t
from tests.render.conftest import case_rows, trained_text
from tunebook.config import OnBadRow, OnBlankAnswer, OnLongRow
from tunebook.data.rows import Kind
from tunebook.errors import ConfigError, DataError, NothingSupervisedError
from tunebook.render import render_pairs, render_preference, render_prompt, render_prompts
from tunebook.render.lints import Rule, lint_rows


@pytest.fixture
def pairs_of(tmp_path):
    """`render_pairs` with default settings and a cache of the test's own."""
    return partial(
        with_defaults,
        render_pairs,
        max_seq_len=4096,
        on_long_row=OnLongRow.truncate,
        on_blank_answer=OnBlankAnswer.error,
        on_bad_row=OnBadRow.fail,
        cache_dir=tmp_path,
    )


@pytest.fixture
def prompts_of(tmp_path):
    """`render_prompts`, likewise."""
    return partial(
        with_defaults,
        render_prompts,
        max_tokens=4096,
        on_long_row=OnLongRow.truncate,
        on_bad_row=OnBadRow.fail,
        cache_dir=tmp_path,
    )


def with_defaults(call, rows, tokenizer, **settings):
    return call(rows, tokenizer, **settings)


def pair(prompt, chosen, rejected, **fields):
    return t.make_row(
        prompt if isinstance(prompt, list) else t.chat(prompt),
        kind=Kind.preference,
        chosen=[{"role": "assistant", "content": chosen}],
        rejected=[{"role": "assistant", "content": rejected}],
        **fields,
    )


def plain_pair(prompt, chosen, rejected, **fields):
    return pair(prompt, chosen, rejected, plain=True, **fields)


def sides_of(rendered, row):
    chosen, rejected = (rendered[datum] for datum in rendered.data_of_row(row))
    return chosen, rejected


@pytest.mark.parametrize("name", t.NAMES)
@pytest.mark.parametrize("kind", [t.byte_level, t.merging, t.metaspace])
def test_two_data_a_row_are_the_full_renders(kind, name, pairs_of):
    """Cases 24, 53, 60: prompt + side of `render_preference`, mask 1 on the answer; no findings."""
    tokenizer = kind(t.NAMES[name])
    rows = [
        *case_rows("pref_implicit_prompt.jsonl", kind=Kind.preference),
        pair("Name one.", "apple", "stone"),
    ]
    rendered = pairs_of(rows, tokenizer)
    assert len(rendered) == 6 and rendered.report.kept_rows == [0, 1, 2]
    for row, source in enumerate(rows):
        expected = render_preference(source, tokenizer)
        for item, side in zip(sides_of(rendered, row), ("chosen", "rejected"), strict=True):
            assert item.row == row
            answer, mask = getattr(expected, side), getattr(expected, f"{side}_mask")
            assert item.tokens.tolist() == [*expected.prompt, *answer]
            assert item.mask.tolist() == [*[0.0] * (len(expected.prompt) - 1), *mask]
    for one, other in zip(sides_of(rendered, 0), sides_of(rendered, 1), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()  # implicit and explicit prompt
    assert lint_rows(rows, rendered, tokenizer) == []


def test_one_begin_token_and_the_sampling_prompt_is_a_prefix(pairs_of, prompts_of):
    """Case 9: a template that prints the begin token, and a tokenizer that adds one."""
    for tokenizer in (t.byte_level(t.LLAMA3), t.byte_level(t.LLAMA3, adds_bos=True)):
        rendered = pairs_of([pair("Hi", "Hello", "No")], tokenizer)
        [prompt] = prompts_of([t.make_row(t.chat("Hi"), kind=Kind.prompt)], tokenizer)
        for item in rendered:
            assert np.flatnonzero(item.tokens == tokenizer.bos_token_id).tolist() == [0]
            assert len(item.tokens) > len(prompt.tokens)
            assert item.tokens[: len(prompt.tokens)].tolist() == prompt.tokens.tolist()


def test_plain_pairs_end_with_one_end_token(pairs_of):
    """Case 24."""
    tokenizer = t.byte_level(None)
    rows = [plain_pair("Q:", " yes", " no</s>")]
    rendered = pairs_of(rows, tokenizer)
    assert [trained_text(rendered, datum, tokenizer) for datum in (0, 1)] == [" yes</s>", " no</s>"]
    assert lint_rows(rows, rendered, tokenizer) == []


# Lengths: a character is a token of a plain pair here, and the end token is one.


def test_the_prompt_can_be_cut_on_the_left(pairs_of):
    """Case 55: prompt 6 + answer 3, at most 5: 2 + 3 tokens; a neighbour of 2 + 3 is untouched."""
    tokenizer = t.byte_level(None)
    rows = [plain_pair("abcdef", "xy", "zw"), plain_pair("gh", "xy", "zw")]
    rendered = pairs_of(rows, tokenizer, max_seq_len=5, on_long_row=OnLongRow.truncate_prompt)
    texts = [tokenizer.decode(item.tokens) for item in rendered]
    assert texts == ["efxy</s>", "efzw</s>", "ghxy</s>", "ghzw</s>"]
    assert all(item.mask.tolist() == [0, 1, 1, 1] for item in rendered)
    assert [item.truncated for item in rendered] == [True, True, False, False]
    assert rendered.report.truncated == 2
    assert lint_rows(rows, rendered, tokenizer) == []


def test_cut_on_the_right_a_pair_without_an_answer_is_left_out_whole(pairs_of):
    """Case 55: 6 + 3 tokens, at most 5: none of the answer is left; 2 + 3 is untouched."""
    tokenizer = t.byte_level(None)
    rows = [plain_pair("abcdef", "xy", "zw"), plain_pair("gh", "xy", "zw")]
    rendered = pairs_of(rows, tokenizer, max_seq_len=5)
    assert rendered.report.dropped_rows == {"no_target_after_truncation": [0]}
    assert rendered.report.kept_rows == [1]
    assert [tokenizer.decode(item.tokens) for item in rendered] == ["ghxy</s>", "ghzw</s>"]
    [finding] = lint_rows(rows, rendered, tokenizer)
    assert (finding.rule, finding.row) == (Rule.no_weight, 0)


def test_one_long_side_is_cut_and_its_short_partner_is_not(pairs_of):
    rows = [plain_pair("ab", "xyxyxyxy", "z")]
    rendered = pairs_of(rows, t.byte_level(None), max_seq_len=5)
    chosen, rejected = sides_of(rendered, 0)
    assert (len(chosen.tokens), chosen.truncated) == (5, True)
    assert (len(rejected.tokens), rejected.truncated) == (4, False)
    assert rendered.report.truncated == 1


def test_sides_that_become_equal_are_left_out(pairs_of):
    """Case 54, by the limit: what is left of either answer is the same."""
    rows = [plain_pair("ab", "xyz1", "xyz2"), plain_pair("ab", "x", "y")]
    rendered = pairs_of(rows, t.byte_level(None), max_seq_len=5)
    assert rendered.report.dropped_rows == {"identical_after_truncation": [0]}
    [finding] = lint_rows(rows, rendered, t.byte_level(None))
    assert "before its answers differ" in str(finding)
    with pytest.raises(NothingSupervisedError, match=r"None of 1 pairs .*max_seq_len=5 ends bef"):
        pairs_of(rows[:1], t.byte_level(None), max_seq_len=5)


def test_both_prompts_lose_the_same_tokens(pairs_of):
    """The sides differ in the answer alone, also where only one of them is too long."""
    rows = [plain_pair("abcdef", "xyxy", "z")]
    rendered = pairs_of(
        rows, t.byte_level(None), max_seq_len=8, on_long_row=OnLongRow.truncate_prompt
    )
    texts = [t.byte_level(None).decode(item.tokens) for item in rendered]
    assert texts == ["defxyxy</s>", "defz</s>"]


def test_an_answer_that_leaves_no_room_for_the_prompt_is_left_out(pairs_of):
    """One prompt token must stay: the first token of a sequence is not scored."""
    tokenizer = t.byte_level(None)
    rows = [plain_pair("ab", "xyz1", "z"), plain_pair("abc", "xyz", "z")]
    rendered = pairs_of(rows, tokenizer, max_seq_len=5, on_long_row=OnLongRow.truncate_prompt)
    assert rendered.report.dropped_rows == {"too_long": [0]}
    assert [tokenizer.decode(item.tokens) for item in rendered] == ["cxyz</s>", "cz</s>"]


def test_the_begin_token_stays_when_the_prompt_is_cut(pairs_of):
    """Case 9 with case 55: models are not used to texts that lack it."""
    tokenizer = t.byte_level(None, adds_bos=True)
    rows = [plain_pair("abcdef", "xy", "zw")]
    rendered = pairs_of(rows, tokenizer, max_seq_len=6, on_long_row=OnLongRow.truncate_prompt)
    assert [tokenizer.decode(item.tokens) for item in rendered] == ["<s>efxy</s>", "<s>efzw</s>"]
    assert lint_rows(rows, rendered, tokenizer) == []


def test_a_prompt_that_differs_before_the_answers_is_cut_where_it_is_shared(pairs_of):
    """Case 60 with case 55: what only one side's prompt has is never cut out."""
    head = (
        "{% set think = messages | selectattr('reasoning_content') | list | length > 0 %}"
        "{{ 'abcdefgh' + ('T' if think else 'N') }}"
    )
    tokenizer = t.byte_level(head + t.QWEN3)
    row = t.make_row(
        t.chat("3*4?"),
        kind=Kind.preference,
        chosen=[{"role": "assistant", "content": "12", "reasoning_content": "x"}],
        rejected=[{"role": "assistant", "content": "13"}],
    )
    expected = render_preference(row, tokenizer)
    assert expected.truncated_prompt and tokenizer.decode(expected.prompt) == "abcdefgh"
    shared = len(expected.prompt)
    whole = shared + max(len(expected.chosen), len(expected.rejected))
    settings = {"on_long_row": OnLongRow.truncate_prompt}
    cut = pairs_of([row], tokenizer, max_seq_len=whole - shared, **settings)
    assert [item.tokens.tolist() for item in cut] == [expected.chosen, expected.rejected]
    with pytest.raises(NothingSupervisedError, match="too_long"):
        pairs_of([row], tokenizer, max_seq_len=whole - shared - 1, **settings)


def test_long_pairs_can_be_skipped_or_refused(pairs_of):
    tokenizer = t.byte_level(None)
    rows = [
        plain_pair("ab", "xyxyxyxy", "z", line=1),
        plain_pair("ab", "x", "z", line=2),
        plain_pair("ab", "x" * 9, "y" * 9, line=3),
    ]
    skipped = pairs_of(rows, tokenizer, max_seq_len=5, on_long_row=OnLongRow.skip)
    assert skipped.report.dropped_rows == {"too_long": [0, 2]}
    assert skipped.report.kept_rows == [1] and len(skipped) == 2
    assert "2 of 3 rows are lost" in skipped.report.warnings[0]
    assert "data.mask" not in skipped.report.warnings[0]
    with pytest.raises(DataError, match=r"2 rows are longer than max_seq_len=5") as caught:
        pairs_of(rows, tokenizer, max_seq_len=5, on_long_row=OnLongRow.error)
    assert [(each.line, each.reason.split()[0]) for each in caught.value.problems] == [
        (1, "chosen"),
        (3, "chosen"),
        (3, "rejected"),
    ]


# Pairs that teach nothing.


def test_answers_that_render_to_the_same_tokens_are_located(pairs_of):
    """Case 54: this template leaves out what they differ in."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content | lower"
        " + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = t.byte_level(template)
    rows = [
        pair("hi", "yes", "no", line=1),
        pair("hi", "yes", "yes", line=2),
        pair("bye", "no", "yes", line=3),
    ]
    with pytest.raises(DataError, match=r"rows.jsonl:2: rejected: renders to the tokens of chos"):
        pairs_of(rows, tokenizer)
    skipped = pairs_of(rows, tokenizer, on_bad_row=OnBadRow.skip)
    assert [problem.line for problem in skipped.report.problems] == [2]
    assert skipped.report.kept_rows == [0, 2]
    with pytest.raises(NothingSupervisedError, match=r"None of 1 pairs can be trained.*rejected:"):
        pairs_of(rows[1:2], tokenizer, on_bad_row=OnBadRow.skip)


def test_a_blank_answer_is_a_problem_of_its_side(pairs_of):
    """Case 54: an empty completion, unless its end of turn is asked for."""
    for tokenizer, make in ((t.byte_level(t.CHATML), pair), (t.byte_level(None), plain_pair)):
        rows = [make("Hi", "Hello", " ")]
        with pytest.raises(DataError, match=r"rows.jsonl:1: rejected: messages\[1\].content: is a"):
            pairs_of(rows, tokenizer)
        rendered = pairs_of(rows, tokenizer, on_blank_answer=OnBlankAnswer.end_token)
        assert rendered.supervised[1] == 1
        assert rendered.report.blank_answers == 1


def test_pairs_stay_together_when_one_is_left_out(pairs_of):
    """Case 58: the middle one of three is invalid; each chosen keeps its own rejected."""
    tokenizer = t.byte_level(t.CHATML)
    rows = [
        pair("one", "1c", "1r", line=1),
        pair("two", "2c", "2c", line=2),
        pair("three", "3c", "3r", line=3),
    ]
    rendered = pairs_of(rows, tokenizer, on_bad_row=OnBadRow.skip)
    assert rendered.report.kept_rows == [0, 2] and len(rendered) == 4
    assert [trained_text(rendered, datum, tokenizer)[:2] for datum in range(4)] == [
        "1c", "1r", "3c", "3r",
    ]  # fmt: skip
    assert rendered.data_of_row(1) == range(2, 2)
    assert rendered.data_of_row(2) == range(2, 4)


def test_text_of_special_tokens_in_an_answer_is_seen(pairs_of):
    tokenizer = t.byte_level(t.CHATML)
    rows = [pair("Hi", "Hello", "No<|im_end|>")]
    rendered = pairs_of(rows, tokenizer)
    assert any("becomes special tokens" in warning for warning in rendered.report.warnings)
    assert Rule.special_text in {finding.rule for finding in lint_rows(rows, rendered, tokenizer)}


def test_damaged_pairs_break_rules(pairs_of):
    tokenizer = t.byte_level(t.CHATML)
    rows = [pair("Hi", "Hello", "No")]
    rendered = pairs_of(rows, tokenizer)
    path = rendered.directory / "mask.npy"
    mask = np.load(path)
    mask[int(rendered.lengths[0]) - 2] = 0  # the end of turn of chosen; a line break follows
    mask[int(rendered.lengths[0]) + 1] = 1  # the prompt of rejected
    np.save(path, mask)
    again = type(rendered)(rendered.directory, rendered.report)
    found = lint_rows(rows, again, tokenizer)
    assert [(each.rule, each.datum) for each in found] == [
        (Rule.turn_end, 0),
        (Rule.prompt_untrained, 1),
    ]
    assert found[0].message.startswith("chosen: ") and found[1].message.startswith("rejected: ")
    other = [pair("Hi", "Hello", "Never")]
    stale = [each for each in lint_rows(other, rendered, tokenizer) if each.rule is Rule.stale]
    assert [each.datum for each in stale] == [1]


def test_pairs_have_a_cache_of_their_own(pairs_of, tmp_path):
    """Each part of a pair is part of the key, and a pool renders the same."""
    tokenizer = t.byte_level(t.CHATML)
    base = [pair("Hi", f"yes {n}", f"no {n}") for n in range(130)]
    first = pairs_of(base, tokenizer)
    assert pairs_of(base, tokenizer).directory == first.directory
    changed = [pair("Hi", "yes 0", "other"), *base[1:]]
    assert pairs_of(changed, tokenizer).directory != first.directory
    pooled = pairs_of(base, tokenizer, num_workers=2, cache_dir=tmp_path / "pool")
    assert pooled.report == first.report
    assert [item.tokens.tolist() for item in pooled] == [item.tokens.tolist() for item in first]


# Prompts.


def prompt_row(content, **fields):
    return t.make_row(t.chat(content), kind=Kind.prompt, **fields)


@pytest.mark.parametrize("name", t.NAMES)
def test_a_prompt_is_what_a_sampler_is_given(name, prompts_of):
    tokenizer = t.byte_level(t.NAMES[name])
    rows = [prompt_row("Hi"), prompt_row("Count to ten.")]
    rendered = prompts_of(rows, tokenizer)
    assert [item.tokens.tolist() for item in rendered] == [
        render_prompt(row.messages, tokenizer) for row in rows
    ]
    assert not any(item.mask.any() for item in rendered)
    report = rendered.report
    assert (report.kept_rows, report.dropped, report.num_supervised) == ([0, 1], {}, 0)
    assert lint_rows(rows, rendered, tokenizer) == []


def test_long_prompts_are_left_out_and_never_cut(prompts_of):
    tokenizer = t.byte_level(None)
    rows = [
        prompt_row(text, plain=True, line=line)
        for line, text in enumerate(("a", "abcd", "abcde", "b", "c", "d", "e"), start=1)
    ]
    for policy in (OnLongRow.truncate, OnLongRow.skip):
        rendered = prompts_of(rows, tokenizer, max_tokens=4, on_long_row=policy)
        assert rendered.report.dropped_rows == {"too_long": [2]}
        assert [len(item.tokens) for item in rendered] == [1, 4, 1, 1, 1, 1]
        assert rendered.report.warnings == [
            "1 prompt left out, longer than the 4 tokens that max_seq_len leaves for a prompt: a "
            "prompt is never cut"
        ]
    with pytest.raises(DataError, match="1 row is longer than the 4 tokens") as caught:
        prompts_of(rows, tokenizer, max_tokens=4, on_long_row=OnLongRow.error)
    assert [problem.line for problem in caught.value.problems] == [3]
    with pytest.raises(DataError, match=r"None of 1 prompts can be used.*raise max_seq_len"):
        prompts_of(rows[1:2], tokenizer, max_tokens=3)
    with pytest.raises(ConfigError, match="leaves no token for a prompt"):
        prompts_of(rows, tokenizer, max_tokens=0)


def test_prompts_that_cannot_be_rendered_are_located_or_skipped(prompts_of):
    tokenizer = t.byte_level(t.GEMMA)
    rows = [
        prompt_row("Hi", line=1),
        t.make_row([{"role": "assistant", "content": "Hi"}], kind=Kind.prompt, line=2),
    ]
    with pytest.raises(DataError, match=r"rows.jsonl:2: messages\[0\].role"):
        prompts_of(rows, tokenizer)
    skipped = prompts_of(rows, tokenizer, on_bad_row=OnBadRow.skip)
    assert skipped.report.kept_rows == [0]
    assert [problem.line for problem in skipped.report.problems] == [2]


def test_an_empty_plain_prompt_is_a_problem(prompts_of):
    with pytest.raises(DataError, match=r"rows.jsonl:1: prompt: is empty"):
        prompts_of([prompt_row("", plain=True)], t.byte_level(None))


def test_only_pairs_take_truncate_prompt(prompts_of, render):
    for call, rows in ((prompts_of, [prompt_row("Hi")]), (render, [t.make_row(t.chat("a", "b"))])):
        with pytest.raises(ConfigError, match=r"on_long_row=truncate_prompt: is for preference"):
            call(rows, t.byte_level(t.CHATML), on_long_row=OnLongRow.truncate_prompt)


def test_stale_prompts_are_found(prompts_of):
    tokenizer = t.byte_level(t.CHATML)
    rendered = prompts_of([prompt_row("Hi")], tokenizer)
    [finding] = lint_rows([prompt_row("Ho")], rendered, tokenizer)
    assert finding.rule is Rule.stale
