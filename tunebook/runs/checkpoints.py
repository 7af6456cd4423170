"""The lines of `checkpoints.jsonl`: which checkpoints are there, which is best, which may go."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunebook.runs.files import as_float
from tunebook.types import CheckpointRef


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete training state, saved after `step` optimizer steps."""

    step: int
    ref: CheckpointRef
    monitor: float | None
    """Value of the monitored metric at this step; None = not evaluated."""
    complete: bool = True


def checkpoint_to_json(checkpoint: Checkpoint, run_path: Path) -> dict[str, Any]:
    """The line of a checkpoint; a location inside the run is written relative to it."""
    ref = checkpoint.ref
    inside = _inside(ref.location, run_path)
    return {
        "step": checkpoint.step,
        "ref": {
            "name": ref.name,
            "location": ref.location if inside is None else inside,
            "relative": inside is not None,
            "has_optimizer": ref.has_optimizer,
        },
        "monitor": checkpoint.monitor,
        "complete": checkpoint.complete,
    }


def checkpoint_from_json(line: Mapping[str, Any], run_path: Path) -> Checkpoint:
    """The checkpoint of a line; a relative location is taken from where the run lies now."""
    ref = line["ref"]
    location = str(run_path / ref["location"]) if ref["relative"] else ref["location"]
    return Checkpoint(
        step=line["step"],
        ref=CheckpointRef(name=ref["name"], location=location, has_optimizer=ref["has_optimizer"]),
        monitor=as_float(line["monitor"]),
        complete=line["complete"],
    )


def usable_checkpoints(lines: Sequence[Mapping[str, Any]], run_path: Path) -> list[Checkpoint]:
    """The complete checkpoints that still exist, by step number; a later line replaces an earlier.

    What a service keeps under an identifier of its own is taken to exist until a line says that it
    was discarded.
    """
    by_step = {line["step"]: checkpoint_from_json(line, run_path) for line in lines}
    in_order = [by_step[step] for step in sorted(by_step)]
    return [one for one in in_order if one.complete and _exists(one)]


def newest_checkpoint(checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    """The checkpoint of the highest step; times and names do not matter."""
    return max(checkpoints, key=lambda one: one.step, default=None)


def best_checkpoint(checkpoints: Sequence[Checkpoint], direction: str) -> Checkpoint | None:
    """The checkpoint with the best monitor, the earliest among equals; NaN and None never are.

    Args:
        direction: `down` or `up`.
    """
    sign = _sign(direction)
    measured = [
        one for one in checkpoints if one.monitor is not None and math.isfinite(one.monitor)
    ]
    return min(measured, key=lambda one: (sign * (one.monitor or 0.0), one.step), default=None)


def checkpoints_to_discard(
    checkpoints: Sequence[Checkpoint], keep: int, best_step: int | None
) -> list[Checkpoint]:
    """The checkpoints to delete so that `keep` are left, oldest first.

    The best and the newest always stay and count towards `keep`; so 2 stay for `keep` 1 when they
    differ.
    """
    newest_first = sorted(checkpoints, key=lambda one: one.step, reverse=True)
    kept = {one.step for one in newest_first[:1]}
    kept |= {one.step for one in newest_first if one.step == best_step}
    for one in newest_first:
        if len(kept) >= keep:
            break
        kept.add(one.step)
    return [one for one in reversed(newest_first) if one.step not in kept]


def _sign(direction: str) -> float:
    if direction not in ("down", "up"):
        raise ValueError(f"direction is {direction!r}; allowed: down, up")
    return 1.0 if direction == "down" else -1.0


def _inside(location: str, run_path: Path) -> str | None:
    path = Path(location)
    if not path.is_absolute():
        path = Path.cwd() / path
        if not path.exists():
            return None
    root = run_path.resolve()
    resolved = path.resolve()
    return str(resolved.relative_to(root)) if resolved.is_relative_to(root) else None


def _exists(checkpoint: Checkpoint) -> bool:
    location = checkpoint.ref.location
    return not Path(location).is_absolute() or Path(location).exists()
