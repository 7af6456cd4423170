"""Many rows: length policies, counts, errors, the cache, the pool, memory."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.render import templates as t
from tests.render.conftest import case_rows, trained_text
from tunebook.config import Mask, OnBadRow, OnLongRow
from tunebook.errors import ConfigError, DataError, NothingSupervisedError
from tunebook.render import cache, render_prompt, rows

WORDS_PER_ROW = 40


def short_rows(count):
    return [t.make_row(t.chat(f"Question {i}?", f"Answer {i}."), line=i + 1) for i in range(count)]


def same(left, right):
    assert len(left) == len(right)
    for ours, theirs in zip(left, right, strict=True):
        assert ours.row == theirs.row and ours.truncated == theirs.truncated
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours.mask.tolist() == theirs.mask.tolist()


def test_shapes_and_counts(render):
    """tokens [T + 1] int32, mask [T] float32; lengths and supervised count them."""
    rendered = render(short_rows(3), t.byte_level(t.CHATML))
    report = rendered.report
    assert len(rendered) == 3 and report.num_data == 3 and report.kept_rows == [0, 1, 2]
    for i, item in enumerate(rendered):
        assert item.tokens.dtype == np.int32 and item.mask.dtype == np.float32
        assert len(item.mask) == len(item.tokens) - 1
        assert rendered.lengths[i] == len(item.tokens)
        assert rendered.supervised[i] == np.count_nonzero(item.mask)
        assert rendered.data_of_row(i) == range(i, i + 1)
    assert report.num_tokens == rendered.lengths.sum()
    assert report.num_supervised == rendered.supervised.sum()
    with pytest.raises(IndexError):
        rendered[3]


def test_long_rows_are_cut_without_an_invented_end(render):
    """Case 102, inputs/long_row.jsonl, 512 tokens: truncated 1, without target 1 of 4."""
    tokenizer = t.byte_level(t.CHATML)
    rendered = render(case_rows("long_row.jsonl"), tokenizer, max_seq_len=512)
    report = rendered.report
    assert report.truncated == 1
    assert report.dropped == {"no_target_after_truncation": 1}
    assert report.dropped_rows == {"no_target_after_truncation": [1]}
    assert report.kept_rows == [0, 2, 3] and report.num_rows == 4
    cut = rendered[rendered.data_of_row(2)[0]]
    assert cut.truncated and len(cut.tokens) == 512
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end not in cut.tokens[1:][cut.mask != 0]
    assert cut.mask[-1] == 1


def test_long_rows_can_be_skipped_or_refused(render):
    """Case 102: the policy key."""
    tokenizer = t.byte_level(t.CHATML)
    found = case_rows("long_row.jsonl")
    skipped = render(found, tokenizer, max_seq_len=512, on_long_row=OnLongRow.skip)
    assert skipped.report.dropped == {"too_long": 2} and skipped.report.kept_rows == [0, 3]
    with pytest.raises(DataError, match=r"2 rows are longer than max_seq_len=512") as caught:
        render(found, tokenizer, max_seq_len=512, on_long_row=OnLongRow.error)
    assert [problem.line for problem in caught.value.problems] == [2, 3]
    # Refusing long rows is not a bad row that could be skipped.
    with pytest.raises(DataError):
        render(
            found,
            tokenizer,
            max_seq_len=512,
            on_long_row=OnLongRow.error,
            on_bad_row=OnBadRow.skip,
        )


def test_losing_most_rows_is_a_warning_and_losing_all_an_error(render):
    """Cases 41, 102: the error names max_seq_len."""
    tokenizer = t.byte_level(t.CHATML)
    long = [t.make_row(t.chat("word " * 200, "yes")) for _ in range(2)]
    rendered = render([*long, *short_rows(1)], tokenizer, max_seq_len=64)
    assert rendered.report.warnings and "2 of 3 rows are lost" in rendered.report.warnings[0]
    assert not render(short_rows(3), tokenizer, max_seq_len=64).report.warnings
    with pytest.raises(NothingSupervisedError, match="max_seq_len=64 ends before"):
        render(long, tokenizer, max_seq_len=64)
    with pytest.raises(ConfigError, match="max_seq_len=1"):
        render(long, tokenizer, max_seq_len=1)


def test_bad_rows_are_all_located_or_skipped(render):
    tokenizer = t.byte_level(t.GEMMA)
    bad = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    mixed = [*short_rows(2), *[t.make_row(bad, line=i) for i in range(10, 40)]]
    with pytest.raises(DataError, match=r"30 rows are not rendered .*on_bad_row=skip") as caught:
        render(mixed, tokenizer)
    assert [problem.line for problem in caught.value.problems] == list(range(10, 40))
    assert "13, 14, 15, 16, 17, 18, 19, 20, 21, 22 and 17 more" in str(caught.value)
    for _ in range(2):  # The second time from the cache.
        skipped = render(mixed, tokenizer, on_bad_row=OnBadRow.skip)
        assert [problem.line for problem in skipped.report.problems] == list(range(10, 40))
        assert skipped.report.dropped == {"bad_row": 30}
    moved = [replace(row, file="elsewhere.jsonl") for row in mixed]
    again = render(moved, tokenizer, on_bad_row=OnBadRow.skip)
    assert again.report.problems[0].file == "elsewhere.jsonl"


def test_plain_rows_need_no_template(render):
    """Case 24: prompt, completion, exactly one end token; the begin token as the tokenizer adds."""
    pair = [{"role": "user", "content": "Q: 1+1\nA:"}, {"role": "assistant", "content": " 2"}]
    ended = [pair[0], {"role": "assistant", "content": " 2</s>"}]
    found = [t.make_row(m, num_prompt=1, plain=True) for m in (pair, ended)]
    for adds_bos in (False, True):
        tokenizer = t.byte_level(None, adds_bos=adds_bos)
        rendered = render(found, tokenizer)
        prompt = render_prompt(pair[:1], tokenizer)
        assert prompt == tokenizer(pair[0]["content"])["input_ids"]
        for i in range(2):
            item = rendered[i]
            assert item.tokens[: len(prompt)].tolist() == prompt
            assert item.tokens.tolist().count(tokenizer.eos_token_id) == 1
            assert item.tokens[-1] == tokenizer.eos_token_id
            assert trained_text(rendered, i, tokenizer) == " 2</s>"
    # The same rows with a template are a conversation.
    assert trained_text(render(found[:1], t.byte_level(t.CHATML)), 0, tokenizer) == " 2<|im_end|>"


@pytest.mark.parametrize("kind", [t.merging, t.metaspace])
def test_plain_completions_are_split_from_their_prompt(kind, render):
    """Case 22 without a template: the prompt is a token prefix though tokens would merge."""
    tokenizer = kind(None)
    pair = [{"role": "user", "content": "assistant\n"}, {"role": "assistant", "content": "Hello"}]
    rendered = render([t.make_row(pair, num_prompt=1, plain=True)], tokenizer)
    prompt = render_prompt(pair[:1], tokenizer)
    assert rendered[0].tokens[: len(prompt)].tolist() == prompt
    assert trained_text(rendered, 0, tokenizer) == "Hello</s>"


def test_conversations_without_a_template_are_refused(render):
    with pytest.raises(ConfigError, match=r"rows.jsonl:1 is a conversation. Set model.chat_templ"):
        render(short_rows(1), t.byte_level(None))


def test_cache_is_used_and_keyed_on_what_changes_tokens(render, tmp_path):
    tokenizer = t.byte_level(t.CHATML)
    base = short_rows(2)
    first = render(base, tokenizer)
    stamp = (first.directory / "tokens.npy").stat().st_mtime_ns
    again = render([replace(row, file="moved", id="x") for row in base], tokenizer)
    assert again.directory == first.directory
    assert (again.directory / "tokens.npy").stat().st_mtime_ns == stamp
    same(first, again)
    assert again.report == first.report
    weighted = [
        replace(base[0], messages=[base[0].messages[0], {**base[0].messages[1], "trained": 0.5}])
    ]
    others = [
        render(base[:1], tokenizer),
        render(weighted, tokenizer),
        render(base, t.byte_level(t.CHATML_MARKED)),
        render(base, t.metaspace(t.CHATML)),
        render(base, tokenizer, mask=Mask.all),
        render(base, tokenizer, max_seq_len=4095),
        render(base, tokenizer, on_long_row=OnLongRow.skip),
    ]
    keys = {first.directory.name, *(other.directory.name for other in others)}
    assert len(keys) == 1 + len(others)
    assert {path.name for path in (tmp_path / "render").iterdir()} == keys


@pytest.mark.parametrize("damage", ["report.json", "tokens.npy", "rows.npy"])
def test_a_damaged_cache_is_rendered_again(damage, render):
    tokenizer = t.byte_level(t.CHATML)
    first = render(short_rows(3), tokenizer)
    expected = [item.tokens.tolist() for item in first]
    path = first.directory / damage
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    again = render(short_rows(3), tokenizer)
    assert [item.tokens.tolist() for item in again] == expected


def test_a_failed_render_leaves_nothing(render, tmp_path):
    with pytest.raises(NothingSupervisedError):
        render([t.make_row(t.chat("Hi"))], t.byte_level(t.CHATML))
    assert list((tmp_path / "render").iterdir()) == []


def test_two_renders_at_once_agree(render, tmp_path):
    tokenizer = t.byte_level(t.CHATML)
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(render(short_rows(300), tokenizer)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3 and len(list((tmp_path / "render").iterdir())) == 1
    same(found[0], found[2])


def test_rendered_rows_survive_pickling(render):
    rendered = render(short_rows(3), t.byte_level(t.CHATML))
    same(rendered, pickle.loads(pickle.dumps(rendered)))


def test_a_pool_renders_the_same(render, tmp_path):
    tokenizer = t.byte_level(t.QWEN3)
    mixed = [
        *short_rows(150),
        *case_rows("thinking_multiturn.jsonl"),
        t.make_row(t.chat("Hi")),
        t.make_row(t.chat("word " * 200, "yes", "and", "x " * 300)),
        t.make_row(t.chat("Hi", "  ")),
        *short_rows(150),
    ]
    settings = {"max_seq_len": 128, "on_bad_row": OnBadRow.skip}
    alone = render(mixed, tokenizer, num_workers=0, cache_dir=tmp_path / "a", **settings)
    pooled = render(mixed, tokenizer, num_workers=2, cache_dir=tmp_path / "b", **settings)
    same(alone, pooled)
    assert alone.report == pooled.report
    assert alone.report.dropped == {
        "nothing_supervised": 1,
        "no_target_after_truncation": 1,
        "bad_row": 1,
    }


def test_progress_reaches_the_end(render):
    calls = []
    count = 5 * 64 + 3
    for _ in range(2):  # The second time from the cache.
        calls.clear()
        render(
            short_rows(count),
            t.byte_level(t.CHATML),
            progress=lambda done, total: calls.append((done, total)),
        )
        assert calls[-1] == (count, count)
        assert calls == sorted(calls) and len(calls) <= 6


def test_an_empty_list_of_rows_renders_to_nothing(render):
    rendered = render([], t.byte_level(t.CHATML))
    assert len(rendered) == 0 and list(rendered) == [] and rendered.report.num_rows == 0


def test_array_files_are_plain_numpy(tmp_path):
    writer = cache.ArrayWriter(tmp_path)
    for _ in range(3):
        writer.append({"tokens": np.arange(4), "mask": np.ones(4)})
    writer.close()
    assert np.load(tmp_path / "tokens.npy").tolist() == [0, 1, 2, 3] * 3
    assert np.load(tmp_path / "lengths.npy").tolist() == []


MEMORY = """
import json, sys, tracemalloc
from pathlib import Path
from tests.render import templates as t
from tunebook.config import Mask, OnBadRow, OnBlankAnswer, OnLongRow
from tunebook.render import render_rows

rows = [t.make_row(t.chat(f"Question {i}?", "a b " * WORDS)) for i in range(ROWS)]
tracemalloc.start()
before = tracemalloc.get_traced_memory()[0]
rendered = render_rows(
    rows, t.byte_level(t.CHATML), mask=Mask.all_assistant, max_seq_len=4096,
    on_long_row=OnLongRow.error, on_blank_answer=OnBlankAnswer.error, on_bad_row=OnBadRow.fail,
    cache_dir=Path(sys.argv[1]), num_workers=0,
)
after = tracemalloc.get_traced_memory()[1]
print(json.dumps([before, after, int(rendered.lengths.sum())]))
"""


def test_memory_does_not_hold_the_rendered_rows(tmp_path):
    """Case 128 in small: 1000 long rows."""
    script = MEMORY.replace("WORDS", "500").replace("ROWS", "1000")
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(rows.__file__).parents[2],
    )
    before, after, tokens = json.loads(done.stdout.splitlines()[-1])
    assert tokens > 1_500_000
    # Held whole, tokens and masks would be 8 bytes a token; here a few chunks of 64 rows are.
    assert after - before < 0.7 * 8 * tokens
