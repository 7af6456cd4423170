"""Finds, lists and compares runs."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunebook.display import tunebook_command
from tunebook.errors import RunError
from tunebook.runs.directory import RunDir
from tunebook.runs.numbering import RECORD_FILE, run_folders
from tunebook.runs.status import shown_state

DEFAULT_PAGE, MAX_PAGE = 25, 100
COST = "cost (US$)"
"""Result; see `cost_of`."""


@dataclass(frozen=True, slots=True)
class RunPage:
    """Some of the runs of a folder."""

    runs: list[RunDir]
    total: int
    """Runs in the folder."""
    next_cursor: str | None
    """Of the page that follows; None = this is the last."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs side by side."""

    runs: list[RunDir]
    differences: dict[str, list[Any]]
    """Dotted config key -> its value in each run, only where they differ."""
    results: dict[str, list[Any]]
    """Result -> its value in each run; None = unknown."""


def find_run(root: Path, text: str) -> RunDir:
    """The run that a path, a number (`12` or `#12`), an id or the start of one names.

    Raises:
        RunError: none, or more than one.
    """
    path = Path(text).expanduser()
    if (path / RECORD_FILE).is_file():
        return RunDir.open(path)
    runs = list_runs(root)
    digits = text.removeprefix("#")
    if digits.isdecimal():
        found = [run for run in runs if run.record.number == int(digits)]
    else:
        found = [run for run in runs if text in (run.record.id, run.path.name)] or [
            run for run in runs if text and run.record.id.startswith(text)
        ]
    if len(found) == 1:
        return found[0]
    if found:
        listed = ", ".join(f"#{run.record.number} {run.record.id}" for run in found)
        raise RunError(f"run {text!r} is ambiguous in {root}: {listed}. Give more of the id.")
    raise RunError(
        f"run {text!r}: neither a run directory, nor the number or id of one of the {len(runs)} "
        f"runs in {Path(root).absolute()}. `{tunebook_command()} runs list` shows them."
    )


def list_runs(root: Path) -> list[RunDir]:
    """Every run below `root/<recipe>/`, by number.

    Raises:
        RunError: there is no such folder, or a record is damaged.
    """
    root = Path(root).absolute()
    if not root.is_dir():
        raise RunError(f"{root}: there is no such folder. --root names the folder of the runs.")
    return sorted((RunDir.open(path) for path in run_folders(root)), key=_number)


def page_runs(root: Path, *, limit: int = DEFAULT_PAGE, cursor: str | None = None) -> RunPage:
    """One page of the runs of a folder, by number; runs that are added meanwhile come last.

    Args:
        root: folder of the runs.
        limit: runs, 100 at most.
        cursor: `next_cursor` of the page before; None = the first.

    Raises:
        RunError: a cursor that no page gave, or a limit out of range; else as `list_runs`.
    """
    if not 1 <= limit <= MAX_PAGE:
        raise RunError(f"limit={limit}: must be between 1 and {MAX_PAGE} runs")
    after = 0 if cursor is None else _number_of(cursor)
    runs = list_runs(root)
    rest = [run for run in runs if run.record.number > after]
    page = rest[:limit]
    more = len(rest) > limit
    return RunPage(page, len(runs), _cursor_after(page[-1].record.number) if more else None)


def _cursor_after(number: int) -> str:
    return base64.urlsafe_b64encode(f"after {number}".encode()).decode()


def _number_of(cursor: str) -> int:
    try:
        word, number = base64.urlsafe_b64decode(cursor.encode("ascii")).decode("ascii").split(" ")
        if word == "after" and number.isdecimal():
            return int(number)
    except ValueError:
        pass  # said below, as for a cursor that decodes to something else
    raise RunError(f"cursor={cursor!r}: no page gave this cursor; begin without one")


def compare_runs(runs: Sequence[RunDir]) -> Comparison:
    """What differs between the configs of runs, and what came out."""
    flat = [flattened(run.read_config()) for run in runs]
    keys = sorted({key for one in flat for key in one})
    differences = {
        key: [one.get(key) for one in flat]
        for key in keys
        if any(one.get(key) != flat[0].get(key) for one in flat)
    }
    summaries = [run_results(run) for run in runs]
    names = list(dict.fromkeys(name for one in summaries for name in one))
    return Comparison(
        runs=list(runs),
        differences=differences,
        results={name: [one.get(name) for one in summaries] for name in names},
    )


def run_results(run: RunDir) -> dict[str, Any]:
    """The results of one run that a comparison shows; None = unknown."""
    record = run.record
    evaluation, outcome = record.evaluation, record.outcome
    rows = run.metrics()
    tokens = [row["train/tokens"] for row in rows if row.get("train/tokens") is not None]
    losses = [row["train/loss"] for row in rows if row.get("train/loss") is not None]
    results: dict[str, Any] = {
        "state": shown_state(run),
        "stop reason": None if outcome is None else outcome.stop_reason.value,
        "steps": None if outcome is None else outcome.steps,
        "planned steps": None if outcome is None else outcome.planned_steps,
    }
    if evaluation is not None:
        results[f"best {evaluation.metric}"] = evaluation.best
        results["best step"] = evaluation.best_step
    results["last train/loss"] = losses[-1] if losses else None
    results["training seconds"] = record.timing.training_s
    results["tokens"] = round(sum(tokens)) if tokens else None
    cost = cost_of(run)
    if cost is not None:
        results[COST] = cost
    return results


def cost_of(run: RunDir) -> float | None:
    """US dollars that a run has cost alone, by the prices that its plan was told; None = unknown.

    Where hours are billed it is the time that was trained, so without waits; where tokens are, it
    is the part of the plan that was done.
    """
    hourly, seconds, outcome = price_per_hour(run), run.record.timing.training_s, run.record.outcome
    if hourly is not None:
        return None if seconds is None else hourly * seconds / 3600
    price = _estimate(run).get("price")
    if price is None or outcome is None or not outcome.planned_steps:
        return None
    return price * outcome.steps / outcome.planned_steps


def price_per_hour(run: RunDir) -> float | None:
    """US dollars an hour of what a run trained on; None = unknown, or hours are not billed."""
    estimate = _estimate(run)
    if not estimate.get("price") or not estimate.get("seconds"):
        return None
    return estimate["price"] / estimate["seconds"] * 3600


def _estimate(run: RunDir) -> dict[str, Any]:
    """What the plan of a run expects; empty = it does not say."""
    if not (run.path / "plan.json").is_file():
        return {}
    return run.read_plan().get("estimate") or {}


def _number(run: RunDir) -> int:
    return run.record.number


def flattened(value: Any, prefix: str = "") -> dict[str, Any]:
    """A nested mapping as one, its keys dotted."""
    if isinstance(value, Mapping) and value:
        flat: dict[str, Any] = {}
        for key, item in value.items():
            flat |= flattened(item, f"{prefix}.{key}" if prefix else str(key))
        return flat
    return {prefix: value}
