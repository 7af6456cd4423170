"""Metrics as one lineage: one value for every (step, key), whatever was killed and resumed."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunebook.runs.files import NON_FINITE, read_lines, replace_lines

METRICS_FILE = "metrics.jsonl"
CHECKPOINTS_FILE = "checkpoints.jsonl"
SUPERSEDED_BY = "superseded_by_attempt"


def as_number(value: Any) -> float | int | None:
    """A metric as a Python number, so that nothing it came from is kept alive."""
    if value is None or isinstance(value, numbers.Integral):
        return None if value is None else int(value)
    return float(value)


def read_metrics(run_path: Path) -> list[dict[str, Any]]:
    """One dict a step, in order: `step` and numbers (NaN restored) or None.

    Lines that share a step are merged.
    """
    by_step: dict[int, dict[str, Any]] = {}
    for line in read_lines(run_path / METRICS_FILE):
        values = {key: _restored(value) for key, value in line.items()}
        by_step.setdefault(line["step"], {}).update(values)
    return [by_step[step] for step in sorted(by_step)]


def history(rows: Sequence[dict[str, Any]], metric: str) -> list[tuple[int, float]]:
    """`(step, value)` of every row that holds the metric; NaN included, unknown left out."""
    return [(row["step"], row[metric]) for row in rows if row.get(metric) is not None]


def finite(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The points whose value is a finite number."""
    return [(step, value) for step, value in points if math.isfinite(value)]


def move_superseded(path: Path, step: int, attempt: int) -> list[dict[str, Any]]:
    """Moves lines of steps above `step` to `<name>.superseded.jsonl`; returns them.

    Each is marked with the attempt that takes their place. The copy is complete before the original
    shrinks, and a move that was killed in between is repeated without a duplicate.
    """
    lines = read_lines(path)
    moved = [line for line in lines if line["step"] > step]
    if not moved:
        return []
    target = _superseded(path)
    before = read_lines(target)
    there = [{k: v for k, v in line.items() if k != SUPERSEDED_BY} for line in before]
    added = [{**line, SUPERSEDED_BY: attempt} for line in moved if line not in there]
    replace_lines(target, [*before, *added])
    replace_lines(path, [line for line in lines if line["step"] <= step])
    return moved


def superseded_step(run_path: Path) -> int:
    """The highest step among superseded metrics; 0 without any."""
    lines = read_lines(_superseded(run_path / METRICS_FILE))
    return max((line["step"] for line in lines), default=0)


def _superseded(path: Path) -> Path:
    return path.with_name(f"{path.stem}.superseded{path.suffix}")


def _restored(value: Any) -> Any:
    return NON_FINITE[value] if isinstance(value, str) else value
