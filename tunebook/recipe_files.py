"""The recipes that are commands; a recipe of one's own is a program that its author runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

RECIPES = "recipes"
"""The package of recipes."""


def recipe_files() -> dict[str, Path]:
    """Name -> file of every recipe that is a command, without importing any."""
    spec = importlib.util.find_spec(RECIPES)
    folders = (spec.submodule_search_locations if spec else None) or []
    files = [file for folder in folders for file in sorted(Path(folder).glob("[a-z]*.py"))]
    return {file.stem: file for file in files}
