"""JSON that fits a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tunebook.errors import ConfigError
from tunebook.reward_values import no_answer

_FENCED = re.compile(r"\A```(?:json)?[ \t]*\n(.*)\n```\Z", re.DOTALL)


class JsonSchema:
    """1 where the completion is one JSON value that fits the schema, else 0.

    The whole text has to be JSON (white space around it is free), by RFC 8259: NaN and infinities
    are none. What cannot be read is wrong, and noted as `no_answer`. `$schema` picks the draft, the
    newest if it names none; `format` is not checked, and `$ref` reaches only into the schema
    itself: nothing is fetched, and one that leads nowhere raises. It says nothing about whether
    values are true.

    Needs the package jsonschema: `pip install 'tunebook[json]'`.
    """

    def __init__(self, *, schema: Mapping[str, Any] | str, allow_fence: bool) -> None:
        """
        Args:
            schema: the schema, or the path of a .json file with it.
            allow_fence: a Markdown fence (```json) around the whole is no fault.

        Raises:
            ConfigError: the package is missing, or the schema cannot be read or is no schema.
        """
        if find_spec("jsonschema") is None:
            raise ConfigError(
                "_target_: needs the package jsonschema, which is not installed: "
                "pip install 'tunebook[json]'"
            )
        found = _read_schema(schema) if isinstance(schema, str) else schema
        if not isinstance(found, Mapping):
            shown = "is not given" if found is None else f"is {found!r}"
            raise ConfigError(f"schema {shown}: must be a schema, or the path of a file with one")
        self._validator = _validator_of(dict(found))
        self._allow_fence = allow_fence

    def __call__(self, completion: str) -> float:
        text = completion.strip()
        fenced = _FENCED.match(text) if self._allow_fence else None
        try:
            value = json.loads(fenced[1] if fenced else text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):  # of the text, or of how deep it is nested
            return no_answer()
        try:
            return float(self._validator.is_valid(value))
        except RecursionError:  # nested too deeply for a recursive schema
            return 0.0


def _read_schema(path: str) -> Any:
    try:
        return json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"schema={path}: cannot be read: {error}") from error


def _validator_of(schema: dict[str, Any]) -> Any:
    import jsonschema
    import jsonschema.validators
    import referencing

    kind = jsonschema.validators.validator_for(schema)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ConfigError(f"schema: is no JSON schema: {error.message}") from error
    return kind(schema, registry=referencing.Registry())


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
