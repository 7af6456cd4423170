"""Answers sampled before and after training, so that a person sees what changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunebook.backends.base import Session
from tunebook.config import SamplesConfig
from tunebook.data.rows import Row
from tunebook.render import render_prompt
from tunebook.types import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class SamplePrompt:
    """One prompt to answer, and the answer its row has."""

    text: str
    """The last turn of the prompt, for people."""
    expected: str
    tokens: list[int]


def sample_prompts(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, *, count: int, max_tokens: int
) -> list[SamplePrompt]:
    """The prompts of the first `count` rows that fit: everything before the last answer.

    Args:
        rows: conversations.
        tokenizer: of the model.
        count: prompts wanted.
        max_tokens: longest prompt, tokens.
    """
    found: list[SamplePrompt] = []
    for row in rows:
        if len(found) == count:
            break
        answers = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
        if not answers or answers[-1] == 0:
            continue
        prompt = row.messages[: answers[-1]]
        tokens = render_prompt(prompt, tokenizer, tools=row.tools)
        if len(tokens) <= max_tokens:
            expected = str(row.messages[answers[-1]]["content"])
            found.append(SamplePrompt(str(prompt[-1]["content"]), expected, tokens))
    return found


def sample_answers(
    session: Session,
    prompts: Sequence[SamplePrompt],
    tokenizer: PreTrainedTokenizerBase,
    config: SamplesConfig,
    *,
    seed: int,
) -> list[dict[str, Any]]:
    """One answer to each prompt from the session's weights, as records for `samples/`."""
    params = SamplingParams(
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        top_p=1.0,
        top_k=0,
        stop=(),
        seed=seed,
    )
    generator = session.publish_weights().result()
    answers = generator.sample([prompt.tokens for prompt in prompts], params, 1).result()
    return [
        {
            "prompt": prompt.text,
            "expected": prompt.expected,
            "completion": tokenizer.decode(completions[0].tokens, skip_special_tokens=True),
            "stop_reason": completions[0].stop_reason.value,
            "num_tokens": len(completions[0].tokens),
        }
        for prompt, completions in zip(prompts, answers, strict=True)
    ]
