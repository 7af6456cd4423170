"""A soft penalty for completions that come near their limit of tokens."""

from __future__ import annotations


def overlong_penalty(num_tokens: int, *, truncated: bool, max_tokens: int, buffer: int) -> float:
    """The penalty, from 0 to -1, to be added to the reward of a completion.

    With N tokens, limit M and buffer b: 0 for N <= M - b, then ((M - b) - N) / b, and -1 for what
    was cut at the limit.

    Source: DAPO, arXiv:2503.14476, eq. 13. There the length of an answer beyond the limit gives -1;
    here it is `truncated`, since no completion is longer than the limit it was sampled with.

    Args:
        num_tokens: sampled tokens of the completion.
        truncated: it ran into the limit without an end.
        max_tokens: the limit.
        buffer: tokens before the limit over which the penalty grows, 1 to `max_tokens`.

    Raises:
        ValueError: the buffer does not fit the limit.
    """
    if not 1 <= buffer <= max_tokens:
        raise ValueError(
            f"the buffer is {buffer} tokens: must be from 1 to the limit, {max_tokens} tokens"
        )
    if truncated:
        return -1.0
    return max(-1.0, min(0.0, (max_tokens - buffer - num_tokens) / buffer))
