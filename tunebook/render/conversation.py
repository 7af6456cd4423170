"""A conversation in the form that a chat template shows completely, and what of it is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from tunebook.config import Mask
from tunebook.render.chat_template import (
    INLINE,
    LOST,
    ChatTemplate,
    Message,
    TemplateRefusal,
    Tools,
    lost_calls,
)

if TYPE_CHECKING:
    from tunebook.data.rows import Row


class Fix(StrEnum):
    """What was done to a conversation so that the template shows all of it."""

    folded_system = "the system text was put in front of the first user message"
    merged_users = "user messages in a row were joined"
    inline_reasoning = "reasoning was written into the answer as <think>...</think>"
    opened_think = "reasoning was put behind the <think> that the generation prompt opens"
    other_arguments = "tool-call arguments were given in the form this conversation needs"
    pieces = "prompt and answer were tokenised apart, since a token would span both"
    answers_only = (
        "mask=all: only the answers are trained, since the template renders the turns before them "
        "differently once others follow"
    )


class Unusable(Exception):
    """A row that cannot be rendered: the field at fault and what to do."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(field, reason)
        self.field = field
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Turn:
    """One message as the template is given it."""

    message: Message
    """As the row has it."""
    weight: float
    index: int
    """Of the message in the row."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The turns of a row in the form that the template shows completely."""

    turns: tuple[Turn, ...]
    spelled: tuple[Message, ...]
    """What the template is given, one for each turn."""
    text: str
    tools: Tools
    fixes: frozenset[Fix]


def message_weights(row: Row, mask: Mask) -> list[float]:
    """The loss weight of every message of a row, from the mask and the row's own marks."""
    roles = [message["role"] for message in row.messages]
    last = max((i for i, role in enumerate(roles) if role == "assistant"), default=-1)
    weights: list[float] = []
    for i, message in enumerate(row.messages):
        chosen = {
            Mask.all: True,
            Mask.all_assistant: roles[i] == "assistant",
            Mask.last_assistant: i == last,
        }[mask]
        is_prompt = row.num_prompt is not None and i < row.num_prompt
        trained = message.get("trained")
        weights.append(0.0 if is_prompt or not chosen else 1.0 if trained is None else trained)
    return [float(weight) for weight in weights]


def is_blank(message: Message) -> bool:
    """Whether an assistant message has nothing to train but the end of the turn."""
    return not (
        message["content"].strip()
        or message.get("reasoning_content", "").strip()
        or message.get("tool_calls")
    )


def trained_turns(row: Row, mask: Mask) -> list[Turn]:
    """The turns through the last trained one: no later message changes a trained log-prob."""
    weights = message_weights(row, mask)
    last_trained = max((i for i, weight in enumerate(weights) if weight), default=-1)
    return [Turn(row.messages[i], weights[i], i) for i in range(last_trained + 1)]


def refuse_blanks(turns: Sequence[Turn]) -> None:
    for turn in turns:
        if turn.weight and turn.message["role"] == "assistant" and is_blank(turn.message):
            raise Unusable(
                f"messages[{turn.index}].content",
                "is a blank answer. Write one, give the message weight 0, or set "
                "data.on_blank_answer=end_token to train only the end of the turn.",
            )


# The conversation as the template can show it.


def read_conversation(
    template: ChatTemplate, turns: Sequence[Turn], tools: Tools, *, generation_prompt: bool = False
) -> Conversation:
    """The turns in the form that the template shows completely.

    Raises:
        Unusable: in no form does it show all of them.
    """
    refusal: TemplateRefusal | None = None
    shown: list[tuple[int, Conversation]] = []
    strings = template.profile.string_arguments
    for candidate, fixes in _candidates(template, turns):
        for as_strings in (strings, not strings) if _has_calls(candidate) else (strings,):
            spelled = template.messages(
                [turn.message for turn in candidate], string_arguments=as_strings
            )
            try:
                text = template.text(spelled, tools, generation_prompt=generation_prompt)
            except TemplateRefusal as error:
                refusal = refusal or error
                continue
            if as_strings != strings:
                fixes = fixes | {Fix.other_arguments}
            if template.profile.reasoning_key == INLINE and _has_reasoning(candidate):
                fixes = fixes | {Fix.inline_reasoning}
            conversation = Conversation(tuple(candidate), tuple(spelled), text, tools, fixes)
            missing = _first_missing(template, conversation)
            if missing is None:
                return conversation
            shown.append((missing, conversation))
    if shown:
        raise _not_shown(template, *shown[0])
    assert refusal is not None
    raise _refused(template, turns, tools, refusal)


def _candidates(
    template: ChatTemplate, turns: Sequence[Turn]
) -> list[tuple[Sequence[Turn], frozenset[Fix]]]:
    """The turns as they are, then changed in the ways that strict templates ask for."""
    as_is = (turns, frozenset[Fix]())
    folded = _fold_system(turns)
    with_fold = [] if folded is None else [(folded, frozenset({Fix.folded_system}))]
    if not template.profile.system_role and with_fold:
        ways = [*with_fold, as_is]
    else:
        ways = [as_is, *with_fold]
    merged = [
        (merged, fixes | {Fix.merged_users})
        for candidate, fixes in ways
        if (merged := _merge_users(candidate)) is not None
    ]
    return [*ways, *merged]


def _fold_system(turns: Sequence[Turn]) -> list[Turn] | None:
    if len(turns) < 2 or turns[0].message["role"] != "system":
        return None
    system, user = turns[0], turns[1]
    if user.message["role"] != "user":
        return None
    texts = [system.message["content"], user.message["content"]]
    content = "\n\n".join(text for text in texts if text)
    return [replace(user, message={**user.message, "content": content}), *turns[2:]]


def _merge_users(turns: Sequence[Turn]) -> list[Turn] | None:
    """None when there is nothing to merge; turns of different weight stay apart."""
    merged: list[Turn] = []
    for turn in turns:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.message["role"] == turn.message["role"] == "user"
            and last.weight == turn.weight
        ):
            content = f"{last.message['content']}\n\n{turn.message['content']}"
            merged[-1] = replace(last, message={**last.message, "content": content})
        else:
            merged.append(turn)
    return merged if len(merged) < len(turns) else None


def _has_calls(turns: Sequence[Turn]) -> bool:
    return any(turn.message.get("tool_calls") for turn in turns)


def _has_reasoning(turns: Sequence[Turn]) -> bool:
    return any(turn.message.get("reasoning_content") for turn in turns)


def _first_missing(template: ChatTemplate, conversation: Conversation) -> int | None:
    """Position of the first turn whose text the template does not print; -1 = the tools."""
    text = conversation.text
    for tool in conversation.tools or ():
        function = tool.get("function", tool)
        parameters = (function.get("parameters") or {}).get("properties") or {}
        if any(name not in text for name in (function["name"], *parameters)):
            return -1
    for position, turn in enumerate(conversation.turns):
        message = turn.message
        if message["role"] != "tool" and not prints(text, message["content"]):
            return position
        calls = message.get("tool_calls")
        if calls and (template.profile.escapes_arguments or lost_calls(text, [message]) >= LOST):
            return position
    return None


def prints(text: str, content: str) -> bool:
    """Templates may trim a message, and drop an empty think block in front of an answer."""
    return content.strip() in text or content.split("</think>")[-1].strip() in text


def _not_shown(template: ChatTemplate, position: int, conversation: Conversation) -> Unusable:
    if position < 0:
        return Unusable(
            "tools",
            f"{template.name} does not show the tools, so a model would be trained on calls to "
            "functions it never saw. Set model.chat_template to one with tools, or drop them.",
        )
    turn = conversation.turns[position]
    field = f"messages[{turn.index}]"
    if turn.message.get("tool_calls"):
        return Unusable(
            f"{field}.tool_calls",
            f"{template.name} does not print names and arguments of tool calls as they are. Set "
            "model.chat_template to one that does.",
        )
    return Unusable(
        f"{field}.content",
        f"{template.name} does not print this {turn.message['role']} message. Set "
        "model.chat_template to one that does, or leave the message out.",
    )


def _refused(
    template: ChatTemplate, turns: Sequence[Turn], tools: Tools, refusal: TemplateRefusal
) -> Unusable:
    """The problem, at the first turn with which the template raises."""
    spelled = template.messages(
        [turn.message for turn in turns], string_arguments=template.profile.string_arguments
    )
    culprit = turns[-1]
    for stop in range(1, len(turns)):
        try:
            template.text(spelled[:stop], tools, generation_prompt=False)
        except TemplateRefusal as error:
            # A template may also raise because a conversation is not over yet.
            if str(error) == str(refusal):
                culprit = turns[stop - 1]
                break
    return Unusable(
        f"messages[{culprit.index}].role",
        f"{template.name} refuses this {culprit.message['role']} message: {refusal}. Reorder the "
        "conversation, leave the message out, or set model.chat_template.",
    )
