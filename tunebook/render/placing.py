"""From a draft to tokens: where the trained characters became tokens, verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tunebook.config import Mask
from tunebook.render.chat_template import (
    ChatTemplate,
    Message,
)
from tunebook.render.codec import Codec, Encoded
from tunebook.render.conversation import (
    Fix,
    Turn,
    Unusable,
    read_conversation,
    refuse_blanks,
    trained_turns,
)
from tunebook.render.drafts import Draft, Method, Span, draft_row, turn_drafts

if TYPE_CHECKING:
    from tunebook.data.rows import Row


@dataclass(frozen=True, slots=True)
class Placed:
    """The tokens of a draft."""

    tokens: list[int]
    """`[T + 1]`"""
    mask: list[float]
    """`[T + 1]`, aligned with `tokens`; the first is never scored."""
    draft: Draft
    starts: tuple[int, ...]
    """First token of each span."""
    ends: tuple[int, ...]
    """Token after the end of each span."""


def place_row(
    template: ChatTemplate, row: Row, *, mask: Mask, blanks_allowed: bool
) -> list[Placed]:
    """The data of a row, in tokens.

    Raises:
        Unusable: no verified way to render it.
    """
    drafts = draft_row(template, row, mask=mask, blanks_allowed=blanks_allowed)
    placed = [place(template.codec, draft) for draft in drafts]
    if all(item is not None for item in placed):
        return [item for item in placed if item is not None]
    if len(drafts) == 1 and len(drafts[0].spans) > 1:
        # A sampler tokenises every later prompt whole, so one sequence cannot serve all turns.
        conversation = read_conversation(template, trained_turns(row, mask), row.tools)
        drafts = turn_drafts(template, conversation, mask)
        placed = [place(template.codec, draft) for draft in drafts]
    return [
        item or place_pieces(template, draft) for item, draft in zip(placed, drafts, strict=True)
    ]


def place(codec: Codec, draft: Draft) -> Placed | None:
    """The tokens of a draft; None when a token spans the start of a trained part."""
    encoded = codec.encode(draft.text)
    starts: list[int] = []
    ends: list[int] = []
    for span in draft.spans:
        start = codec.num_tokens_before(encoded, span.start)
        end = codec.num_tokens_before(encoded, span.end)
        if start is None or end is None or start >= end:
            return None
        starts.append(start)
        ends.append(end)
    background = _background_tokens(codec, encoded, draft)
    return _weighted(encoded.ids, draft, background, starts, ends)


def _background_tokens(codec: Codec, encoded: Encoded, draft: Draft) -> list[tuple[int, float]]:
    """(first token, weight) of the text outside the spans."""
    changes: list[tuple[int, float]] = []
    for char, weight in draft.background:
        token = codec.num_tokens_before(encoded, char)
        # Where a token spans the place, it goes with what stands before it.
        changes.append((len(codec.ids(draft.text[:char])) if token is None else token, weight))
    return changes


def _weighted(
    ids: list[int],
    draft: Draft,
    background: list[tuple[int, float]],
    starts: list[int],
    ends: list[int],
) -> Placed:
    mask = [0.0] * len(ids)
    for token, weight in background:
        mask[token:] = [weight] * (len(mask) - token)
    for span, start, end in zip(draft.spans, starts, ends, strict=True):
        mask[start:end] = [0.0 if span.end_only else span.weight] * (end - start)
        mask[end - 1] = span.weight
    return Placed(ids, mask, draft, tuple(starts), tuple(ends))


def place_pieces(template: ChatTemplate, draft: Draft) -> Placed:
    """The draft's prompt, answer and rest tokenised apart: what a sampler would have seen.

    Raises:
        Unusable: the tokens do not decode to the text.
    """
    codec = template.codec
    (span,) = draft.spans
    prompt = draft.text[: span.start]
    answer = draft.text[span.start : span.end]
    rest = draft.text[span.end :]
    before = codec.encode(prompt)
    ids = list(before.ids)
    start = len(ids)
    answer_ids = codec.continuation(prompt, ids, answer)
    rest_ids = None
    if answer_ids is not None:
        ids = [*ids, *answer_ids]
        rest_ids = codec.continuation(prompt + answer, ids, rest) if rest else []
    if answer_ids is None or rest_ids is None:
        raise Unusable(
            f"messages[{span.index}].content",
            "the tokenizer joins the end of the prompt with this answer, and cannot write the "
            "answer apart from it. Begin the answer differently, or set model.chat_template.",
        )
    end = len(ids)
    # The prompt is a text of its own here, so its last weight also goes on behind the answer.
    in_prompt = replace(draft, text=prompt)
    background = _background_tokens(codec, before, in_prompt)
    pieces = replace(draft, fixes=draft.fixes | {Fix.pieces})
    return _weighted([*ids, *rest_ids], pieces, background, [start], [end])


# Plain text.


def plain_ids(codec: Codec, prompt: str) -> list[int]:
    """The tokens of a plain prompt, with the begin token where the tokenizer adds one itself."""
    tokenizer: Any = codec.tokenizer
    bos: int | None = tokenizer.bos_token_id
    with_added = tokenizer("a")["input_ids"]
    ids = list(codec.ids(prompt)) if prompt else []
    if bos is None or with_added[:1] != [bos] or codec.ids("a")[:1] == [bos]:
        return ids
    return ids if ids[:1] == [bos] else [bos, *ids]


def plain_prompt(messages: Sequence[Message]) -> str:
    """The text of prompt messages without a chat template."""
    texts = [message["content"] for message in messages]
    return "\n\n".join(texts)


def place_plain(codec: Codec, row: Row, *, mask: Mask, blanks_allowed: bool) -> list[Placed]:
    """The datum of a plain prompt/completion row: prompt, completion, one end token.

    Raises:
        Unusable: a blank completion, or a tokenizer without an end token.
    """
    num_prompt = len(row.messages) - 1 if row.num_prompt is None else row.num_prompt
    turns = trained_turns(row, mask)
    trained = [turn for turn in turns[num_prompt:] if turn.weight]
    if not trained:
        return []
    if not blanks_allowed:
        refuse_blanks(trained)
    prompt = plain_prompt(row.messages[:num_prompt])
    completion = "".join(turn.message["content"] for turn in turns[num_prompt:])
    return [place_completion(codec, prompt, completion, trained[-1])]


def place_completion(codec: Codec, prompt: str, completion: str, turn: Turn) -> Placed:
    """A plain completion behind its prompt, ended by exactly one end token.

    Raises:
        Unusable: the tokenizer has no end token, or joins prompt and completion for good.
    """
    eos, eos_id = codec.tokenizer.eos_token, codec.tokenizer.eos_token_id
    if eos is None or not isinstance(eos_id, int):
        raise Unusable("completion", "the tokenizer has no end token to train")
    completion = completion.removesuffix(str(eos))
    prompt_ids = plain_ids(codec, prompt)
    added = len(prompt_ids) - len(codec.ids(prompt)) if prompt else len(prompt_ids)
    whole = [*prompt_ids[:added], *codec.ids(prompt + completion)]
    fixes: frozenset[Fix] = frozenset()
    if whole[: len(prompt_ids)] != prompt_ids or (prompt and not completion):
        apart = codec.continuation(prompt, prompt_ids[added:], completion) if completion else []
        if apart is None:
            raise Unusable(
                "completion",
                "the tokenizer joins the end of the prompt with the completion. Begin the "
                "completion differently.",
            )
        whole = [*prompt_ids, *apart]
        fixes = frozenset({Fix.pieces}) if completion else fixes
    tokens = [*whole, eos_id]
    text = f"{codec.decode(prompt_ids[:added])}{prompt}{completion}{eos}"
    start = len(text) - len(completion) - len(str(eos))
    span = Span(start, len(text), turn.weight, not completion.strip(), turn.index)
    draft = Draft(text, (span,), (), Method.plain, fixes)
    return _weighted(tokens, draft, [], [len(prompt_ids)], [len(tokens)])
