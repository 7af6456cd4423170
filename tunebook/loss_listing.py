"""The losses that configs name: what each reads, takes, and fits."""

from __future__ import annotations

import importlib.resources
import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tunebook.columns import required_columns
from tunebook.compose import build_function


@dataclass(frozen=True, slots=True)
class ListedLoss:
    """One file of `configs/loss`."""

    name: str
    """What `loss=<name>` takes."""
    target: str
    """Dotted path of the function."""
    summary: str
    """First line of its docstring."""
    columns: tuple[str, ...]
    """Columns that it reads."""
    parameters: Mapping[str, Any]
    """Its hyper-parameters, with the values of the file."""
    recipes: tuple[str, ...]
    """Names of the recipes that it fits."""


def list_losses(recipe_columns: Mapping[str, Collection[str]]) -> list[ListedLoss]:
    """Every loss that a config file names, by recipe and name.

    Args:
        recipe_columns: recipe -> the columns that it gives a loss.
    """
    from omegaconf import OmegaConf

    folder = importlib.resources.files("configs").joinpath("loss")
    listed: list[ListedLoss] = []
    for file in folder.iterdir():
        if not file.name.endswith(".yaml"):
            continue
        node = OmegaConf.to_container(OmegaConf.create(file.read_text(encoding="utf-8")))
        assert isinstance(node, dict)
        values = {str(key): value for key, value in node.items()}
        loss_fn = build_function(values, key="loss")
        columns = required_columns(loss_fn)
        listed.append(
            ListedLoss(
                name=file.name.removesuffix(".yaml"),
                target=values.pop("_target_"),
                summary=(inspect.getdoc(loss_fn.func) or "").partition("\n")[0],
                columns=columns,
                parameters=values,
                recipes=fitting_recipes(columns, recipe_columns),
            )
        )
    return sorted(listed, key=lambda loss: (loss.recipes, loss.name))


def fitting_recipes(
    columns: Collection[str], recipe_columns: Mapping[str, Collection[str]]
) -> tuple[str, ...]:
    """The recipes that give a loss its columns; of several, those it ignores fewest columns of.

    Cross-entropy could be computed from the columns of any recipe, but it is meant for SFT.

    Args:
        columns: those that the loss reads.
        recipe_columns: recipe -> the columns that it gives a loss.
    """
    ignored = {
        recipe: len(set(given) - set(columns))
        for recipe, given in recipe_columns.items()
        if set(columns) <= set(given)
    }
    fewest = min(ignored.values(), default=0)
    return tuple(recipe for recipe, count in ignored.items() if count == fewest)
