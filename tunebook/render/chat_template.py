"""The text side of a chat template: what it prints, how it ends a turn, what it cannot show."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from tunebook.errors import ConfigError
from tunebook.render.codec import Codec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
INLINE = "inline"
LOST = 1000
REFUSED = 100 * LOST
OPENED_THINK = re.compile(r"<think>\s*$")
DATE = "strftime_now"
GENERATION_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class TemplateRefusal(Exception):
    """The chat template raised while it rendered a conversation."""


class TurnEndKind(StrEnum):
    """Where a template says that an assistant turn is over."""

    own = "own"
    """A special token at the end of the turn."""
    next_role = "next_role"
    """The special token that begins the next turn."""
    eos = "eos"
    """Nowhere: the tokenizer's end token is put after the turn."""


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """The end of an assistant turn."""

    kind: TurnEndKind
    text: str
    """What follows the last turn; for `own` the end token itself, which the template prints."""
    text_after_call: str
    """The same after a turn that calls tools."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What rendering a few made-up conversations says about a template."""

    generation_prompt: str
    """What `add_generation_prompt` prints."""
    turn_end: TurnEnd
    reasoning_key: str | None
    """Message key the template reads reasoning from; `inline` = only inside the content;
    None = it prints reasoning from nowhere."""
    string_arguments: bool
    """Tool-call arguments have to be given as JSON text."""
    escapes_arguments: bool
    """Either way, it prints them wrongly: as JSON text inside JSON text, or as a Python dict."""
    system_role: bool
    tool_calls: bool
    """It prints names and arguments of tool calls."""
    tools: bool
    """It prints the functions that a model may call."""
    tool_results: bool
    """It prints what a tool returned."""
    markers: bool
    """Generation markers are there and agree with what token prefixes say."""
    notes: tuple[str, ...]


class ChatTemplate:
    """A tokenizer's chat template with its codec and its profile."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.codec = Codec(tokenizer)
        self.name = f"the chat template of {tokenizer.name_or_path or type(tokenizer).__name__}"
        self.profile = _profile(self)

    @property
    def prints_date(self) -> bool:
        """Whether its text depends on the day."""
        return DATE in str(self.tokenizer.chat_template)

    def text(self, messages: Sequence[Message], tools: Tools, *, generation_prompt: bool) -> str:
        """The text of a conversation, exactly as the template prints it.

        Raises:
            TemplateRefusal: the template raised.
        """
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=cast(Any, tools),
                add_generation_prompt=generation_prompt,
                tokenize=False,
            )
        except (
            TemplateError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            IndexError,
        ) as error:
            raise TemplateRefusal(" ".join(str(error).split()) or type(error).__name__) from error
        assert isinstance(text, str)
        return text

    def marked(self, messages: Sequence[Message], tools: Tools) -> list[tuple[int, int]]:
        """(start, end) characters of what the template marks as generated."""
        from transformers.utils.chat_template_utils import render_jinja_template

        options: dict[str, Any] = {
            **self.tokenizer.special_tokens_map,
            "tools": tools,
            "chat_template": self.tokenizer.get_chat_template(tools=cast(Any, tools)),
            "return_assistant_tokens_mask": True,
        }
        _, spans = render_jinja_template(conversations=[list(messages)], **options)
        return [(int(start), int(end)) for start, end in spans[0]]

    def messages(self, messages: Sequence[Message], *, string_arguments: bool) -> list[Message]:
        """The messages in the spelling that the template reads."""
        return [
            _spelled(message, self.profile.reasoning_key, string_arguments=string_arguments)
            for message in messages
        ]


def chat_template_of(tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    """The tokenizer's chat template, profiled once.

    Raises:
        ConfigError: it cannot render a user and an assistant message.
    """
    special = json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)
    return _chat_template(tokenizer, template_json(tokenizer) + special)


def template_json(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer's chat template, or its named templates, as JSON text."""
    return json.dumps(tokenizer.chat_template, sort_keys=True)


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """8 hex digits that name a version of a chat template."""
    return hashlib.sha256(template_json(tokenizer).encode()).hexdigest()[:8]


def inline_reasoning(reasoning: str, content: str) -> str:
    """Reasoning and answer as one text."""
    return f"<think>\n{reasoning.strip()}\n</think>\n\n{content}"


@lru_cache(maxsize=4)
def _chat_template(tokenizer: PreTrainedTokenizerBase, identity: str) -> ChatTemplate:
    return ChatTemplate(tokenizer)


def _spelled(message: Message, reasoning_key: str | None, *, string_arguments: bool) -> Message:
    spelled = {
        key: value for key, value in message.items() if key != "trained" and value is not None
    }
    reasoning = spelled.pop("reasoning_content", "")
    if reasoning and reasoning_key == INLINE:
        spelled["content"] = inline_reasoning(reasoning, spelled.get("content", ""))
    elif reasoning:
        spelled[reasoning_key or REASONING_KEYS[0]] = reasoning
    if string_arguments and spelled.get("tool_calls"):
        spelled["tool_calls"] = [_with_string_arguments(call) for call in spelled["tool_calls"]]
    return spelled


def _with_string_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


# What follows finds the profile. The words are made up so that they stand nowhere in a template.

USER: Message = {"role": "user", "content": "Quorl the bivvat."}
ANSWER: Message = {"role": "assistant", "content": "Zemly tover."}
SYSTEM: Message = {"role": "system", "content": "Ploome hastig."}
REASONING = "Fyndal grue."
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "type": "function",
            "id": "abcdefghi",
            "function": {"name": "wemble_town", "arguments": {"krill_name": "Oslbo"}},
        }
    ],
}
RESULT: Message = {
    "role": "tool",
    "tool_call_id": "abcdefghi",
    "name": "wemble_town",
    "content": "Drissle.",
}
TOOLS: Tools = [
    {
        "type": "function",
        "function": {
            "name": "wemble_town",
            "description": "Wembles.",
            "parameters": {"type": "object", "properties": {"krill_name": {"type": "string"}}},
        },
    }
]


def _profile(template: ChatTemplate) -> Profile:
    notes: list[str] = []
    try:
        prompt = template.text([USER], None, generation_prompt=True)
        shown = template.text([USER], None, generation_prompt=False)
        whole = template.text([USER, ANSWER], None, generation_prompt=False)
    except TemplateRefusal as error:
        raise ConfigError(
            f"{template.name} cannot render a user and an assistant message: {error}. Set "
            "model.chat_template=<file.jinja>, or model.chat_template=none for plain text rows."
        ) from error
    generation_prompt = prompt.removeprefix(shown)
    if not generation_prompt:
        notes.append(
            "the template prints no generation prompt: what it prints in front of an answer is "
            "trained, since a sampled answer has to begin with it"
        )
    if _prints_unasked(template, shown, whole, generation_prompt):
        raise ConfigError(
            f"{template.name} prints a generation prompt after an answer, unasked. Correct it, or "
            "set model.chat_template=<file.jinja>."
        )
    template.codec.trust_breaks(_longest_text(template, whole))
    turn_end = _find_turn_end(template, whole)
    if turn_end.kind is TurnEndKind.next_role:
        notes.append(
            f"the template ends a turn with the next role's marker, so {turn_end.text!r} is "
            "trained as the end of every turn, after the last one too"
        )
    if turn_end.kind is TurnEndKind.eos:
        notes.append(
            f"the template has no end of turn, so {turn_end.text!r} is put after every trained "
            "turn, one datum for each"
        )
    lost = {strings: _lost_of_call(template, strings=strings) for strings in (False, True)}
    profile = Profile(
        generation_prompt=generation_prompt,
        turn_end=turn_end,
        reasoning_key=_find_reasoning_key(template),
        string_arguments=lost[True] < lost[False],
        escapes_arguments=0 < min(lost.values()) < LOST,
        system_role=_shows_system(template),
        tool_calls=min(lost.values()) < LOST or min(lost.values()) == REFUSED,
        tools=_shows_tools(template),
        tool_results=_shows_tool_results(template),
        markers=False,
        notes=tuple(notes),
    )
    return replace(profile, markers=_markers_agree(template, profile))


def _prints_unasked(template: ChatTemplate, shown: str, whole: str, generation_prompt: str) -> bool:
    """Whether the header of an assistant turn follows a conversation that is over.

    Args:
        shown: a user message.
        whole: the same and an answer.
    """
    if generation_prompt:
        return whole.endswith(generation_prompt)
    after_user = shown.rpartition(USER["content"])[2]
    between, _, after_answer = whole.removeprefix(shown).partition(ANSWER["content"])
    is_header = after_answer.strip() not in ("", *template.codec.special_texts)
    return not between.strip() and after_user == after_answer and is_header


def _longest_text(template: ChatTemplate, shorter: str) -> str:
    try:
        return template.text([USER, ANSWER, USER, ANSWER], None, generation_prompt=True)
    except TemplateRefusal:
        return shorter


def _find_turn_end(template: ChatTemplate, whole: str) -> TurnEnd:
    own = _special_at_end(template.codec, whole.rstrip())
    if own is not None and not str(ANSWER["content"]).endswith(own):
        return TurnEnd(TurnEndKind.own, own, own)
    following = _following_special(template, [USER, ANSWER], USER, None)
    if following is not None:
        after_call = _following_special(template, [USER, CALL], RESULT, TOOLS) or following
        return TurnEnd(TurnEndKind.next_role, following, after_call)
    eos = template.tokenizer.eos_token
    if eos is None:
        raise ConfigError(
            f"{template.name} prints no token at the end of a turn and the tokenizer has no end "
            "token, so a model could not learn to stop. Set model.chat_template=<file.jinja>."
        )
    return TurnEnd(TurnEndKind.eos, str(eos), str(eos))


def _special_at_end(codec: Codec, text: str) -> str | None:
    return next((token for token in codec.special_texts if text.endswith(token)), None)


def special_at_start(codec: Codec, text: str) -> str | None:
    """The special token that a text begins with after white space, with that white space."""
    bare = text.lstrip()
    token = next((token for token in codec.special_texts if bare.startswith(token)), None)
    return None if token is None else text[: len(text) - len(bare)] + token


def _following_special(
    template: ChatTemplate, messages: list[Message], following: Message, tools: Tools
) -> str | None:
    try:
        before = template.text(messages, tools, generation_prompt=False)
        after = template.text([*messages, following], tools, generation_prompt=False)
    except TemplateRefusal:
        return None
    if not after.startswith(before):
        return None
    return special_at_start(template.codec, after[len(before) :])


def _find_reasoning_key(template: ChatTemplate) -> str | None:
    reasoned = {**ANSWER, "reasoning_content": REASONING}
    for key in (*REASONING_KEYS, INLINE):
        spelled = _spelled(reasoned, key, string_arguments=False)
        try:
            text = template.text([USER, spelled], None, generation_prompt=False)
        except TemplateRefusal:
            continue
        if REASONING in text:
            return key
    return None


def _lost_of_call(template: ChatTemplate, *, strings: bool) -> int:
    spelled = _spelled(CALL, None, string_arguments=strings)
    try:
        text = template.text([USER, spelled], TOOLS, generation_prompt=False)
    except TemplateRefusal:
        return REFUSED
    return lost_calls(text, [CALL])


def _shows_system(template: ChatTemplate) -> bool:
    try:
        text = template.text([SYSTEM, USER, ANSWER], None, generation_prompt=False)
    except TemplateRefusal:
        return False
    return SYSTEM["content"] in text


def _shows_tools(template: ChatTemplate) -> bool:
    """Whether names and parameters of functions are printed without a call that holds them."""
    for messages in ([USER, ANSWER], [SYSTEM, USER, ANSWER]):
        with suppress(TemplateRefusal):
            text = template.text(messages, TOOLS, generation_prompt=False)
            if "wemble_town" in text and "krill_name" in text:
                return True
    return False


def _shows_tool_results(template: ChatTemplate) -> bool:
    """Whether a tool's result is printed in any conversation; True also if the template refuses
    them all, since then it says so itself."""
    texts: list[str] = []
    for call, tools in ((CALL, TOOLS), (ANSWER, None)):
        for strings in (False, True):
            spelled = _spelled(call, None, string_arguments=strings)
            messages = [USER, spelled, RESULT, ANSWER]
            with suppress(TemplateRefusal):
                texts.append(template.text(messages, tools, generation_prompt=False))
    return not texts or any(RESULT["content"] in text for text in texts)


def _markers_agree(template: ChatTemplate, profile: Profile) -> bool:
    """Whether the marked spans are the answers, right after the prompt, in two turns."""
    source = template.tokenizer.get_chat_template()
    if not GENERATION_BLOCK.search(source) or profile.turn_end.kind is not TurnEndKind.own:
        return False
    messages = [USER, ANSWER, USER, ANSWER]
    try:
        whole = template.text(messages, None, generation_prompt=False)
        prefixes = [
            (
                template.text(messages[:i], None, generation_prompt=True),
                template.text(messages[: i + 1], None, generation_prompt=False),
            )
            for i in (1, 3)
        ]
        spans = template.marked(messages, None)
    except TemplateRefusal:
        return False
    return len(spans) == len(prefixes) and all(
        whole.startswith(upto)
        and upto.startswith(prompt)
        and start == len(prompt)
        and marked_turn_end(whole, start, end, profile.turn_end.text) is not None
        for (start, end), (prompt, upto) in zip(spans, prefixes, strict=True)
    )


def marked_turn_end(text: str, start: int, end: int, end_token: str) -> int | None:
    """Character after the end token of a marked span, which may stand in it or right after it."""
    inside = text[start:end].rstrip()
    if inside.endswith(end_token):
        return start + len(inside)
    after = text[end : end + len(end_token) + 2].lstrip()
    return text.index(end_token, end) + len(end_token) if after.startswith(end_token) else None


# What a template may lose of a tool call.


def lost_calls(text: str, messages: Sequence[Message]) -> int:
    """Names and values of tool calls missing in a text (`LOST` each), or escaped twice (1 each)."""
    score = 0
    for message in messages:
        for call in message.get("tool_calls") or ():
            function = call["function"]
            arguments = function["arguments"]
            wanted = [function["name"], *arguments]
            score += LOST * sum(not _stands_in(text, value) for value in wanted)
            score += LOST * sum(not _stands_in(text, value) for value in _leaves(arguments))
            score += _escaped_twice(text, arguments)
    return score


def _stands_in(text: str, value: str) -> bool:
    return (
        value in text
        or json.dumps(value, ensure_ascii=False)[1:-1] in text
        or json.dumps(value)[1:-1] in text
    )


def _leaves(value: Any) -> list[str]:
    """Every string and number inside a JSON value, as text."""
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in _leaves(item)]
    if isinstance(value, bool) or value is None:
        return []
    return [value if isinstance(value, str) else json.dumps(value)]


def _escaped_twice(text: str, arguments: dict[str, Any]) -> int:
    """Signs that arguments were printed as a JSON text of a JSON text, or as a Python dict."""
    plain = json.dumps(arguments, ensure_ascii=False)
    as_python = bool(arguments) and repr(arguments) != plain and repr(arguments) in text
    escaped = [re.compile(rf'\\+"{re.escape(key)}\\+"') for key in arguments]
    return as_python + sum(
        len(pattern.findall(text)) for pattern in escaped if not pattern.search(plain)
    )
