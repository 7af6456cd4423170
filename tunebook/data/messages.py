"""Brings a conversation, in whichever of the common spellings, to one normal form."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from tunebook.data.json_values import BadRow, parse_json, to_json_value, type_name

Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")
ROLE_ALIASES = {"developer": "system"}
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
TRAINED_KEYS = ("weight", "trainable", "train", "trained")
WRONG_TRAINED_KEYS = ("loss", "mask", "loss_mask", "training")
READ_KEYS = {
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "from",
    "value",
    *REASONING_KEYS,
    *TRAINED_KEYS,
}
MESSAGE_KEYS = (("role", "content"), ("role", "tool_calls"), ("from", "value"))
OBJECTS_BEGIN = re.compile(r"""\s*(\[\s*)?\{\s*["']""")
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


def normalise_messages(
    value: Any, field: str, *, unread: Counter[str], prune: bool
) -> list[Message]:
    """The messages in normal form; a JSON text of a list counts as that list.

    Args:
        value: list of messages, `role`/`content` or `from`/`value`.
        field: where it stands in the row.
        unread: counts message keys that nothing reads.
        prune: null inside tool arguments only means that another row has that key.

    Raises:
        BadRow: anything that is not a conversation of text.
    """
    if isinstance(value, str):
        value = _parse(value, field, wanted="a JSON list")
    if not isinstance(value, list):
        raise BadRow(field, f"is {type_name(value)}; must be a list of messages")
    if not value:
        raise BadRow(field, "is empty; needs at least one message")
    return [
        _normalise_message(item, f"{field}[{i}]", unread=unread, prune=prune)
        for i, item in enumerate(value)
    ]


def unpacked(value: Any, field: str) -> Any:
    """The messages of a text that holds them as JSON, as tables do; any other value as it is.

    Raises:
        BadRow: a text that looks like messages and is not JSON.
    """
    if not isinstance(value, str) or not OBJECTS_BEGIN.match(value):
        return value
    try:
        held = parse_json(value)
    except ValueError as error:
        if not _names_message_keys(value):
            return value
        raise BadRow(
            field,
            f"looks like messages, but is not JSON ({error}). Write it with json.dumps, not as "
            "Python prints a list; if it is meant as text, put it into a message",
        ) from error
    items = held if isinstance(held, list) else [held]
    return to_json_value(held, field) if all(map(_is_message, items)) else value


def _names_message_keys(text: str) -> bool:
    return any(
        all(f"{quote}{key}{quote}:" in text for key in keys)
        for keys in MESSAGE_KEYS
        for quote in "'\""
    )


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and any(item.keys() >= set(keys) for keys in MESSAGE_KEYS)


def normalise_tools(value: Any, field: str, *, prune: bool) -> list[dict[str, Any]] | None:
    """The tool schemas, each as {"type": "function", "function": {...}}; None when there are none.

    Raises:
        BadRow: not a list of tool schemas.
    """
    if isinstance(value, str):
        value = _parse(value, field, wanted="a JSON list") if value.strip() else None
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise BadRow(field, f"is {type_name(value)}; must be a list of tool schemas")
    return [_normalise_tool(item, f"{field}[{i}]", prune=prune) for i, item in enumerate(value)]


def without_trained(messages: list[Message]) -> list[Message]:
    """The messages without their marks of what is trained, for comparing texts."""
    return [{key: item[key] for key in item if key != "trained"} for item in messages]


def has_text(message: Message) -> bool:
    """Whether a message holds more than white space: content, reasoning or a tool call."""
    return bool(
        message["content"].strip()
        or message.get("reasoning_content", "").strip()
        or message.get("tool_calls")
    )


def without_nulls(value: Any) -> Any:
    """The value with every null entry of every object left out."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _parse(text: str, field: str, *, wanted: str) -> Any:
    """The JSON value inside a string, which was only text when the row was checked."""
    try:
        value = parse_json(text)
    except ValueError as error:
        raise BadRow(field, f"is a string that is not {wanted} ({error})") from error
    return to_json_value(value, field)


def _normalise_message(item: Any, field: str, *, unread: Counter[str], prune: bool) -> Message:
    if not isinstance(item, dict):
        raise BadRow(field, f"is {type_name(item)}; must be an object with role and content")
    item = {key: value for key, value in item.items() if value is not None}
    unread.update(key for key in item if key not in READ_KEYS)
    _refuse_other_spellings(item, field)
    if "role" not in item and "from" in item:
        item, content_key = _from_sharegpt(item, field), "value"
    else:
        content_key = "content"
    role = _role(item, field)
    message: Message = {"role": role}
    tool_calls = _tool_calls(item, f"{field}.tool_calls", role=role, prune=prune)
    content = _content(
        item.get("content"), f"{field}.{content_key}", role=role, has_calls=bool(tool_calls)
    )
    reasoning = _reasoning(item, field) if role == "assistant" else ""
    if role == "assistant" and THINK_CLOSE in content:
        reasoning, content = _split_thinking(content, reasoning, f"{field}.{content_key}")
    message["content"] = content
    if reasoning:
        message["reasoning_content"] = reasoning
    if tool_calls:
        message["tool_calls"] = tool_calls
    for key in ("tool_call_id", "name"):
        if key in item:
            message[key] = _string(item[key], f"{field}.{key}")
    trained = _trained(item, field)
    if trained is not None:
        message["trained"] = trained
    return message


def _refuse_other_spellings(item: Message, field: str) -> None:
    for key in WRONG_TRAINED_KEYS:
        if key in item:
            raise BadRow(
                f"{field}.{key}", "is not read; say what is trained with weight (0 or 1) instead"
            )
    if "function_call" in item:
        raise BadRow(
            f"{field}.function_call",
            "is the old form of a tool call; write tool_calls: "
            '[{"type": "function", "function": {"name": ..., "arguments": {...}}}]',
        )


def _from_sharegpt(item: Message, field: str) -> Message:
    speaker = item["from"]
    role = SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise BadRow(f"{field}.from", f"is {speaker!r}; must be one of {', '.join(SHAREGPT_ROLES)}")
    renamed = {**item, "role": role, "content": item.get("value")}
    if speaker == "function_call":
        renamed["tool_calls"] = [_json_object(item.get("value"), f"{field}.value")]
        renamed["content"] = ""
    return renamed


def _role(item: Message, field: str) -> str:
    if "role" not in item:
        raise BadRow(f"{field}.role", f"is missing; must be one of {', '.join(ROLES)}")
    role = item["role"]
    role = ROLE_ALIASES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise BadRow(f"{field}.role", f"is {role!r}; must be one of {', '.join(ROLES)}")
    return role


def _content(value: Any, field: str, *, role: str, has_calls: bool) -> str:
    if value is None:
        if has_calls:
            return ""
        only = " (only an assistant message with tool calls may leave it out)"
        raise BadRow(field, f"is null or missing; write the text{only if role != 'user' else ''}")
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(_part(part, f"{field}[{i}]") for i, part in enumerate(value))
    raise BadRow(field, f"is {type_name(value)}; must be a string or a list of text parts")


def _part(part: Any, field: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise BadRow(field, f"is {type_name(part)}; must be a text part")
    part = {key: value for key, value in part.items() if value is not None}
    kind = part.get("type", "text")
    for medium in ("image", "audio", "video"):
        if medium in str(kind):
            raise BadRow(field, f"{medium} part with a text-only model; remove the part or the row")
    if kind not in ("text", "input_text", "output_text"):
        raise BadRow(f"{field}.type", f"is {kind!r}; only text parts can be trained on")
    return _string(part.get("text"), f"{field}.text")


def _string(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise BadRow(field, f"is {type_name(value)}; must be a string")
    return value


def _reasoning(item: Message, field: str) -> str:
    found = {key: _string(item[key], f"{field}.{key}") for key in REASONING_KEYS if key in item}
    texts = {text for text in found.values() if text.strip()}
    if len(texts) > 1:
        raise BadRow(field, f"{' and '.join(found)} differ; keep one")
    return texts.pop() if texts else ""


def _split_thinking(content: str, reasoning: str, field: str) -> tuple[str, str]:
    """Reasoning and answer of a text with think tags.

    Both `<think>..</think>answer` and the answer alone of a prompt that ended in `<think>` are
    split. Tags in the middle of a text are text. A blank block stays as written.
    """
    head, tail = content.split(THINK_CLOSE, 1)
    opened = head.lstrip().startswith(THINK_OPEN)
    if not opened and THINK_OPEN in head:
        return reasoning, content
    inside = head.lstrip().removeprefix(THINK_OPEN).strip("\n")
    if not inside.strip():
        return reasoning, content if opened and not reasoning else tail.lstrip("\n")
    if reasoning and reasoning.strip() != inside.strip():
        raise BadRow(field, f"holds reasoning before {THINK_CLOSE} that differs from the message's")
    return reasoning or inside, tail.lstrip("\n")


def _tool_calls(item: Message, field: str, *, role: str, prune: bool) -> list[dict[str, Any]]:
    calls = item.get("tool_calls")
    if isinstance(calls, str):
        calls = _parse(calls, field, wanted="a JSON list")
    if calls is None or calls == []:
        return []
    if role != "assistant":
        raise BadRow(field, f"stands in a {role} message; only an assistant calls tools")
    if not isinstance(calls, list):
        raise BadRow(field, f"is {type_name(calls)}; must be a list of tool calls")
    return [_tool_call(call, f"{field}[{i}]", prune=prune) for i, call in enumerate(calls)]


def _tool_call(call: Any, field: str, *, prune: bool) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise BadRow(field, f"is {type_name(call)}; must be an object")
    function = call.get("function")
    if function is None:
        function = call
    elif isinstance(function, dict):
        field = f"{field}.function"
    else:
        raise BadRow(f"{field}.function", f"is {type_name(function)}; must be an object")
    arguments = function.get("arguments")
    arguments = {} if arguments is None else _json_object(arguments, f"{field}.arguments")
    built: dict[str, Any] = {}
    if call.get("id") is not None:
        built["id"] = _string(call["id"], f"{field}.id")
    built["type"] = "function"
    built["function"] = {
        "name": _string(function.get("name"), f"{field}.name"),
        "arguments": without_nulls(arguments) if prune else arguments,
    }
    return built


def _json_object(value: Any, field: str) -> dict[str, Any]:
    if isinstance(value, str):
        value = _parse(value, field, wanted="valid JSON")
    if not isinstance(value, dict):
        raise BadRow(field, f"is {type_name(value)}; must be an object")
    return value


def _normalise_tool(tool: Any, field: str, *, prune: bool) -> dict[str, Any]:
    if isinstance(tool, dict):
        tool = without_nulls(tool) if prune else tool
        function = tool.get("function", tool if "name" in tool else None)
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return tool if "function" in tool else {"type": "function", "function": function}
    raise BadRow(
        field,
        'is not a tool schema; write {"type": "function", "function": {"name": ..., '
        '"description": ..., "parameters": {...}}}',
    )


def _trained(item: Message, field: str) -> bool | float | None:
    found = {key: item[key] for key in TRAINED_KEYS if key in item}
    values = {key: _trained_value(value, f"{field}.{key}", key=key) for key, value in found.items()}
    if len(set(values.values())) > 1:
        raise BadRow(field, f"{' and '.join(values)} disagree; keep one")
    return next(iter(values.values()), None)


def _trained_value(value: Any, field: str, *, key: str) -> bool | float:
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float) and 0 <= value <= 1:
        return bool(value) if value in (0, 1) else float(value)
    shown = json.dumps(value, ensure_ascii=False)[:60]
    raise BadRow(field, f"is {shown}; must be 0, 1, true, false or a weight between 0 and 1")
