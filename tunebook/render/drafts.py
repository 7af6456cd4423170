"""From a conversation to the texts to train on, each checked against its own sampling prompt.

A draft is a text with the characters that carry loss. What cannot be verified is refused, with the
field at fault: a wrong mask is never made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from tunebook.config import Mask
from tunebook.render.chat_template import (
    LOST,
    OPENED_THINK,
    ChatTemplate,
    Message,
    TemplateRefusal,
    TurnEndKind,
    lost_calls,
    marked_turn_end,
    special_at_start,
)
from tunebook.render.conversation import (
    Conversation,
    Fix,
    Turn,
    Unusable,
    is_blank,
    look_up,
    not_shown,
    read_conversation,
    refuse_blanks,
    trained_turns,
    without_blank_think,
)

if TYPE_CHECKING:
    from tunebook.data.rows import Row


class Method(StrEnum):
    """How the trained tokens of a datum were found."""

    markers = "generation markers"
    prefixes = "token prefixes"
    per_turn = "one datum per assistant turn"
    plain = "plain text"


@dataclass(frozen=True, slots=True)
class Span:
    """Characters of a text that carry loss, the end of the turn included."""

    start: int
    """First character after the sampling prompt."""
    end: int
    weight: float
    end_only: bool
    """Only the last token, the end of the turn, is trained."""
    index: int
    """Of the message in the row."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A text to train on."""

    text: str
    spans: tuple[Span, ...]
    background: tuple[tuple[int, float], ...]
    """(first character, weight) of what lies outside the spans; empty = no loss there."""
    method: Method
    fixes: frozenset[Fix]


def draft_row(template: ChatTemplate, row: Row, *, mask: Mask, blanks_allowed: bool) -> list[Draft]:
    """The texts that a row trains on; none when nothing of it carries loss.

    Raises:
        Unusable: no verified way to render it.
    """
    turns = trained_turns(row, mask)
    if not turns:
        return []
    if not blanks_allowed:
        refuse_blanks(turns)
    conversation = read_conversation(template, turns, row.tools)
    draft = _marked_draft(template, conversation) or _whole_draft(template, conversation)
    if draft is None:
        return [*turn_drafts(template, conversation, mask)]
    if mask is Mask.all:
        background = _background(template, conversation, draft)
        if background is None:
            return [replace(draft, fixes=draft.fixes | {Fix.answers_only})]
        draft = replace(draft, background=background)
    return [draft]


def _targets(conversation: Conversation) -> list[int]:
    """Positions of the assistant turns that carry loss."""
    return [
        position
        for position, turn in enumerate(conversation.turns)
        if turn.weight and turn.message["role"] == "assistant"
    ]


def _span(turn: Turn, start: int, end: int) -> Span:
    return Span(start, end, turn.weight, is_blank(turn.message), turn.index)


def _marked_draft(template: ChatTemplate, conversation: Conversation) -> Draft | None:
    """The draft from generation markers, each turn checked against its own sampling prompt.

    Reasoning and tools are where templates rewrite earlier turns, so such conversations take the
    way that checks every turn.
    """
    turns = conversation.turns
    assistants = [p for p, turn in enumerate(turns) if turn.message["role"] == "assistant"]
    targets = _targets(conversation)
    profile = template.profile
    rewritten = {"reasoning_content", "tool_calls"}
    if (
        not profile.markers
        or not targets
        or conversation.tools
        or any(rewritten & turn.message.keys() for turn in turns)
        or assistants[0] == 0
    ):
        return None
    text = conversation.text
    marked = template.marked(conversation.spelled, conversation.tools)
    if len(marked) != len(assistants):
        return None
    spans: list[Span] = []
    for position, (start, end) in zip(assistants, marked, strict=True):
        stop = marked_turn_end(text, start, end, profile.turn_end.text)
        before = text[max(0, start - len(profile.generation_prompt)) : start]
        if stop is None or before != profile.generation_prompt:
            return None
        if position in targets:
            survives = _survives(turns[position].message, text[start:end])
            if not survives or text[:start] != _prompt(template, conversation, position, text):
                return None
            spans.append(_span(turns[position], start, stop))
    return Draft(text, tuple(spans), (), Method.markers, conversation.fixes)


def _whole_draft(template: ChatTemplate, conversation: Conversation) -> Draft | None:
    """The draft of the whole conversation, each turn checked against its own sampling prompt.

    None when the template renders a turn differently once others follow it.
    """
    text = conversation.text
    last = len(conversation.turns) - 1
    appended = ""
    spans: list[Span] = []
    for position in _targets(conversation):
        turn = conversation.turns[position]
        upto = text if position == last else _upto(template, conversation, position)
        prompt = None if upto is None else _prompt(template, conversation, position, upto)
        if upto is None or prompt is None:
            return None
        if not text.startswith(upto) or not upto.startswith(prompt):
            return None
        if not _survives(turn.message, upto[len(prompt) :]):
            return None
        following = "" if position == last else text[len(upto) :]
        found = _turn_end(template, turn.message, upto, len(prompt), following)
        if found is None or (position != last and found.appended):
            return None
        appended = found.appended
        spans.append(_span(turn, len(prompt), found.end))
    return Draft(text + appended, tuple(spans), (), Method.prefixes, conversation.fixes)


def turn_drafts(template: ChatTemplate, conversation: Conversation, mask: Mask) -> list[Draft]:
    """One draft for each trained assistant turn, rendered as the last of its conversation.

    Raises:
        Unusable: even so the template does not render a turn behind its own sampling prompt.
    """
    drafts: list[Draft] = []
    for position in _targets(conversation):
        draft = _turn_draft(template, conversation, position)
        if mask is Mask.all:
            draft = _with_first_prompt(draft, is_first=not drafts, turns=conversation.turns)
        drafts.append(draft)
    return drafts


def _with_first_prompt(draft: Draft, *, is_first: bool, turns: Sequence[Turn]) -> Draft:
    if is_first and all(turn.weight == 1 for turn in turns):
        return replace(draft, background=((0, 1.0),))
    return replace(draft, fixes=draft.fixes | {Fix.answers_only})


def _turn_draft(template: ChatTemplate, conversation: Conversation, position: int) -> Draft:
    turn = conversation.turns[position]
    last = position == len(conversation.turns) - 1
    text = conversation.text if last else _upto(template, conversation, position)
    prompt = None if text is None else _prompt(template, conversation, position, text)
    if text is None or prompt is None:
        raise _unverified(template, turn, text)
    context = look_up(template, conversation.turns[:position], conversation.tools, text)
    if context.missing is not None:
        raise not_shown(template, conversation.turns, context.missing)
    fixes = conversation.fixes - {Fix.cut_context}
    if context.is_cut:
        fixes = fixes | {Fix.cut_context}
    behind = text.startswith(prompt)
    if not behind or not _survives(turn.message, text[len(prompt) :]):
        if behind and _survives_without_blank_think(turn.message, text[len(prompt) :]):
            fixes = fixes | {Fix.left_out_blank_think}
        else:
            reopened = _behind_opened_think(turn.message, prompt, text)
            if reopened is None:
                raise _unverified(template, turn, text)
            reasoned = turn.message.get("reasoning_content", "").strip()
            text = reopened
            fixes = fixes | {Fix.opened_think if reasoned else Fix.closed_think}
    found = _turn_end(template, turn.message, text, len(prompt), "")
    if found is None:
        raise _unverified(template, turn, text)
    span = _span(turn, len(prompt), found.end)
    return Draft(text + found.appended, (span,), (), Method.per_turn, fixes)


def answer_draft(template: ChatTemplate, conversation: Conversation) -> Draft | None:
    """The draft of a conversation's last turn, found by the header printed in front of it.

    For pairs, whose prompt may be rendered in two ways: it asks only that the header and the turn
    are there, not that a sampling prompt begins the text.
    """
    turn = conversation.turns[-1]
    text = conversation.text
    header = template.profile.generation_prompt
    start = text.rfind(header) + len(header)
    if not header or header not in text:
        return None
    if not _survives_without_blank_think(turn.message, text[start:]):
        return None
    found = _turn_end(template, turn.message, text, start, "")
    if found is None:
        return None
    span = _span(turn, start, found.end)
    return Draft(text + found.appended, (span,), (), Method.per_turn, conversation.fixes)


def _behind_opened_think(message: Message, prompt: str, text: str) -> str | None:
    """The text with the reasoning put behind the `<think>` that a generation prompt ends with.

    Such templates print a finished turn without its reasoning; the sampler sees `<think>` and then
    what the model writes: reasoning, `</think>`, the answer.
    """
    opened = OPENED_THINK.search(prompt)
    if opened is None:
        return None
    bare = prompt[: opened.start()]
    if not text.startswith(bare) or "<think>" in text[len(bare) :]:
        return None
    reasoning = message.get("reasoning_content", "").strip()
    answer = text[len(bare) :]
    if without_blank_think(message["content"]) != message["content"]:
        # The line breaks behind its think block stand here already.
        answer = answer.lstrip("\n")
    rebuilt = f"{prompt}{reasoning}\n</think>\n\n{answer}"
    return rebuilt if _survives_without_blank_think(message, rebuilt[len(prompt) :]) else None


def _unverified(template: ChatTemplate, turn: Turn, text: str | None) -> Unusable:
    reasoning = turn.message.get("reasoning_content")
    if reasoning:
        lost = "drops the reasoning of this turn, so it would not be trained"
    elif text is not None and turn.message["content"].strip() not in text:
        lost = "leaves out a part of this answer, so it would not be trained"
    else:
        lost = (
            "does not print this turn behind its own generation prompt, so the trained tokens "
            "cannot be told from the prompt"
        )
    return Unusable(
        f"messages[{turn.index}].{'reasoning_content' if reasoning else 'content'}",
        f"{template.name} {lost}. Give the message weight 0, or set model.chat_template to one "
        "that prints it.",
    )


def _survives(message: Message, segment: str) -> bool:
    """Whether reasoning, whole answer and tool calls of a message stand in its part of the text."""
    reasoning = message.get("reasoning_content", "").strip()
    content = message["content"].strip()
    _, found, answer = segment.partition(reasoning) if reasoning else ("", "", segment)
    if found != reasoning or content not in answer:
        return False
    # A call that is only spoken of, in the reasoning or in the answer, is not there.
    ways = (
        [answer.partition(content), answer.rpartition(content)] if content else [("", "", answer)]
    )
    return any(lost_calls(f"{head}\n{tail}", [message]) < LOST for head, _, tail in ways)


def _survives_without_blank_think(message: Message, segment: str) -> bool:
    """The same where the template may leave out the empty think block of an answer."""
    bare = {**message, "content": without_blank_think(message["content"])}
    return _survives(bare, segment)


def _upto(template: ChatTemplate, conversation: Conversation, position: int) -> str | None:
    """The conversation up to and with one turn; None when the template raises."""
    try:
        return template.text(
            conversation.spelled[: position + 1], conversation.tools, generation_prompt=False
        )
    except TemplateRefusal:
        return None


def _prompt(
    template: ChatTemplate, conversation: Conversation, position: int, upto: str
) -> str | None:
    """The sampling prompt of one turn; None when the template raises.

    No template renders a prompt of no messages: before a first turn it is what `upto` begins with,
    through the generation prompt.
    """
    generation_prompt = template.profile.generation_prompt
    if position == 0:
        head, found, _ = upto.partition(generation_prompt) if generation_prompt else ("", "", "")
        return head + found if found else None
    try:
        return template.text(
            conversation.spelled[:position], conversation.tools, generation_prompt=True
        )
    except TemplateRefusal:
        return None


@dataclass(frozen=True, slots=True)
class _End:
    end: int
    appended: str


def _turn_end(
    template: ChatTemplate, message: Message, upto: str, start: int, following: str
) -> _End | None:
    """Where the turn at the end of `upto` ends, and what has to be put behind it.

    Args:
        start: first character of the turn.
        following: the text after the turn; empty for the last.
    """
    turn_end = template.profile.turn_end
    appended = turn_end.text_after_call if message.get("tool_calls") else turn_end.text
    if turn_end.kind is TurnEndKind.own:
        body = upto[start:].rstrip()
        specials = (turn_end.text, *template.codec.special_texts)
        return _End(start + len(body), "") if body.endswith(specials) else None
    if turn_end.kind is TurnEndKind.next_role and following:
        marker = special_at_start(template.codec, following)
        return None if marker is None else _End(len(upto) + len(marker), "")
    return _End(len(upto) + len(appended), appended)


def _background(
    template: ChatTemplate, conversation: Conversation, draft: Draft
) -> tuple[tuple[int, float], ...] | None:
    """Where the weight of the text outside the answers changes, for mask=all.

    None when messages have different weights and the template does not show where they end.
    """
    turns = conversation.turns
    if len({turn.weight for turn in turns}) == 1:
        return ((0, turns[0].weight),)
    changes = [(0, turns[0].weight)]
    starts = {span.index: span.start for span in draft.spans}
    for position in range(1, len(turns)):
        turn = turns[position]
        if turn.weight == changes[-1][1]:
            continue
        # An answer's header belongs to the prompt of the message before it.
        start = starts.get(turn.index)
        if start is None:
            before = _upto(template, conversation, position - 1)
            if before is None or not draft.text.startswith(before):
                return None
            start = len(before)
        changes.append((start, turn.weight))
    return tuple(changes)
