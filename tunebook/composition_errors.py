"""What went wrong while a config was composed, said as one paragraph with a way out."""

from __future__ import annotations

import difflib
import importlib.resources
import re

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


def explain_composition_error(error: Exception, recipe: str) -> ConfigError:
    """What a person did wrong, in one paragraph with the key, the value and what is allowed."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    text = str(cause).strip().split("\nConfig search path")[0]
    full_key = _key_in_message(str(error)) or getattr(cause, "full_key", None)
    unknown = ("is not in struct", "not in '", "Could not override", "Key '")
    is_value_error = type(cause).__name__ in ("ValidationError", "UnsupportedValueType")
    if full_key and not is_value_error and any(words in text for words in unknown):
        chosen = getattr(cause, "parent_node", None)
        if full_key.startswith("backend.") and chosen is not None:
            foreign = explain_foreign_key(full_key, chosen)
            own = [f"backend.{name}" for name in chosen]
            return ConfigError(
                foreign or explain_unknown_key(full_key, [*schema_keys(SCHEMAS[recipe]), *own])
            )
        keys = recipe_keys(recipe)
        if full_key in keys:  # the unknown one is in a list or mapping below it
            return ConfigError(f"{full_key}: {text.splitlines()[0]}")
        return ConfigError(explain_unknown_key(full_key, keys))
    if full_key and type(cause).__name__ == "MissingMandatoryValue":
        return ConfigError(f"{full_key} is missing: give it, for example {full_key}=<value>")
    if full_key and is_value_error:
        return ConfigError(f"{full_key}: {text.splitlines()[0]}")
    if type(error).__name__ == "MissingConfigException":
        return ConfigError(_explain_missing_file(text))
    if type(error).__name__ in ("OverrideParseException", "LexerNoViableAltException"):
        return ConfigError(
            f"An override could not be read: {text.splitlines()[0]}. Write key=value, and quote a "
            "value with special characters, as in \"name='a=b'\""
        )
    return ConfigError(text)


def _explain_missing_file(text: str) -> str:
    """`model/qwen` is not there: which are, and which was probably meant."""
    found = re.search(r"Could not find '([^'/]+)/([^']+)'", text)
    options = [line.strip() for line in text.splitlines() if line.startswith("\t")]
    if found is None or not options:
        return text
    group, name = found.groups()
    known = [option for option in options if option != "base"]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    close += [option for option in known if option.startswith(name)]
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

    return isinstance(error, HydraException | OmegaConfBaseException)


def _key_in_message(message: str) -> str | None:
    for start in ("Could not override '", "Error merging override "):
        if message.startswith(start):
            return message.removeprefix(start).split("'")[0].split("=")[0].lstrip("+").strip()
    found = re.search(r"full_key: (\S+)", message)
    return found[1] if found else None
