"""Turns one source row, in any known format, into rows of the kind a recipe trains on."""

from __future__ import annotations

from typing import Any

from tunebook.config import Mask, RowFormat
from tunebook.data.json_values import BadRow, WrongKind, type_name
from tunebook.data.messages import Message, has_text, normalise_tools, unpacked
from tunebook.data.preferences import read_pair, read_samples
from tunebook.data.rows import Kind, Row, content_hash, without_trained
from tunebook.data.turns import (
    LIST_KEYS,
    Content,
    Reading,
    all_strings,
    required_key,
    system_column,
    turns_of,
)

FORMATS_OF_KIND = {
    Kind.conversation: (RowFormat.messages, RowFormat.prompt_completion),
    Kind.preference: (RowFormat.preference,),
    Kind.prompt: (RowFormat.prompt, RowFormat.messages),
}
USE_OF_FORMAT = {
    RowFormat.messages: "supervised fine-tuning (recipes.sft)",
    RowFormat.prompt_completion: "supervised fine-tuning (recipes.sft)",
    RowFormat.preference: "preference training such as DPO",
    RowFormat.prompt: "training on rewards such as GRPO",
}
TURN_KEYS = {
    RowFormat.messages: (),
    RowFormat.prompt_completion: ("prompt", "completion"),
    RowFormat.preference: ("prompt", "chosen", "rejected"),
    RowFormat.prompt: ("prompt",),
}
"""Columns that are a text or messages."""
KNOWN_FORMATS = (
    "messages; prompt + completion; prompt + chosen + rejected; messages + samples; "
    "prompt + answer columns"
)
CONTENT_KEYS = (*LIST_KEYS, "prompt", "completion", "chosen", "rejected", "samples")


def rows_of(
    values: dict[str, Any], reading: Reading, *, file: str, line: int, prune: bool
) -> list[Row]:
    """The rows that one source row holds: one, or one a pair where `samples` are scored.

    Args:
        values: columns by our names, JSON values.
        prune: nulls inside tools only mean that another row has that key (typed columns).

    Raises:
        BadRow: what is wrong with it.
        WrongKind: a row that another recipe trains on.
    """
    nulls = [key for key, value in values.items() if value is None]
    values = {key: value for key, value in values.items() if value is not None}
    row_format = reading.format
    if row_format is RowFormat.auto:
        row_format = _detect(values, reading, nulls)
    _refuse_functions(values, reading)
    tools = normalise_tools(values.get("tools"), "tools", prune=prune)
    contents = _read(values, row_format, reading, prune=prune)
    row_id, group = _identity(values, reading)
    system = system_column(values)
    rows = []
    for content in contents:
        hidden = {*content.used, "system", "tools"}
        columns = {key: value for key, value in values.items() if key not in hidden}
        _put_system_column(content, system)
        _put_system_prompt(content, reading.system_prompt)
        rows.append(
            _built_row(content, reading, tools, columns, row_id, group, file=file, line=line)
        )
    return rows


def num_system_messages(row: Row) -> int:
    """How many messages of the row have the role `system`."""
    turns = (*row.messages, *row.chosen, *row.rejected)
    return sum(message["role"] == "system" for message in turns)


def row_has_text(row: Row) -> bool:
    """Whether any message of the row, system messages apart, holds more than white space."""
    turns = (*row.messages, *row.chosen, *row.rejected)
    return any(has_text(message) for message in turns if message["role"] != "system")


def _built_row(
    content: Content,
    reading: Reading,
    tools: list[dict[str, Any]] | None,
    columns: dict[str, Any],
    row_id: str | None,
    group: str | None,
    *,
    file: str,
    line: int,
) -> Row:
    names = {reading.id_column or "id", reading.group_column}
    answers = {key: value for key, value in columns.items() if key not in names}
    answers = answers if reading.kind is Kind.prompt else {}
    return Row(
        file=file,
        line=line,
        source=reading.source,
        kind=reading.kind,
        messages=content.messages,
        chosen=content.chosen,
        rejected=content.rejected,
        num_prompt=content.num_prompt,
        plain=content.plain,
        tools=tools,
        columns=columns,
        id=row_id,
        group=group if group is not None else content.group,
        content_hash=content_hash(
            kind=reading.kind,
            messages=content.messages,
            chosen=content.chosen,
            rejected=content.rejected,
            num_prompt=content.num_prompt,
            plain=content.plain,
            tools=tools,
            answer_columns=answers,
        ),
        text_hash=content_hash(
            kind=reading.kind,
            messages=without_trained(content.messages),
            chosen=without_trained(content.chosen),
            rejected=without_trained(content.rejected),
            num_prompt=None,
            plain=False,
            tools=tools,
            answer_columns=answers,
        ),
    )


def _detect(values: dict[str, Any], reading: Reading, nulls: list[str]) -> RowFormat:
    """The format of a row by the columns that are not null."""
    has_pair = "chosen" in values or "rejected" in values or "samples" in values
    has_list = any(key in values for key in LIST_KEYS)
    has_prompt = "prompt" in values
    has_completion = has_prompt and "completion" in values
    if reading.kind is Kind.preference:
        order = [(has_pair, RowFormat.preference)]
    elif reading.kind is Kind.prompt:
        order = [(has_prompt, RowFormat.prompt), (has_list and not has_pair, RowFormat.messages)]
    else:
        order = [
            (has_list and "samples" not in values, RowFormat.messages),
            (has_completion, RowFormat.prompt_completion),
        ]
    for there, row_format in order:
        if there:
            return row_format
    others = [
        (has_pair, RowFormat.preference),
        (has_list, RowFormat.messages),
        (has_completion, RowFormat.prompt_completion),
        (has_prompt, RowFormat.prompt),
    ]
    for there, row_format in others:
        if there:
            raise WrongKind("", _wrong_kind(row_format, reading, values))
    for key in CONTENT_KEYS:
        if key in nulls:
            raise BadRow(key, "is null; it holds what is trained on")
    raise BadRow(
        "",
        f"no known format: the columns are {', '.join(sorted(values)) or 'all null'}. Known: "
        f"{KNOWN_FORMATS}. Rename columns with {reading.key}.columns, our name first: "
        f"{reading.key}.columns={{prompt: question, completion: answer}}",
    )


def _wrong_kind(found: RowFormat, reading: Reading, values: dict[str, Any]) -> str:
    kind, columns = reading.kind, f"{reading.key}.columns"
    reason = (
        f"holds the columns {', '.join(sorted(values))}, which is {found} data; this recipe "
        f"trains on {kind} rows. Such rows are for {USE_OF_FORMAT[found]}"
    )
    if kind is Kind.conversation and found is RowFormat.preference and "chosen" in values:
        name = "completion" if "prompt" in values else "messages"
        return f"{reason}, or train on the better side: {columns}={{{name}: chosen}}"
    if kind is Kind.conversation and found is RowFormat.prompt:
        return f"{reason}, or name the answer's column: {columns}={{completion: <column>}}"
    return reason


def _read(
    values: dict[str, Any], row_format: RowFormat, reading: Reading, *, prune: bool
) -> list[Content]:
    turn_keys = values.keys() & set(TURN_KEYS[row_format])
    values = {**values, **{key: unpacked(values[key], key) for key in turn_keys}}
    if row_format is RowFormat.preference and "samples" in values:
        return read_samples(values, reading, prune=prune)
    if row_format is RowFormat.preference:
        return [read_pair(values, reading, prune=prune)]
    if row_format is RowFormat.prompt_completion:
        return [_read_prompt_completion(values, reading, prune=prune)]
    if reading.kind is Kind.prompt:
        keys = ("prompt",) if row_format is RowFormat.prompt else LIST_KEYS
        return [_read_prompt(values, reading, keys=keys, prune=prune)]
    return [_read_messages(values, reading, prune=prune)]


def _read_messages(values: dict[str, Any], reading: Reading, *, prune: bool) -> Content:
    key = required_key(values, LIST_KEYS)
    messages = turns_of(values, key, "user", reading, prune=prune)
    _require_assistant(messages, key, reading)
    return Content(messages, used=(key,))


def _read_prompt_completion(values: dict[str, Any], reading: Reading, *, prune: bool) -> Content:
    prompt = turns_of(values, "prompt", "user", reading, prune=prune)
    completion = turns_of(values, "completion", "assistant", reading, prune=prune)
    _require_assistant(completion, "completion", reading)
    return Content(
        prompt + completion,
        num_prompt=len(prompt),
        plain=all_strings(values, ("prompt", "completion")),
        used=("prompt", "completion"),
    )


def _read_prompt(
    values: dict[str, Any], reading: Reading, *, keys: tuple[str, ...], prune: bool
) -> Content:
    key = required_key(values, keys)
    messages = turns_of(values, key, "user", reading, prune=prune)
    if messages[-1]["role"] == "assistant":
        raise BadRow(key, "ends with an assistant message; a prompt ends where the model answers")
    return Content(messages, plain=all_strings(values, (key,)), used=(key,))


def _require_assistant(messages: list[Message], key: str, reading: Reading) -> None:
    if reading.mask is not Mask.all and all(m["role"] != "assistant" for m in messages):
        raise BadRow(key, "has no assistant message, so there is nothing to train on")


def _identity(values: dict[str, Any], reading: Reading) -> tuple[str | None, str | None]:
    row_id = _label(values, reading.id_column) if reading.id_column else None
    if reading.id_column is None and isinstance(values.get("id"), str | int):
        row_id = str(values["id"])
    group = _label(values, reading.group_column) if reading.group_column else None
    return row_id, group


def _label(values: dict[str, Any], column: str) -> str:
    value = values.get(column)
    if isinstance(value, bool) or not isinstance(value, str | int):
        found = "is missing or null" if value is None else f"is {type_name(value)}"
        raise BadRow(
            column, f"{found}; it identifies the row, so it must be a string or an integer"
        )
    return str(value)


def _put_system_column(content: Content, system: list[Message]) -> None:
    """Adds it first, where the messages do not begin with the same one."""
    if not system or content.messages[:1] == system:
        return
    turns = (*content.messages, *content.chosen, *content.rejected)
    if any(message["role"] == "system" for message in turns):
        raise BadRow("system", "is a second system message beside that of the messages; keep one")
    _put_first(content, system[0])


def _put_system_prompt(content: Content, system_prompt: str | None) -> None:
    """Adds it first; `load` refuses afterwards where a row already had one."""
    if system_prompt is not None:
        _put_first(content, {"role": "system", "content": system_prompt})


def _put_first(content: Content, message: Message) -> None:
    content.messages = [message, *content.messages]
    if content.num_prompt is not None:
        content.num_prompt += 1


def _refuse_functions(values: dict[str, Any], reading: Reading) -> None:
    """Tool schemas under their old name; a column of anything else may have that name."""
    if "tools" in values:
        return
    try:
        schemas = normalise_tools(values.get("functions"), "functions", prune=False)
    except BadRow:
        return
    if schemas:
        raise BadRow(
            "functions",
            "is the old form of tools, which is not read; call the column tools, or set "
            f"{reading.key}.columns={{tools: functions}} if every row has it",
        )
