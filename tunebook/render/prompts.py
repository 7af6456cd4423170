"""What a sampler is given, and the two sides of a preference pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tunebook.config import Mask
from tunebook.errors import ConfigError, DataError, RowProblem
from tunebook.render.chat_template import ChatTemplate, Message, Tools, chat_template_of
from tunebook.render.codec import Codec
from tunebook.render.conversation import (
    Turn,
    Unusable,
    read_conversation,
    trained_turns,
)
from tunebook.render.drafts import answer_draft
from tunebook.render.placing import (
    Placed,
    place,
    place_completion,
    place_pieces,
    place_row,
    plain_ids,
    plain_prompt,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tunebook.data.rows import Row


def render_prompt(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, tools: Tools = None
) -> list[int]:
    """The token ids to sample an answer from, `[N]`; training tokens of that answer begin so.

    Without a chat template the messages are plain text.

    Raises:
        DataError: the template cannot render these messages.
    """
    if tokenizer.chat_template is None:
        return plain_ids(Codec(tokenizer), plain_prompt(messages))
    template = chat_template_of(tokenizer)
    turns = [Turn(message, 1.0, i) for i, message in enumerate(messages)]
    try:
        conversation = read_conversation(template, turns, tools, generation_prompt=True)
    except Unusable as problem:
        raise DataError(f"{problem.field}: {problem.reason}") from problem
    return list(template.codec.ids(conversation.text))


@dataclass(frozen=True, slots=True)
class RenderedPair:
    """Two answers to one prompt; prompt + answer is the full render of a conversation."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    chosen_mask: list[float]
    """Of each token of `chosen`: 1 = it is the assistant's, its end of turn included."""
    rejected_mask: list[float]
    truncated_prompt: bool
    """The template renders the prompt differently before the two answers, so that `prompt` is only
    what they share and the rest of it begins both answers, with mask 0."""


def render_preference(row: Row, tokenizer: PreTrainedTokenizerBase) -> RenderedPair:
    """The prompt that a pair shares and the rest of either conversation, in token ids.

    Raises:
        DataError: the template cannot render one of the conversations; located.
    """
    sides: list[Placed] = []
    for name, completion in (("chosen", row.chosen), ("rejected", row.rejected)):
        try:
            sides.append(_place_side(row, completion, tokenizer))
        except Unusable as problem:
            raise DataError(
                str(RowProblem(row.file, row.line, f"{name}: {problem.field}", problem.reason))
            ) from problem
    chosen, rejected = sides
    prompts = [side.tokens[: side.starts[0]] for side in sides]
    shared = prompts[0] if prompts[0] == prompts[1] else _common_prefix(*prompts)
    return RenderedPair(
        prompt=shared,
        chosen=chosen.tokens[len(shared) :],
        rejected=rejected.tokens[len(shared) :],
        chosen_mask=chosen.mask[len(shared) :],
        rejected_mask=rejected.mask[len(shared) :],
        truncated_prompt=prompts[0] != prompts[1],
    )


def _place_side(row: Row, completion: list[Message], tokenizer: PreTrainedTokenizerBase) -> Placed:
    if tokenizer.chat_template is None:
        if not row.plain:
            raise no_template(row, tokenizer)
        text = "".join(message["content"] for message in completion)
        turn = Turn(completion[-1], 1.0, len(row.messages))
        return place_completion(Codec(tokenizer), plain_prompt(row.messages), text, turn)
    side = replace(
        row, messages=[*row.messages, *completion], num_prompt=len(row.messages), plain=False
    )
    template = chat_template_of(tokenizer)
    try:
        placed = place_row(template, side, mask=Mask.all_assistant, blanks_allowed=True)
    except Unusable as problem:
        if len(completion) > 1:
            raise
        return _place_answer(template, side, problem)
    if not placed:
        raise Unusable("messages", "holds no assistant message")
    if len(placed) > 1:
        raise Unusable(
            "messages",
            f"{template.name} renders the {len(placed)} assistant turns of this completion "
            "differently once others follow. Make the completion one assistant message.",
        )
    return placed[0]


def _place_answer(template: ChatTemplate, side: Row, problem: Unusable) -> Placed:
    """An answer before which the template renders its prompt in another way than a sampler's.

    Raises:
        Unusable: `problem`, when the answer cannot be found either.
    """
    turns = trained_turns(side, Mask.all_assistant)
    draft = answer_draft(template, read_conversation(template, turns, side.tools))
    if draft is None:
        raise problem
    return place(template.codec, draft) or place_pieces(template, draft)


def _common_prefix(left: list[int], right: list[int]) -> list[int]:
    length = next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )
    return left[:length]


def no_template(row: Row, tokenizer: PreTrainedTokenizerBase) -> ConfigError:
    """What to say about a conversation that meets a tokenizer without a chat template."""
    return ConfigError(
        f"model.chat_template: the tokenizer of {tokenizer.name_or_path} has no chat template, but "
        f"{row.file}:{row.line} is a conversation. Set model.chat_template=<file.jinja>, or give "
        "prompt and completion as plain strings."
    )
