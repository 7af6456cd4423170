"""What follows a sampled turn: the end of the turn, the messages behind it, the next prompt.

A conversation of several turns is sampled token in, token out: the prompt of turn t + 1 is the
prompt of turn t, the sampled ids as they are, and the ids made here. Rendering the conversation
anew would tokenise the sampled text again, and often otherwise.

Where a template shows earlier turns differently once others follow, as templates do that leave out
the reasoning of former turns, the sampled tokens stay all the same: the model goes on seeing what
it wrote, which rendering would have hidden. A conversation of a served model is rendered at every
turn, so with such a template it sees less than it did in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tunebook.errors import ConfigError
from tunebook.render.chat_template import (
    ChatTemplate,
    Message,
    Tools,
    TurnEndKind,
    chat_template_of,
    special_at_start,
)
from tunebook.render.conversation import Turn, Unusable, read_conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STAND_IN = "Zemlytover"
"""Stands for what the model wrote, so that nothing in it changes how the rest is rendered."""


def observation_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    observation: Sequence[Message],
    *,
    num_prompt: int,
    completion: Sequence[int],
    tools: Tools,
) -> list[int]:
    """The ids between a sampled turn and the next one, `[N]`.

    They begin with the end of the turn where the completion lacks it, because it was cut or ended
    otherwise, and end with the generation prompt. As everywhere in a chat template, the text of a
    special token in an observation becomes that token.

    Args:
        tokenizer: of the model.
        messages: the conversation so far; the last one is the sampled turn.
        observation: what follows it.
        num_prompt: messages at the beginning that were not sampled, even if an assistant's.
        completion: the ids of the sampled turn.
        tools: of the conversation.

    Raises:
        ConfigError: the template does not show these messages.
    """
    template = _template(tokenizer)
    text = observation_text(template, messages, observation, num_prompt=num_prompt, tools=tools)
    codec = template.codec
    sampled = [int(token) for token in completion]
    last = sampled[-1]
    if template.profile.turn_end.kind is TurnEndKind.eos:
        # The template marks no end; where the model gave one, the text stands behind it.
        end = str(tokenizer.eos_token)
        if last == tokenizer.eos_token_id and codec.ids(end) == [last]:
            ids = codec.ids(end + text)
            if ids[:1] == [last]:
                return ids[1:]
        apart = codec.continuation(codec.decode(sampled), sampled, text)
        return list(codec.ids(text)) if apart is None else apart
    ids = list(codec.ids(text))
    end_ids = codec.ids(special_at_start(codec, text) or "")
    if end_ids and end_ids[-1] == last and ids[: len(end_ids)] == end_ids:
        return ids[len(end_ids) :]
    return ids


def observation_text(
    template: ChatTemplate,
    messages: Sequence[Message],
    observation: Sequence[Message],
    *,
    num_prompt: int,
    tools: Tools,
) -> str:
    """What the template prints from the end of the last turn on; see `observation_ids`.

    Raises:
        ConfigError: the template does not show these messages.
    """
    written = [str(message["content"]) for message in (*messages, *observation)]
    word = STAND_IN
    while any(word in text for text in written):
        word += "m"
    num_results = sum(message["role"] == "tool" for message in observation)
    turns = [
        message
        if position < num_prompt or message["role"] != "assistant"
        else _stand_in(template, message, word, num_results if message is messages[-1] else None)
        for position, message in enumerate(messages)
    ]
    whole = [Turn(message, 1.0, i) for i, message in enumerate([*turns, *observation])]
    try:
        text = read_conversation(template, whole, tools, generation_prompt=True).text
    except Unusable as problem:
        way_out = ""
        if problem.field == "tools":
            way_out = (
                " An environment can also describe them in its first messages, as "
                "environment.described_in=system_message does for the calculator."
            )
        raise ConfigError(
            f"environment: {problem.field} of the conversation: {problem.reason}{way_out}"
        ) from problem
    end = _end_of_turn(template, text, word, after_call=num_results > 0)
    if end is None:
        raise ConfigError(
            f"environment: {template.name} prints no end of an assistant turn in front of a "
            f"{observation[0]['role']} message. Set model.chat_template=<file.jinja>."
        )
    return text[end:]


def check_turns(tokenizer: PreTrainedTokenizerBase, tools: Tools) -> None:
    """Returns if a model's template can show conversations with an environment.

    Tried on a made-up one, with a tool's result where there are tools, else with a user's reply.

    Args:
        tokenizer: of the model.
        tools: of the environment.

    Raises:
        ConfigError: it cannot, or there is no template.
    """
    prompt: Message = {"role": "user", "content": "Quorl the bivvat."}
    reply: Message = {"role": "user", "content": "Drissle."}
    answer: Message = {"role": "assistant", "content": "Wemble."}
    if tools:
        name = str(tools[0].get("function", tools[0])["name"])
        reply = {"role": "tool", "content": "Drissle.", "name": name, "tool_call_id": "call00000"}
        call = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": {}}}
        answer["tool_calls"] = [call]
    observation_text(_template(tokenizer), [prompt, answer], [reply], num_prompt=1, tools=tools)


def _template(tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    if tokenizer.chat_template is None:
        raise ConfigError(
            "environment: a conversation of several turns needs a chat template, and the tokenizer "
            f"of {tokenizer.name_or_path} has none. Set model.chat_template=<file.jinja>, or "
            "environment=none."
        )
    return chat_template_of(tokenizer)


def _stand_in(
    template: ChatTemplate, message: Message, word: str, num_results: int | None
) -> Message:
    """A made-up turn in place of a sampled one.

    Args:
        template: strict ones ask for a call before a tool's result.
        message: the sampled turn.
        word: its text.
        num_results: tool results that follow; None = as many as it has calls.
    """
    stand_in: Message = {"role": "assistant", "content": word}
    calls = list(message.get("tool_calls") or ())
    if num_results is not None:
        calls = [*calls, *({"id": f"call{i:05d}"} for i in range(len(calls), num_results))]
        calls = calls[:num_results]
    profile = template.profile
    if calls and profile.tool_calls and profile.turn_end.kind is not TurnEndKind.eos:
        stand_in["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": word, "arguments": {}},
            }
            for call in calls
        ]
    return stand_in


def _end_of_turn(template: ChatTemplate, text: str, word: str, *, after_call: bool) -> int | None:
    """The character at which the last made-up turn is over."""
    written = text.rfind(word)
    if written < 0:
        return None
    written += len(word)
    turn_end = template.profile.turn_end
    if turn_end.kind is TurnEndKind.eos:
        return written
    end = text.find(turn_end.text_after_call if after_call else turn_end.text, written)
    return None if end < 0 else end
