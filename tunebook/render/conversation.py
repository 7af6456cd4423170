"""A conversation in the form that a chat template shows completely, and what of it is trained."""

from __future__ import annotations

import json
import re
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

THINK_CLOSE = "</think>"
BLANK_THINK = re.compile(r"\s*<think>\s*</think>")


class Fix(StrEnum):
    """What was done to a conversation so that the template shows all of it."""

    folded_system = "the system text was put in front of the first user message"
    merged_users = "user messages in a row were joined"
    inline_reasoning = "reasoning was written into the answer as <think>...</think>"
    opened_think = "reasoning was put behind the <think> that the generation prompt opens"
    closed_think = "no reasoning: the <think> that the generation prompt opens is closed at once"
    left_out_blank_think = "the template leaves out the empty think block of an answer"
    cut_context = (
        "the template shows of an earlier answer only what follows </think>, though it begins with "
        "no think block: later answers do not see all of it"
    )
    other_arguments = "tool-call arguments were given in the form this conversation needs"
    pieces = "prompt and answer were tokenised apart, since a token would span both"
    answers_only = (
        "mask=all: only the answers are trained, since the template renders the turns before them "
        "differently once others follow"
    )


WARNED_FIXES = frozenset({Fix.cut_context})
"""What a person should see before training."""


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
            found = look_up(template, candidate, tools, text)
            if found.is_cut:
                fixes = fixes | {Fix.cut_context}
            conversation = Conversation(tuple(candidate), tuple(spelled), text, tools, fixes)
            if found.missing is None:
                return conversation
            shown.append((found.missing, conversation))
    if not template.profile.system_role and _weights_differ(turns):
        raise _not_folded(template, turns)
    if shown:
        position, conversation = shown[0]
        raise not_shown(template, conversation.turns, position)
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


def _begins_with_system_and_user(turns: Sequence[Turn]) -> bool:
    return [turn.message["role"] for turn in turns[:2]] == ["system", "user"]


def _weights_differ(turns: Sequence[Turn]) -> bool:
    """Whether system and user message cannot be one, since one of them is trained more."""
    return _begins_with_system_and_user(turns) and turns[0].weight != turns[1].weight


def _fold_system(turns: Sequence[Turn]) -> list[Turn] | None:
    """None when there is nothing to fold; turns of different weight stay apart."""
    if not _begins_with_system_and_user(turns) or _weights_differ(turns):
        return None
    system, user = turns[0], turns[1]
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


@dataclass(frozen=True, slots=True)
class Found:
    """How much of its turns the text of a conversation shows."""

    missing: int | None
    """Position of the first turn that it does not show; -1 = the tools."""
    is_cut: bool
    """Of an answer it shows only what follows `</think>`."""


def look_up(template: ChatTemplate, turns: Sequence[Turn], tools: Tools, text: str) -> Found:
    """Which turns stand in a text, one behind the other: text in two turns has to be there twice.

    Reasoning is not looked for: a template may leave out that of earlier turns.
    """
    if tools and not template.profile.tools:
        return Found(-1, False)
    for tool in tools or ():
        function = tool.get("function", tool)
        parameters = (function.get("parameters") or {}).get("properties") or {}
        if any(name not in text for name in (function["name"], *parameters)):
            return Found(-1, False)
    # Where the search goes on if no answer was cut so far, and if one was; None = no such way.
    whole: int | None = 0
    cut: int | None = None
    for position, turn in enumerate(turns):
        message = turn.message
        start = min(at for at in (whole, cut) if at is not None)
        if _hides(template, message, text[start:]):
            return Found(position, whole is None)
        forms, rest = _whole_forms(message), _rest_forms(message)
        after_whole = _end_in(text, whole, forms)
        if after_whole is None and message["role"] == "system":
            after_whole = whole if _stands_elsewhere(text, turns, turn) else None
        cut = min(
            (
                stop
                for at, shown in ((cut, forms), (cut, rest), (whole, rest))
                if (stop := _end_in(text, at, shown)) is not None
            ),
            default=None,
        )
        whole = after_whole
        if whole is None and cut is None:
            return Found(position, False)
    return Found(None, whole is None)


def _hides(template: ChatTemplate, message: Message, text: str) -> bool:
    """Whether the template does not show a tool's result, or calls of tools, in this text."""
    profile = template.profile
    if message["role"] == "tool":
        return not profile.tool_results
    if not message.get("tool_calls"):
        return False
    broken = profile.escapes_arguments or not profile.tool_calls
    return broken or lost_calls(text, [message]) >= LOST


def _whole_forms(message: Message) -> list[str]:
    """The texts that show all of a message: templates trim it, leave out an empty think block, and
    print a tool's result as JSON text."""
    content = message["content"]
    forms = [content.strip()]
    if message["role"] == "assistant":
        forms.append(without_blank_think(content).strip())
    if message["role"] == "tool":
        for result in (content, content.strip()):
            forms += [json.dumps(result, ensure_ascii=escape)[1:-1] for escape in (False, True)]
    return forms


def _rest_forms(message: Message) -> list[str]:
    """What a template that cuts answers at `</think>` shows of one."""
    if message["role"] != "assistant" or THINK_CLOSE not in message["content"]:
        return []
    rest = message["content"].rpartition(THINK_CLOSE)[2].strip()
    return [rest] if rest else []


def _end_in(text: str, start: int | None, forms: Sequence[str]) -> int | None:
    """Where the form that a text holds first behind `start` ends."""
    if start is None:
        return None
    found = [at + len(form) for form in forms if (at := text.find(form, start)) >= 0]
    return min(found, default=None)


def _stands_elsewhere(text: str, turns: Sequence[Turn], turn: Turn) -> bool:
    """Whether a text holds a turn more often than the other turns do: some templates move every
    system message to the front."""
    content = turn.message["content"].strip()
    others = [other.message["content"] for other in turns if other is not turn]
    return text.count(content) > sum(other.count(content) for other in others)


def without_blank_think(content: str) -> str:
    """An answer without the empty think block that it begins with."""
    block = BLANK_THINK.match(content)
    return content if block is None else content[block.end() :].lstrip("\n")


def not_shown(template: ChatTemplate, turns: Sequence[Turn], position: int) -> Unusable:
    """The problem of a turn that the template does not show; position -1 = the tools."""
    if position < 0:
        return Unusable(
            "tools",
            f"{template.name} does not show the tools, so a model would be trained on calls to "
            "functions it never saw. Set model.chat_template to one with tools, or drop them.",
        )
    turn = turns[position]
    field = f"messages[{turn.index}]"
    if turn.message["role"] == "tool":
        return Unusable(
            f"{field}.content",
            f"{template.name} does not show tool results, so a model would be trained on answers "
            "to results it never saw. Set model.chat_template to one that does, or leave the row "
            "out.",
        )
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


def _not_folded(template: ChatTemplate, turns: Sequence[Turn]) -> Unusable:
    system, user = turns[0], turns[1]
    return Unusable(
        f"messages[{system.index}].weight",
        f"is {system.weight:g}, but {template.name} has no system messages, and in front of the "
        f"user message the text would be trained with weight {user.weight:g}. Give both messages "
        "the same weight, leave the system message out, or set model.chat_template.",
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
