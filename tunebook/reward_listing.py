"""The built-in rewards as a person looks them up: columns, settings, meaning."""

from __future__ import annotations

import importlib.resources
import inspect
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from tunebook.reward_worker import locate

GROUP = "reward"


@dataclass(frozen=True, slots=True)
class ListedReward:
    """One file of `configs/reward/`."""

    name: str
    """As in `reward=<name>`."""
    target: str
    columns: tuple[str, ...]
    """Columns of the row, or of the recipe, that it needs."""
    optional_columns: tuple[str, ...]
    settings: dict[str, Any]
    """Name -> default."""
    meaning: str
    """First line of its docstring."""


def reward_names() -> list[str]:
    """Names that `reward=<name>` takes."""
    folder = importlib.resources.files("configs").joinpath(GROUP)
    names = [file.name.removesuffix(".yaml") for file in folder.iterdir()]
    return sorted(name for name in names if name != "base" and not name.startswith("_"))


def list_rewards() -> list[ListedReward]:
    """Every built-in reward, by name."""
    folder = importlib.resources.files("configs").joinpath(GROUP)
    listed: list[ListedReward] = []
    for name in reward_names():
        text = folder.joinpath(f"{name}.yaml").read_text(encoding="utf-8")
        functions: Any = OmegaConf.to_container(OmegaConf.create(text).functions)
        for node in functions.values():
            settings = {key: value for key, value in node.items() if key != "_target_"}
            listed.append(_listed(name, node["_target_"], settings))
    return listed


def _listed(name: str, path: str, settings: dict[str, Any]) -> ListedReward:
    target = locate(path)
    call = target.__call__ if isinstance(target, type) else target
    keyword_only = [
        parameter
        for parameter in inspect.signature(call).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    return ListedReward(
        name=name,
        target=path,
        columns=tuple(one.name for one in keyword_only if one.default is one.empty),
        optional_columns=tuple(one.name for one in keyword_only if one.default is not one.empty),
        settings=settings,
        meaning=(inspect.getdoc(target) or "").splitlines()[0],
    )
