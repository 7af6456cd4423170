"""Tool calls as models write them: JSON between <tool_call> tags.

The form of Qwen's, Hermes' and the built-in model's chat templates:
`<tool_call>{"name": "calculate", "arguments": {"expression": "2 * 3"}}</tool_call>`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tunebook.environments.protocol import Message, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Answer:
    """The parts of an answer."""

    content: str
    """What stands outside the tags; the whole text where a call in it cannot be read."""
    calls: tuple[ToolCall, ...]
    errors: tuple[str, ...]
    """What is wrong with each call that cannot be read, for the model to read."""


def read_answer(text: str) -> Answer:
    """The calls in an answer, in order; text of any kind is allowed.

    Args:
        text: of one turn, without the end of the turn.
    """
    outside: list[str] = []
    calls: list[ToolCall] = []
    errors: list[str] = []
    rest = text
    while OPEN in rest:
        before, _, rest = rest.partition(OPEN)
        outside.append(before)
        body, closed, rest = rest.partition(CLOSE)
        if not closed:
            errors.append(f"the tool call is not closed with {CLOSE}")
            break
        found = _call(body, number=len(calls))
        if isinstance(found, str):
            errors.append(found)
        else:
            calls.append(found)
    outside.append(rest)
    content = text if errors else "".join(outside).strip()
    return Answer(content, tuple(calls), tuple(errors))


def assistant_message(text: str, answer: Answer) -> Message:
    """An answer as a message: its calls as `tool_calls` where all of them could be read."""
    if answer.errors or not answer.calls:
        return {"role": "assistant", "content": text}
    return {
        "role": "assistant",
        "content": answer.content,
        "tool_calls": [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for call in answer.calls
        ],
    }


def _call(body: str, *, number: int) -> ToolCall | str:
    """The call that a tag holds, or what is wrong with it."""
    try:
        value: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        return f"the tool call is not JSON: {error}"
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return 'the tool call has to be {"name": ..., "arguments": {...}}'
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):  # some models write the arguments as JSON text
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return f"the arguments of {value['name']} are not JSON: {error}"
    if not isinstance(arguments, dict):
        return f"the arguments of {value['name']} have to be a JSON object"
    # Nine letters and digits, which is what the strictest templates ask for.
    return ToolCall(id=f"call{number:05d}", name=value["name"], arguments=arguments)
