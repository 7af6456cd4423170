"""Sampled answers, one file a step."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunebook.runs.files import read_lines, replace_lines, writing

_NAME = re.compile(r"step_(\d+)\.jsonl")


def write_samples(folder: Path, step: int, values: Sequence[Mapping[str, Any]]) -> None:
    """Writes the samples of a step, whole, in place of earlier ones of that step."""
    replace_lines(_file(folder, step), list(values))


def read_samples(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Step -> samples, in order of steps."""
    return {step: read_lines(_file(folder, step)) for step in _steps(folder)}


def move_superseded(folder: Path, step: int, attempt: int) -> None:
    """Moves samples of steps above `step` to `superseded/`, named after the attempt to come."""
    for later in _steps(folder):
        if later > step:
            file = _file(folder, later)
            target = folder / "superseded" / f"before_{attempt}_{file.name}"
            with writing(target):
                target.parent.mkdir(exist_ok=True)
                file.replace(target)


def _steps(folder: Path) -> list[int]:
    found = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)


def _file(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}.jsonl"
