"""Sampled answers, one file a step."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunebook.runs.files import read_lines, replace_lines, writing

_NAME = re.compile(r"(step|rollouts)_(\d+)\.jsonl")
"""`step` holds answers to the same prompts at every step, `rollouts` what one step trained on."""


def write_samples(folder: Path, step: int, values: Sequence[Mapping[str, Any]]) -> None:
    """Writes the samples of a step, whole, in place of earlier ones of that step."""
    replace_lines(_file(folder, "step", step), list(values))


def write_rollouts(folder: Path, step: int, values: Sequence[Mapping[str, Any]]) -> None:
    """Writes the completions that a step trained on, whole, in place of earlier ones."""
    replace_lines(_file(folder, "rollouts", step), list(values))


def read_last_rollouts(folder: Path) -> list[dict[str, Any]]:
    """The completions that the last step trained on; empty where there are none."""
    steps = _steps(folder, "rollouts")
    return read_lines(_file(folder, "rollouts", steps[-1])) if steps else []


def read_samples(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Step -> samples, in order of steps."""
    return {step: read_lines(_file(folder, "step", step)) for step in _steps(folder, "step")}


def move_superseded(folder: Path, step: int, attempt: int) -> None:
    """Moves samples of steps above `step` to `superseded/`, named after the attempt to come."""
    later = [
        _file(folder, kind, each)
        for kind in ("step", "rollouts")
        for each in _steps(folder, kind)
        if each > step
    ]
    for file in later:
        target = folder / "superseded" / f"before_{attempt}_{file.name}"
        with writing(target):
            target.parent.mkdir(exist_ok=True)
            file.replace(target)


def _steps(folder: Path, kind: str) -> list[int]:
    found = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(match[2]) for match in found if match and match[1] == kind)


def _file(folder: Path, kind: str, step: int) -> Path:
    return folder / f"{kind}_{step:06d}.jsonl"
