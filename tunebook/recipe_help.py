"""`--help` of a recipe: every key with its default, type and meaning, from YAML and schema."""

from __future__ import annotations

import ast
import inspect
import textwrap
import typing
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from rich.markup import escape

from tunebook.compose import register_schemas
from tunebook.composition_errors import SCHEMAS, config_groups
from tunebook.key_suggestions import schema_fields

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a recipe."""

    name: str
    default: str
    meaning: str


def print_recipe_help(recipe: str) -> None:
    """Prints usage, groups and keys of a recipe."""
    from rich.console import Console

    console = Console()
    schema = SCHEMAS[recipe]
    usage = f"{inspect.getdoc(schema)} Usage: python -m recipes.{recipe} key=value ..."
    console.print(usage, markup=False, style="bold", soft_wrap=True)
    if console.is_terminal:
        console.print(_key_table(recipe))
    else:  # a line for each key, for grep
        for key in recipe_keys(recipe):
            print(f"{key.name}  ({key.default})  {key.meaning}")
    console.print(_groups(), soft_wrap=True)
    console.print(
        "\nHydra's flags work too: --cfg job (show the config), --multirun (several values), "
        "--config-dir DIR (groups of your own). --debug shows tracebacks, --detach trains in the "
        "background.",
        soft_wrap=True,
    )


def _key_table(recipe: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("key", "default", "meaning"):
        table.add_column(column, overflow="fold", no_wrap=column == "key")
    section = ""
    for key in recipe_keys(recipe):
        if key.name.partition(".")[0] != section:
            section = key.name.partition(".")[0]
            table.add_row()
        table.add_row(*(escape(text) for text in (key.name, key.default, key.meaning)))
    return table


def recipe_keys(recipe: str) -> list[Key]:
    """Every key of a recipe, in the order of its schema."""
    defaults = default_config(recipe)
    keys: list[Key] = []
    for key, owner in schema_fields(SCHEMAS[recipe]):
        if key.startswith("data.eval.") or (_is_section(defaults, key) and key != "data.eval"):
            continue
        leaf = key.rpartition(".")[2]
        shown = "null" if key == "data.eval" else _shown(OmegaConf.select(defaults, key))
        meaning = f"{field_docs(owner).get(leaf, '')} {_choices(owner, leaf)}".strip()
        keys.append(Key(key, shown, meaning))
    return keys


def default_config(recipe: str) -> DictConfig:
    """The config of a recipe without overrides; also while Hydra runs one with overrides."""
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    register_schemas()
    hydra = GlobalHydra.instance()
    running = hydra.hydra
    hydra.clear()
    try:
        with initialize_config_module("configs", version_base="1.3"):
            return compose(recipe)
    finally:
        GlobalHydra.instance().hydra = running


def field_docs(schema: type) -> dict[str, str]:
    """Field -> the string that stands below it in the schema's source."""
    docs: dict[str, str] = {}
    for owner in reversed(schema.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        for before, after in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(before, ast.AnnAssign)
                and isinstance(before.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                docs[before.target.id] = " ".join(str(after.value.value).split())
    return docs


def _choices(schema: type, field: str) -> str:
    """The allowed names of an enum field, in words."""
    annotation = typing.get_type_hints(schema)[field]
    for option in (annotation, *typing.get_args(annotation)):
        if isinstance(option, type) and issubclass(option, Enum):
            return f"One of {', '.join(option.__members__)}."
    return ""


def _is_section(defaults: DictConfig, key: str) -> bool:
    value = OmegaConf.select(defaults, key)
    return isinstance(value, DictConfig) and len(value) > 0 and "_target_" not in value


def _shown(value: Any) -> str:
    if isinstance(value, DictConfig) and "_target_" in value:
        return str(value["_target_"]).rpartition(".")[2]
    if value is None or value == {}:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _groups() -> str:
    groups = (f"  {name}: {', '.join(files)}" for name, files in config_groups().items())
    return "\n".join(["\n[bold]Groups[/] (group=file):", *groups])
