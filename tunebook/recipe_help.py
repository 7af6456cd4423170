"""`--help` of a recipe: every key with its default, type and meaning, from YAML and schema."""

from __future__ import annotations

import ast
import importlib.resources
import inspect
import re
import textwrap
import typing
from collections.abc import Mapping, Sequence
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

FILE_GROUPS = ("backend", "loss", "tracker", "environment")
"""Groups whose keys are those of the chosen file, not of a schema."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a recipe."""

    name: str
    default: str
    meaning: str


def print_recipe_help(recipe: str, arguments: Sequence[str] = ()) -> None:
    """Prints usage, groups and keys of a recipe.

    Args:
        recipe: its name.
        arguments: beside `--help`; `backend=together` shows the keys of that file.
    """
    from rich.console import Console

    console = Console()
    schema = SCHEMAS[recipe]
    keys = recipe_keys(recipe, chosen_files(recipe, arguments))
    usage = f"{inspect.getdoc(schema)} Usage: python -m recipes.{recipe} key=value ..."
    console.print(usage, markup=False, style="bold", soft_wrap=True)
    if console.is_terminal:
        console.print(_key_table(keys))
    else:  # a line for each key, for grep
        for key in keys:
            print(f"{key.name}  ({key.default})  {key.meaning}")
    console.print(_groups(recipe), soft_wrap=True)
    console.print(
        "\nHydra's flags work too: --cfg job (show the config), --multirun (several values), "
        "--config-dir DIR (groups of your own). --debug shows tracebacks, --detach trains in the "
        "background.",
        soft_wrap=True,
    )


def _key_table(keys: Sequence[Key]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("key", "default", "meaning"):
        table.add_column(column, overflow="fold", no_wrap=column == "key")
    section = ""
    for key in keys:
        if key.name.partition(".")[0] != section:
            section = key.name.partition(".")[0]
            table.add_row()
        table.add_row(*(escape(text) for text in (key.name, key.default, key.meaning)))
    return table


def recipe_keys(recipe: str, files: Mapping[str, str] | None = None) -> list[Key]:
    """Every key of a recipe, in the order of its schema.

    Args:
        recipe: its name.
        files: group -> the file whose keys are listed; None = those of the recipe's defaults.
    """
    files = chosen_files(recipe, ()) if files is None else files
    defaults = default_config(recipe)
    keys: list[Key] = []
    for key, owner in schema_fields(SCHEMAS[recipe]):
        is_whole = key in ("data.eval", "lora")
        if key.startswith("data.eval.") or (_is_section(defaults, key) and not is_whole):
            continue
        leaf = key.rpartition(".")[2]
        shown = _shown(OmegaConf.select(defaults, key))
        if is_whole:
            shown = "null" if key == "data.eval" else "{...}"
        in_file = file_keys(key, files[key]) if key in files else []
        if key in files:
            shown = files[key] if in_file or key in ("backend", "loss") else "null"
        meaning = f"{field_docs(owner).get(leaf, '')} {_choices(owner, leaf)}".strip()
        keys += [Key(key, shown, meaning), *in_file]
    return keys


def chosen_files(recipe: str, arguments: Sequence[str]) -> dict[str, str]:
    """Group of `FILE_GROUPS` -> the file that a command line chooses, else the recipe's own."""
    groups = groups_of(recipe)
    words = dict(word.split("=", 1) for word in arguments if "=" in word)
    files = {group: name for group, name in _defaults(recipe).items() if group in FILE_GROUPS}
    return {
        group: words[group] if words.get(group) in groups[group] else name
        for group, name in files.items()
    }


def file_keys(group: str, name: str) -> list[Key]:
    """The keys of a file of `configs/` with the comments that stand behind them."""
    text = _config_text(f"{group}/{name}")
    content = OmegaConf.create(text) or OmegaConf.create({})
    assert isinstance(content, DictConfig)
    keys = [key for each in content.get("defaults", []) for key in file_keys(group, each)]
    comments = dict(re.findall(r"^(\w+):[^#\n]*?\s+#\s*(.*)$", text, re.MULTILINE))
    for leaf in content:
        if leaf not in ("_target_", "defaults"):
            key = f"{group}.{leaf}"
            keys.append(Key(key, _shown(content[leaf]), comments.get(str(leaf), "")))
    return keys


def _config_text(name: str) -> str:
    path = importlib.resources.files("configs").joinpath(f"{name}.yaml")
    return path.read_text(encoding="utf-8")


def _defaults(recipe: str) -> dict[str, str]:
    """Group -> file, of the defaults list of a recipe."""
    content = OmegaConf.create(_config_text(recipe))
    assert isinstance(content, DictConfig)
    entries = [each for each in content["defaults"] if isinstance(each, DictConfig)]
    pairs = [(str(group), name) for each in entries for group, name in each.items()]
    return {group: name for group, name in pairs if not group.startswith("override ")}


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


def groups_of(recipe: str) -> dict[str, list[str]]:
    """Group of files -> the names that `group=` takes with a recipe."""
    defaults = _defaults(recipe)
    groups = {group: names for group, names in config_groups().items() if group in defaults}
    family = _loss_module(defaults["loss"])
    groups["loss"] = [name for name in groups["loss"] if _loss_module(name) == family]
    return groups


def _loss_module(name: str) -> str:
    """Module of a loss; a recipe takes those of the module that its own is of."""
    [target] = re.findall(r"^_target_: (\S+)$", _config_text(f"loss/{name}"), re.MULTILINE)
    return target.rpartition(".")[0]


def _groups(recipe: str) -> str:
    groups = (f"  {name}: {', '.join(files)}" for name, files in groups_of(recipe).items())
    return "\n".join(["\n[bold]Groups[/] (group=file):", *groups])
