"""Every way to compute attention over a stream gives the same."""

import numpy as np
import pytest
import torch

from tunebook.backends.local.engine import attention
from tunebook.backends.local.engine.attention import AttentionRule, attend, attend_backward
from tunebook.backends.local.engine.layout import groups_of, lay_out


def make_stream(lengths=(40, 31, 33, 300, 7)):
    """Rows 0 to 2 begin alike, with 30 tokens; the fourth is longer than a block."""
    rows = [np.arange(length, dtype=np.int32) for length in lengths]
    for row in rows[:3]:
        row[30:] += len(row)
    rows[3] = rows[3] + 500
    rows[4] = rows[4] + 900
    return lay_out([rows], [groups_of(rows, rows_per_unit=1, max_tokens=1000, share=True)])


def inputs(stream, heads=(4, 2, 2, 4)):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(stream.num_tokens, each, 8, generator=generator) for each in heads]


def visible(stream, rule):
    """`[N, N]` bool from the definition alone: the same row, or the beginning it shares."""
    num = stream.num_tokens
    seen = torch.zeros(num, num, dtype=torch.bool)
    for places in stream.places[0]:
        for number, place in enumerate(places):
            seen[place, places[: number + 1]] = True
    positions = torch.from_numpy(stream.positions)
    if rule.window is not None:
        seen &= positions[:, None] - positions[None, :] < rule.window
    return seen


def by_definition(query, key, value, stream, rule):
    """Softmax over what is visible, in float64."""
    repeats = query.shape[1] // key.shape[1]
    query, key, value = (each.double().transpose(0, 1) for each in (query, key, value))
    key, value = (each.repeat_interleave(repeats, dim=0) for each in (key, value))
    scores = query @ key.transpose(1, 2) * rule.scaling
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    weights = scores.masked_fill(~visible(stream, rule), -torch.inf).softmax(-1)
    return (weights @ value).transpose(0, 1)


RULES = {
    "plain": AttentionRule(scaling=0.4, window=None, softcap=None),
    "window": AttentionRule(scaling=0.4, window=17, softcap=None),
    "cap": AttentionRule(scaling=0.4, window=None, softcap=1.5),
    "both": AttentionRule(scaling=0.4, window=17, softcap=1.5),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("kept_keys", [0, 1024])
def test_output_and_gradients_are_those_of_the_definition(monkeypatch, rule, kept_keys):
    """With weights kept for the gradient, and with weights computed again."""
    monkeypatch.setattr(attention, "KEPT_KEYS", kept_keys)
    stream = make_stream()
    assert [segment.shared is not None for segment in stream.segments[:5]] == [0, 1, 1, 1, 0]
    assert stream.segments[4].tokens.length > attention.BLOCK
    query, key, value, outer = inputs(stream)
    leaves = [each.clone().requires_grad_() for each in (query, key, value)]
    expected = by_definition(*leaves, stream, rule)
    expected_gradients = torch.autograd.grad(expected, leaves, outer.double())
    with torch.no_grad():
        attended = attend(query, key, value, stream, rule, with_gradient=True)
        found = attend_backward(outer, query, key, value, attended, stream, rule)
    torch.testing.assert_close(attended.output.double(), expected.detach(), rtol=0, atol=3e-6)
    for ours, theirs in zip(found, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-5)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_block_mask_of_the_fused_kernel_is_the_definition(rule):
    """FlexAttention on the CPU, which computes its forward pass only."""
    stream = make_stream()
    query, key, value, _ = inputs(stream)
    with torch.no_grad():
        found = attention.flex_output(query, key, value, stream, rule)
    expected = by_definition(query, key, value, stream, rule)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=3e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_kernel_runs_on_cuda(dtype):
    assert attention.flex_agrees(torch.device("cuda"), dtype)


def test_where_the_fused_kernel_fails_rows_are_computed_singly(caplog):
    """Its backward pass does not exist on a CPU: it is found out, and said."""
    attention.flex_agrees.cache_clear()
    assert not attention.flex_agrees(torch.device("cpu"), torch.float32)
    assert "flex attention does not run on cpu" in caplog.text
