"""Rendered rows as a person sees them, and the lints."""

from __future__ import annotations

import io
import itertools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tests.render import templates as t
from tests.render.conftest import case_rows
from tests.render.conftest import render as render_fixture
from tunebook.config import Mask, OnBadRow, OnBlankAnswer, OnLongRow
from tunebook.data.rows import Kind
from tunebook.errors import ConfigError
from tunebook.inspect import inspect_rendered, pieces_of, summary_lines, visible
from tunebook.launch import inspect
from tunebook.render import render_pairs, render_prompts
from tunebook.render.codec import Codec
from tunebook.render.lints import Rule, Severity, lint_rows, rows_to_lint

render = render_fixture


def overwrite(rendered, array, change):
    """Damages one array of a render cache, and reads it anew."""
    path = rendered.directory / f"{array}.npy"
    values = np.load(path)
    np.save(path, change(values))
    return type(rendered)(rendered.directory, rendered.report)


def rules(rows, rendered, tokenizer):
    return {finding.rule for finding in lint_rows(rows, rendered, tokenizer)}


@pytest.mark.parametrize("name", t.NAMES)
@pytest.mark.parametrize("mask", Mask)
@pytest.mark.parametrize("kind", [t.byte_level, t.merging, t.metaspace])
def test_what_we_render_has_no_findings(kind, mask, name, render):
    tokenizer = kind(t.NAMES[name])
    rows = [
        *case_rows("weights.jsonl"),
        *case_rows("thinking_multiturn.jsonl"),
        t.make_row(t.chat("Hi", "Hello", "日本の首都は?", "東京です。", system="Be brief.")),
        t.make_row(t.chat("Hi", "\nwell " * 40, "More?", "Beyond the cut")),
        t.make_row(t.chat("Hi", " "), num_prompt=1),
    ]
    rendered = render(
        rows, tokenizer, mask=mask, max_seq_len=160, on_blank_answer=OnBlankAnswer.end_token
    )
    findings = lint_rows(rows, rendered, tokenizer)
    cut_off = [4] if mask is Mask.last_assistant else []
    assert [(f.row, f.severity, f.rule) for f in findings] == [
        (row, Severity.warning, Rule.no_weight) for row in cut_off
    ]


def test_plain_rows_have_no_findings(render):
    pair = [{"role": "user", "content": "Q: 1+1\nA:"}, {"role": "assistant", "content": " 2"}]
    rows = [t.make_row(pair, num_prompt=1, plain=True)]
    tokenizer = t.byte_level(None, adds_bos=True)
    assert lint_rows(rows, render(rows, tokenizer), tokenizer) == []


def test_each_damage_breaks_its_rule(render):
    tokenizer = t.byte_level(t.CHATML)
    rows = [t.make_row(t.chat("Hi", "Hello"))]

    def damaged(array, change):
        rendered = render(rows, tokenizer)
        before = np.load(rendered.directory / f"{array}.npy")
        found = rules(rows, overwrite(rendered, array, change), tokenizer)
        np.save(rendered.directory / f"{array}.npy", before)
        return found

    def with_value(position, value):
        def change(values):
            values = values.copy()
            values[position] = value
            return values

        return change

    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokens = render(rows, tokenizer)[0].tokens.tolist()
    last_end = len(tokens) - 1 - tokens[::-1].index(end)
    assert damaged("mask", with_value(last_end, 0)) == {Rule.turn_end}
    assert damaged("mask", with_value(2, 1)) == {Rule.prompt_untrained}
    assert damaged("mask", with_value(slice(None), 0)) == {Rule.no_weight, Rule.turn_end}
    assert damaged("tokens", with_value(3, end)) == {Rule.stale}


def test_a_template_that_is_not_the_sampler_s_breaks_prefix_and_round_trip(render, monkeypatch):
    """What the renderer refuses to make is found when a cache holds it all the same."""
    tokenizer = t.byte_level(t.CHATML)
    rows = [t.make_row(t.chat("Hi", "Hello"))]
    rendered = render(rows, tokenizer)
    monkeypatch.setattr("tunebook.render.lints.render_prompt", lambda *args: [1, 2, 3])
    assert rules(rows, rendered, tokenizer) == {Rule.prefix}
    monkeypatch.undo()
    texts = (f"text {i}" for i in itertools.count())
    monkeypatch.setattr(Codec, "decode", lambda self, ids: next(texts))
    assert rules(rows, rendered, tokenizer) == {Rule.round_trip, Rule.turn_end}


def test_rows_without_weight_are_found(render):
    tokenizer = t.byte_level(t.CHATML)
    rows = [
        t.make_row(t.chat("Hi"), line=4),
        t.make_row(t.chat("Hi", "Hello")),
        t.make_row(t.chat("word " * 90, "Hello"), line=9),
    ]
    rendered = render(rows, tokenizer, max_seq_len=64)
    findings = lint_rows(rows, rendered, tokenizer)
    assert [(f.rule, f.severity, f.line, f.row, f.datum) for f in findings] == [
        (Rule.no_weight, Severity.error, 4, 0, None),
        (Rule.no_weight, Severity.warning, 9, 2, None),
    ]
    assert str(findings[0]).startswith("rows.jsonl:4: error: row carries loss")


def test_lints_look_at_rows_spread_over_the_data():
    assert rows_to_lint(10, 4) == [0, 2, 5, 7]
    assert rows_to_lint(3, 4) == rows_to_lint(3, None) == [0, 1, 2]


def test_pieces_join_the_tokens_of_one_character(render):
    """Every token stands in exactly one piece, and the pieces read as the text."""
    for kind in (t.byte_level, t.metaspace):
        tokenizer = kind(t.CHATML)
        item = render([t.make_row(t.chat("Hi  there", "東京\tok 👍🏽"))], tokenizer)[0]
        pieces = pieces_of(item, Codec(tokenizer))
        assert [i for piece in pieces for i in piece.ids] == item.tokens.tolist()
        assert "".join(piece.text for piece in pieces) == tokenizer.decode(item.tokens)
        positions = [piece.position for piece in pieces]
        assert positions == sorted(positions) and positions[0] == 0
        assert any(len(piece.ids) > 1 for piece in pieces) == (kind is t.byte_level)
        special = {piece.text for piece in pieces if piece.special}
        assert special - {"<unk>"} == {"<|im_start|>", "<|im_end|>"}


def show(rows, tokenizer, render, tmp_path, **settings):
    rendered = render(rows, tokenizer, **settings)
    out = io.StringIO()
    console = Console(file=out, width=200, color_system=None)
    page = tmp_path / "out" / "page.html"
    code = inspect_rendered(rows, rendered, tokenizer, limit=2, html=None, console=console)
    text = out.getvalue()
    again = inspect_rendered(rows, rendered, tokenizer, limit=2, html=page, console=console)
    assert again == code
    summary = out.getvalue().removeprefix(text)
    assert summary.splitlines()[:-1] == text.splitlines()[-len(summary.splitlines()) + 1 :]
    assert summary.splitlines()[-1] == f"Wrote {page}"
    return code, text, page.read_text(encoding="utf-8")


def test_terminal_and_page_show_tokens_weights_and_verdict(render, tmp_path):
    """What is trained is told apart without colour too; nothing in a row is markup."""
    tokenizer = t.byte_level(t.CHATML)
    messages = t.chat("<b>[red]Hi</b> & you", 'a\n"b"', "x", "half")
    messages[3]["trained"] = 0.5
    rows = [t.make_row(messages), t.make_row(t.chat("Hi", "Hello")), t.make_row(t.chat("z", "zz"))]
    code, text, page = show(rows, tokenizer, render, tmp_path)
    assert code == 0
    assert '«a↵\n"b"<|im_end|>»' in text and "[red]Hi" in text
    assert "half(0.5)" in text.replace("h(0.5)alf", "half") or "(0.5)<|im_end|>(0.5)" in text
    assert "Lints over 3 of 3 rows: no findings" in text
    assert "zz" not in text  # limit=2
    assert "<b>[red]" not in page and "&lt;" in page
    assert page.count("<section>") == 2
    assert re.search(r"<h2>rows\.jsonl:\d+ · \d+ of \d+ tokens carry loss</h2>", page)
    item = render(rows, tokenizer)[1]
    end = int(item.tokens[-2])
    assert f'title="id {end} · position {len(item.tokens) - 2} · weight 1"' in page
    assert 'class="part"' in page and "weight 0.5" in page
    assert "prefers-color-scheme: dark" in page
    assert not re.search(r"(src|href)=|<script|url\(", page)


def test_findings_fail_the_command(render, tmp_path):
    tokenizer = t.byte_level(t.CHATML)
    rows = [t.make_row(t.chat("Hi", "Hello")), t.make_row(t.chat("Hi"), line=3)]
    code, text, page = show(rows, tokenizer, render, tmp_path)
    assert code == 1
    assert "1 errors, 0 warnings" in text
    assert "rows.jsonl:3: error" in text and "rows.jsonl:3: error" in page


def test_what_was_cut_is_a_warning(render, tmp_path):
    tokenizer = t.byte_level(t.CHATML)
    rows = [t.make_row(t.chat("Hi", "Hello " * 40)), t.make_row(t.chat("Hi", "Hello"))]
    code, text, page = show(rows, tokenizer, render, tmp_path, max_seq_len=32)
    assert code == 0
    assert "Warning: 1 datum was cut at max_seq_len" in text and "was cut" in page
    assert "Lints over 2 of 2 rows: 0 errors, 1 warnings" in text


def test_a_warning_of_the_rendering_is_no_clean_verdict(render, tmp_path):
    rows = [t.make_row(t.chat("Hi", "Hello"))]
    rendered = render(rows, t.byte_level(t.CHATML))
    report = replace(rendered.report, warnings=["76 rows were lost"])
    lines = summary_lines(rows, type(rendered)(rendered.directory, report), [])
    assert "Warning: 76 rows were lost" in lines
    assert lines[-1] == "Lints over 1 of 1 rows: 0 errors, 1 warnings"


def test_white_space_is_visible():
    assert visible("a b\tc\r\n") == "a·b⇥c␍↵\n"


def test_colours_where_there_are_some(render, tmp_path):
    tokenizer = t.byte_level(t.CHATML)
    rows = [t.make_row(t.chat("Hi", "Hello"))]
    out = io.StringIO()
    console = Console(file=out, width=200, color_system="standard", force_terminal=True)
    rendered = render(rows, tokenizer)
    inspect_rendered(rows, rendered, tokenizer, limit=1, html=None, console=console)
    assert "32m" in out.getvalue() and "«" not in out.getvalue()
    assert not list(Path(tmp_path).glob("*.html"))


def test_pairs_are_shown_side_by_side(tmp_path):
    """Both sides with their names, the prompt untrained in either; a prompt to sample from."""
    tokenizer = t.byte_level(t.CHATML)
    rows = [
        t.make_row(
            t.chat(question),
            kind=Kind.preference,
            chosen=[{"role": "assistant", "content": "yes"}],
            rejected=[{"role": "assistant", "content": "no" * 40}],
            line=line,
        )
        for line, question in enumerate(("Hi?", "Ho?"), start=1)
    ]
    settings = {
        "on_blank_answer": OnBlankAnswer.error,
        "on_bad_row": OnBadRow.fail,
        "cache_dir": tmp_path,
    }
    rendered = render_pairs(
        rows, tokenizer, max_seq_len=60, on_long_row=OnLongRow.truncate, **settings
    )
    console = Console(file=io.StringIO(), width=100)
    assert inspect_rendered(rows, rendered, tokenizer, limit=1, html=None, console=console) == 0
    text = console.file.getvalue()
    assert "rows.jsonl:1 chosen  3 of " in text and "rows.jsonl:1 rejected  " in text
    assert "«yes<|im_end|>»" in text and ", truncated" in text and "rows.jsonl:2 " not in text
    assert "2 of 2 rows, 4 data" in text and "2 data were cut at max_seq_len" in text
    page = tmp_path / "page.html"
    inspect_rendered(rows, rendered, tokenizer, limit=2, html=page, console=console)
    assert "rows.jsonl:2 rejected ·" in page.read_text()
    whole = render_pairs(
        rows, tokenizer, max_seq_len=200, on_long_row=OnLongRow.truncate, **settings
    )
    limit = int(whole.lengths.max()) - 3
    cut = render_pairs(
        rows, tokenizer, max_seq_len=limit, on_long_row=OnLongRow.truncate_prompt, **settings
    )
    assert cut.report.truncated == 4
    assert "the beginning of the prompt is never seen" in "".join(summary_lines(rows, cut, []))
    assert lint_rows(rows, cut, tokenizer) == []


def test_prompts_are_shown_as_such(tmp_path):
    tokenizer = t.byte_level(t.CHATML)
    rows = [t.make_row(t.chat("Hi?"), kind=Kind.prompt)]
    rendered = render_prompts(
        rows, tokenizer, max_tokens=99, on_long_row=OnLongRow.skip, on_bad_row=OnBadRow.fail,
        cache_dir=tmp_path,
    )  # fmt: skip
    console = Console(file=io.StringIO(), width=100)
    assert inspect_rendered(rows, rendered, tokenizer, limit=1, html=None, console=console) == 0
    text = console.file.getvalue()
    assert f"a prompt of {len(rendered[0].tokens)} tokens" in text and "no findings" in text
    assert "«" not in text


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("", "is a folder"),
        ("file/page.html", "cannot be written there: File exists"),
        ("file/sub/page.html", "cannot be written there: Not a directory"),
    ],
)
def test_a_page_that_cannot_be_written_is_refused_before_anything_is_prepared(
    tmp_path, path, words
):
    (tmp_path / "file").write_text("")
    page = tmp_path / path
    with pytest.raises(ConfigError, match=f"^--html {re.escape(str(page))}: {words}"):
        inspect("sft", ["data.path=/nowhere"], pytest.fail, html=page, limit=1)
