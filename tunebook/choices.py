"""Keys that depend on which file of a group was chosen: what they are, and which choice has one."""

from __future__ import annotations

import importlib.resources
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

DATA_OF_A_LOSS = frozenset(
    {
        "advantages",
        "logprobs",
        "pair_weights",
        "reference_logprobs",
        "sampling_logprobs",
        "token_weights",
    }
)
"""Parameters of losses that a recipe gives them; they are no settings."""


def choices_with(group: str, key: str) -> list[str]:
    """Names of the files of a group that set a key."""
    return [name for name, content in _files(group).items() if key in content]


def explain_foreign_key(key: str, chosen: Mapping[str, Any] | None) -> str | None:
    """Why a key is refused that another choice of its group has; None = none has it.

    Args:
        key: dotted, its first part the group.
        chosen: what the file that was chosen has put into the group.
    """
    group, _, leaf = key.partition(".")
    having = choices_with(group, leaf)
    if not having or not chosen or leaf in chosen:
        return None
    target = chosen.get("_target_")
    names = [name for name, content in _files(group).items() if content.get("_target_") == target]
    return f"{key} is a key of {group}={', '.join(having)}; this run has {group}=" + (
        names[0] if names else str(target)
    )


def explain_no_choice(group: str, keys: Mapping[str, Any]) -> str | None:
    """What to choose before keys of a group can be set; None = no file has them all."""
    having = [
        name
        for name, content in _files(group).items()
        if "_target_" in content and all(key in content or key in _base(group) for key in keys)
    ]
    if not keys or not having:
        return None
    told = ", ".join(f"{group}.{key}" for key in keys)
    return f"{told}: choose a file of {group} first, {' or '.join(f'{group}={n}' for n in having)}"


def _base(group: str) -> Mapping[str, Any]:
    return _files(group).get("base", {})


def _files(group: str) -> dict[str, Mapping[str, Any]]:
    """Name -> content of the files of a group, without the files that they begin with."""
    folder = importlib.resources.files("configs").joinpath(group)
    if not folder.is_dir():
        return {}
    return {
        file.name.removesuffix(".yaml"): dict(OmegaConf.create(file.read_text(encoding="utf-8")))
        for file in sorted(folder.iterdir(), key=lambda each: each.name)
        if file.name.endswith(".yaml")
    }
