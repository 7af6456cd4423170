"""The two sides of a preference pair."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tunebook.config import Mask
from tunebook.errors import DataError, RowProblem
from tunebook.render.chat_template import ChatTemplate, Message, chat_template_of
from tunebook.render.codec import Codec
from tunebook.render.conversation import (
    Turn,
    Unusable,
    read_conversation,
    refuse_blanks,
    trained_turns,
)
from tunebook.render.drafts import answer_draft
from tunebook.render.placing import (
    Placed,
    place,
    place_completion,
    place_pieces,
    place_row,
    plain_prompt,
)
from tunebook.render.prompts import no_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tunebook.data.rows import Row

SIDES = ("chosen", "rejected")
"""In the order of their data."""


@dataclass(frozen=True, slots=True)
class PlacedPair:
    """The tokens of two answers to one prompt; either side is the full render of a conversation."""

    chosen: Placed
    rejected: Placed

    @property
    def sides(self) -> tuple[Placed, Placed]:
        """Chosen, rejected."""
        return self.chosen, self.rejected

    @property
    def prompts(self) -> tuple[list[int], list[int]]:
        """The tokens before the answer, of either side."""
        chosen, rejected = (side.tokens[: side.starts[0]] for side in self.sides)
        return chosen, rejected

    @property
    def num_shared(self) -> int:
        """Tokens of the prompt with which both sides begin."""
        chosen, rejected = self.prompts
        pairs = enumerate(zip(chosen, rejected, strict=False))
        shortest = min(len(chosen), len(rejected))
        return next((i for i, (one, other) in pairs if one != other), shortest)


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
    template = None if tokenizer.chat_template is None else chat_template_of(tokenizer)
    codec = Codec(tokenizer) if template is None else template.codec
    try:
        pair = place_pair(template, codec, row, blanks_allowed=True)
    except Unusable as problem:
        raise DataError(
            str(RowProblem(row.file, row.line, problem.field, problem.reason))
        ) from problem
    chosen, rejected = pair.sides
    shared = pair.num_shared
    return RenderedPair(
        prompt=chosen.tokens[:shared],
        chosen=chosen.tokens[shared:],
        rejected=rejected.tokens[shared:],
        chosen_mask=chosen.mask[shared:],
        rejected_mask=rejected.mask[shared:],
        truncated_prompt=pair.prompts[0] != pair.prompts[1],
    )


def place_pair(
    template: ChatTemplate | None, codec: Codec, row: Row, *, blanks_allowed: bool
) -> PlacedPair:
    """The tokens of both sides of a preference row.

    Args:
        template: None = the row is plain text.
        codec: of the tokenizer.
        row: a preference row.
        blanks_allowed: an answer may be empty; only its end of turn then carries loss.

    Raises:
        Unusable: a side that cannot be rendered or is blank, its field begins with the side; or
            two sides with the same tokens.
    """
    sides: list[Placed] = []
    for name, completion in zip(SIDES, (row.chosen, row.rejected), strict=True):
        try:
            sides.append(_place_side(template, codec, row, completion, blanks_allowed))
        except Unusable as problem:
            raise Unusable(f"{name}: {problem.field}", problem.reason) from problem
    chosen, rejected = sides
    if chosen.tokens == rejected.tokens:
        raise Unusable(
            "rejected", "renders to the tokens of chosen, so the pair teaches nothing; remove it"
        )
    return PlacedPair(chosen, rejected)


def side_row(row: Row, completion: list[Message]) -> Row:
    """One side of a preference row as the conversation it is, the prompt untrained."""
    return replace(row, messages=[*row.messages, *completion], num_prompt=len(row.messages))


def _place_side(
    template: ChatTemplate | None,
    codec: Codec,
    row: Row,
    completion: list[Message],
    blanks_allowed: bool,
) -> Placed:
    side = side_row(row, completion)
    if not blanks_allowed:
        refuse_blanks(trained_turns(side, Mask.all_assistant))
    if template is None:
        if not row.plain:
            raise no_template(row, codec.tokenizer)
        text = "".join(message["content"] for message in completion)
        turn = Turn(completion[-1], 1.0, len(row.messages))
        return place_completion(codec, plain_prompt(row.messages), text, turn)
    side = replace(side, plain=False)
    try:
        placed = place_row(template, side, mask=Mask.all_assistant, blanks_allowed=True)
    except Unusable as problem:
        if len(completion) > 1:
            raise
        return _place_answer(template, side, problem)
    if not placed:
        raise Unusable("messages", "holds no assistant message that is trained")
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
