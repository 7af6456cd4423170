"""Answers sampled before and after training, so that a person sees what changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunebook.backends.base import Session
from tunebook.config import SamplesConfig
from tunebook.data.rows import Kind, Row
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
        rows: of any kind; what is expected is the chosen answer of a pair, and of a prompt nothing.
        tokenizer: of the model.
        count: prompts wanted.
        max_tokens: longest prompt, tokens.
    """
    found: list[SamplePrompt] = []
    for row in rows:
        if len(found) == count:
            break
        prompt, expected = _question(row)
        if not prompt:
            continue
        tokens = render_prompt(prompt, tokenizer, tools=row.tools)
        if len(tokens) <= max_tokens:
            found.append(SamplePrompt(str(prompt[-1]["content"]), expected, tokens))
    return found


def why_no_samples(
    config: SamplesConfig, prompts: Sequence[SamplePrompt], *, has_generator: bool
) -> str | None:
    """The cause for which no answer is sampled though some are asked for; None = it is not so.

    Args:
        config: the `samples` section.
        prompts: that were found.
        has_generator: the backend can sample.
    """
    if prompts or config.num_prompts == 0:
        return None
    return "no_prompt_fits" if has_generator else "no_generator"


def _question(row: Row) -> tuple[list[dict[str, Any]], str]:
    """The messages before the answer that a row has, and that answer; none where there is none."""
    if row.kind is Kind.prompt:
        return row.messages, ""
    if row.kind is Kind.preference:
        return row.messages, str(row.chosen[0]["content"])
    answers = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
    if not answers:
        return [], ""
    return row.messages[: answers[-1]], str(row.messages[answers[-1]]["content"])


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
