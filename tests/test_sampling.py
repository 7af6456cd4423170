"""Which prompts are answered before and after training."""

from tests.render import templates as t
from tunebook.data.rows import Kind
from tunebook.render import render_prompt
from tunebook.sampling import sample_prompts


def answer(content):
    return [{"role": "assistant", "content": content}]


def test_prompts_of_every_kind_of_row():
    """Before the last answer of a conversation; all of a pair's and of a prompt row's messages."""
    tokenizer = t.byte_level(t.CHATML)
    rows = [
        t.make_row(t.chat("a", "b", "c", "d")),
        t.make_row(answer("no question")),
        t.make_row(t.chat("only a question")),
        t.make_row(
            t.chat("a", "b", "e"), kind=Kind.preference, chosen=answer("yes"), rejected=answer("no")
        ),
        t.make_row(t.chat("f"), kind=Kind.prompt),
        t.make_row(t.chat("too long " * 20), kind=Kind.prompt),
    ]
    found = sample_prompts(rows, tokenizer, count=9, max_tokens=60)
    assert [(each.text, each.expected) for each in found] == [("c", "d"), ("e", "yes"), ("f", "")]
    assert [each.tokens for each in found] == [
        render_prompt(messages, tokenizer)
        for messages in (t.chat("a", "b", "c"), t.chat("a", "b", "e"), t.chat("f"))
    ]
    assert len(sample_prompts(rows, tokenizer, count=1, max_tokens=60)) == 1
