"""Log-probs of target tokens and their gradient from the output head, in one pass.

The log-prob of a target depends on one hidden state, so its gradient with respect to that state can
be computed while the logits are at hand, before anybody knows by what it will be multiplied. Logits
exist for a few rows at a time and are computed once.
Legend: N selected positions, H hidden size, V vocabulary, C rows of a chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tunebook.backends.local.engine.layout import SIZE_STEP
from tunebook.backends.local.engine.products import linear, linear_backward

CHUNK_LOGITS = 4 * 2**20
"""Logit values of a chunk before it is filled up: 16 MiB in float32, whatever the vocabulary."""


@dataclass(frozen=True, slots=True)
class HeadResult:
    """Log-probs and how they change with the hidden states."""

    logprobs: Tensor
    """`[N]` float32, nats."""
    slopes: Tensor | None
    """`[N, H]` float32, the gradient of each log-prob with respect to its hidden state."""


@torch.no_grad()
def target_logprobs(
    hidden: Tensor,
    targets: Tensor,
    *,
    weight: Tensor,
    bias: Tensor | None,
    rule: Callable[[Tensor], Tensor] | None,
    temperatures: Tensor | None,
    with_slopes: bool,
) -> HeadResult:
    """Log-probs of the targets under softmax(logits / temperature).

    Args:
        hidden: `[N, H]` normalised hidden states in the head's dtype.
        targets: `[N]`
        weight: `[V, H]`
        bias: `[V]`
        rule: what the model does to the head's output, elementwise; None = nothing.
        temperatures: `[N]` float32, above 0; None = 1.
        with_slopes: whether the gradient is wanted.
    """
    num_rows = rows_at_once(len(weight))
    logprobs: list[Tensor] = []
    slopes: list[Tensor] = []
    for start in range(0, len(targets), num_rows):
        chunk, chunk_targets = hidden[start : start + num_rows], targets[start : start + num_rows]
        fill = -len(chunk) % SIZE_STEP
        raw = linear(torch.nn.functional.pad(chunk, (0, 0, 0, fill)), weight, bias).float()
        logits = raw if rule is None else rule(raw)
        divisors = None
        if temperatures is not None:
            divisors = temperatures[start : start + num_rows, None]
            # A rule's result is a tensor of its own, `raw` is needed again only behind a rule.
            logits[: len(chunk)].div_(divisors)
        chosen = logits[: len(chunk)].gather(1, chunk_targets[:, None]).squeeze(1)
        largest = logits.amax(dim=1)
        # Not torch.softmax, which adds up a whole vocabulary in one float32 and is off by 1e-5.
        exponentials = (logits - largest[:, None] if rule else logits.sub_(largest[:, None])).exp_()
        total = exponentials.sum(dim=1)
        logprobs.append(chosen - (largest + total.log())[: len(chunk)])
        if not with_slopes:
            continue
        # The gradient of the logits is 1 at the target minus the probabilities.
        if rule is None:
            expected = linear_backward(exponentials.to(weight.dtype), weight).float()
            slope = weight[chunk_targets].float() - (expected / total[:, None])[: len(chunk)]
            if divisors is not None:
                slope.div_(divisors)
        else:
            gradient = exponentials.div_(total[:, None]).neg_()
            gradient[torch.arange(len(chunk), device=chunk.device), chunk_targets] += 1
            if divisors is not None:
                gradient[: len(chunk)].div_(divisors)
            gradient = _through(rule, raw, gradient)
            slope = linear_backward(gradient.to(weight.dtype), weight)[: len(chunk)].float()
        slopes.append(slope)
    if not logprobs:
        empty = hidden.new_zeros(0, dtype=torch.float32)
        return HeadResult(empty, hidden.float() if with_slopes else None)
    return HeadResult(torch.cat(logprobs), torch.cat(slopes) if with_slopes else None)


def rows_at_once(vocab_size: int) -> int:
    """Rows of a chunk, a multiple of `SIZE_STEP`."""
    return max(1, -(-CHUNK_LOGITS // (vocab_size * SIZE_STEP))) * SIZE_STEP


def _through(rule: Callable[[Tensor], Tensor], raw: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of `raw` from that of `rule(raw)`."""
    with torch.enable_grad():
        leaf = raw.detach().requires_grad_()
        (result,) = torch.autograd.grad(rule(leaf), leaf, gradient)
    return result
