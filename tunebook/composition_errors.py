"""What went wrong while a config was composed, said as one paragraph with a way out."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.resources
import re
from collections.abc import Sequence

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tunebook.choices import explain_foreign_key
from tunebook.config import DPOConfig, GRPOConfig, RecipeConfig, SFTConfig
from tunebook.errors import ConfigError
from tunebook.key_suggestions import explain_unknown_key, schema_keys

SCHEMAS: dict[str, type[RecipeConfig]] = {
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "grpo": GRPOConfig,
}
"""Recipe -> its schema."""
BAD_CHOICE, INSIDE_NULL = "Config group override", "Unexpected type for root: NoneType"
"""How messages begin with which Hydra and OmegaConf refuse an override as a plain ValueError, or as
an AssertionError; they do not say which override."""


def explain_composition_error(
    error: Exception, recipe: str, *, key: str | None = None, lines: Sequence[str] = ()
) -> ConfigError:
    """What a person did wrong, in one paragraph with the key, the value and what is allowed.

    Args:
        error: what Hydra or OmegaConf raised.
        recipe: whose keys are suggested.
        key: that was being set, where the error does not say it.
        lines: overrides among which the one is that the error does not name.
    """
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    text = str(cause).strip().split("\nConfig search path")[0]
    outer = key or _key_in_message(str(error)) or ""
    inner = getattr(cause, "full_key", None) or ""
    # In an item of a list OmegaConf counts keys anew.
    in_item = outer and inner and not (inner.startswith(outer) or outer.startswith(inner))
    full_key = f"{outer}.{inner}" if in_item else max(outer, inner, key=len)
    unknown = ("is not in struct", "not in '", "Could not override", "Key '")
    is_value_error = type(cause).__name__ in ("ValidationError", "UnsupportedValueType")
    if full_key and not is_value_error and any(words in text for words in unknown):
        schema = getattr(cause, "object_type", None)
        if in_item and dataclasses.is_dataclass(schema):
            section = full_key.rpartition(".")[0]
            known = [f"{section}.{field.name}" for field in dataclasses.fields(schema)]
            return ConfigError(explain_unknown_key(full_key, known))
        chosen = getattr(cause, "parent_node", None)
        if full_key.startswith("backend.") and chosen is not None:
            foreign = explain_foreign_key(full_key, chosen)
            own = [f"backend.{name}" for name in chosen]
            return ConfigError(
                foreign or explain_unknown_key(full_key, [*schema_keys(SCHEMAS[recipe]), *own])
            )
        keys = recipe_keys(recipe)
        if full_key in keys:  # of another choice of its group
            section, _, leaf = full_key.rpartition(".")
            return ConfigError(f"{full_key}: the {section} that is chosen has no {leaf!r}")
        return ConfigError(explain_unknown_key(full_key, keys))
    if full_key and type(cause).__name__ == "MissingMandatoryValue":
        return ConfigError(f"{full_key} is missing: give it, for example {full_key}=<value>")
    if text.startswith(BAD_CHOICE):
        return ConfigError(_explain_choice(lines) or text)
    if text.startswith(INSIDE_NULL):
        return ConfigError(_explain_inside_null([key] if key else _keys_of(lines)) or text)
    if type(error).__name__ == "MissingConfigException":
        return ConfigError(_explain_missing_file(text))
    if type(error).__name__ in ("OverrideParseException", "LexerNoViableAltException"):
        return ConfigError(
            f"An override could not be read: {text.splitlines()[0]}. Write key=value, and quote a "
            "value with special characters, as in \"name='a=b'\""
        )
    if full_key:
        return ConfigError(f"{full_key}: {text.splitlines()[0]}")
    return ConfigError(text)


def _explain_choice(lines: Sequence[str]) -> str | None:
    """Which override gives a group something that is no name of a file; None if none does."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import ChoiceSweep

    for line, group in zip(lines, _keys_of(lines), strict=True):
        files = config_groups().get(group)
        if files is None:
            continue
        value = OverridesParser.create().parse_overrides([line])[0].value()
        values = value.list if isinstance(value, ChoiceSweep) else [value]
        if any(each is None or isinstance(each, int | float) for each in values):
            return (
                f"{line}: must be the name of one of the files of {group}, or left out. "
                f"Known: {', '.join(files)}"
            )
    return None


def _keys_of(lines: Sequence[str]) -> list[str]:
    return [line.partition("=")[0].lstrip("+~") for line in lines]


def _explain_inside_null(keys: Sequence[str]) -> str | None:
    """Which keys are in a section that may be null, of which OmegaConf does not say which one is;
    None if none are."""
    inside = [key for key in keys if key.startswith(("lora.", "tracker.", "environment."))]
    if not inside:
        return None
    sections = sorted({key.partition(".")[0] for key in inside})
    return (
        f"{', '.join(inside)}: {' or '.join(sections)} is null, so nothing can be set in it; leave "
        "one of the two out"
    )


def config_groups() -> dict[str, list[str]]:
    """Group of files -> the names that `group=` takes."""
    entries = importlib.resources.files("configs").iterdir()
    groups: dict[str, list[str]] = {}
    for folder in sorted(entries, key=lambda each: each.name):
        if folder.is_dir() and not folder.name.startswith("_"):
            files = sorted(file.name for file in folder.iterdir())
            names = [name.removesuffix(".yaml") for name in files if name.endswith(".yaml")]
            groups[folder.name] = [name for name in names if name != "base"]
    return groups


def _explain_missing_file(text: str) -> str:
    """`model/qwen` is not there: which are, and which was probably meant."""
    found = re.search(r"Could not (?:find|load) '([^'/]+)/([^']*)'", text)
    if found is None:
        return text
    group, name = found.groups()
    options = [line.strip() for line in text.splitlines() if line.startswith("\t")]
    known = [each for each in options or config_groups().get(group, []) if each != "base"]
    if not known:
        return text
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    close += [option for option in known if name and option.startswith(name)]
    meant = f" Did you mean {group}={close[0]}?" if close else ""
    return f"{group}={name}: there is no {group}/{name}.yaml.{meant} Known: {', '.join(known)}"


def recipe_keys(recipe: str) -> list[str]:
    """Every dotted key of a recipe: the schema's, and those of the free-form groups' files."""
    keys = schema_keys(SCHEMAS[recipe])
    for group in ("backend", "loss", "tracker", "environment"):
        names: set[str] = set()
        for file in importlib.resources.files("configs").joinpath(group).iterdir():
            content = OmegaConf.create(file.read_text(encoding="utf-8"))
            names.update(str(name) for name in content if str(name).isidentifier())
        keys += sorted(f"{group}.{name}" for name in names - {"defaults"})
    return keys


def is_composition_error(error: Exception) -> bool:
    from hydra.errors import HydraException

    known = isinstance(error, HydraException | OmegaConfBaseException)
    return known or str(error).startswith((BAD_CHOICE, INSIDE_NULL))


def _key_in_message(message: str) -> str | None:
    for start in ("Could not override '", "Error merging override "):
        if message.startswith(start):
            return message.removeprefix(start).split("'")[0].split("=")[0].lstrip("+").strip()
    found = re.search(r"full_key: (\S+)", message)
    return found[1] if found else None
