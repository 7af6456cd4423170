"""The trials of a sweep side by side: in what they differ, and what came of them."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tunebook.display import make_console
from tunebook.errors import RunError
from tunebook.runs import RunDir, compare_runs
from tunebook.runs.files import to_json
from tunebook.runs.listing import COST, cost_of, price_per_hour, run_results
from tunebook.sweeps.record import SWEEP_FILE, SWEEPS, SweepDir
from tunebook.text_tables import columns_fit, print_columns


@dataclass(frozen=True, slots=True)
class SweepTable:
    """A row a trial, the best first; those without a value follow by number."""

    metric: str | None
    """What trials are compared by; None = none has evaluated, or they differ in it."""
    settings: list[str]
    """Headings of the settings in which trials differ."""
    rows: list[dict[str, Any]]
    """Heading -> value; None = unknown. All rows have the same headings."""

    @property
    def best(self) -> str:
        """Heading of the best value."""
        return best_heading(self.metric)

    def to_csv(self) -> str:
        """As text with a line of headings."""
        text = io.StringIO()
        writer = csv.DictWriter(text, list(self.rows[0]) if self.rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return text.getvalue()


def compare_sweep(sweep: SweepDir) -> SweepTable:
    """The table of a sweep, as its record and its runs have it now."""
    trials = [sweep.current(each) for each in sweep.trials]
    runs = [sweep.run_of(each) for each in trials]
    there = [run for run in runs if run is not None]
    differences = compare_runs(there).differences if len(there) > 1 else {}
    values = {
        run.path: {key: one[number] for key, one in differences.items()}
        for number, run in enumerate(there)
    }
    metrics = {each.metric for each in trials if each.metric is not None}
    metric = metrics.pop() if len(metrics) == 1 else None
    best = best_heading(metric)
    costs = _costs(there)
    rows: list[dict[str, Any]] = []
    for trial, run in zip(trials, runs, strict=True):
        results = {} if run is None else run_results(run)
        evaluation = None if run is None else run.record.evaluation
        seconds = results.get("training seconds")
        rows.append(
            {
                "trial": trial.number,
                "run": None if run is None else f"#{run.record.number}",
                **(dict.fromkeys(differences) if run is None else values[run.path]),
                "state": trial.state.value,
                best: None if evaluation is None else evaluation.best,
                "best step": None if evaluation is None else evaluation.best_step,
                "steps": results.get("steps"),
                "seconds": None if seconds is None else round(seconds, 1),
                "tokens": results.get("tokens"),
                **({} if not costs else {COST: None if run is None else costs.get(run.path)}),
                "path": trial.run,
                "why": trial.why,
            }
        )
    direction = {run.record.evaluation.direction for run in there if run.record.evaluation}
    sign = -1.0 if direction == {"up"} else 1.0
    if metric is not None:
        rows.sort(key=lambda row: math.inf if row[best] is None else sign * row[best])
    return SweepTable(metric, list(differences), rows)


def _costs(runs: Sequence[RunDir]) -> dict[Path, float]:
    """The part of each run in what its sweep cost, US dollars; empty = nothing is known to bill.

    Runs that train at the same time share one resource: where hours are billed, they are counted
    once, and divided by the time that each run has trained.
    """
    costs: dict[Path, float] = {}
    by_price: dict[float, list[tuple[RunDir, float]]] = {}
    for run in runs:
        hourly, seconds, alone = price_per_hour(run), run.record.timing.training_s, cost_of(run)
        if hourly is not None and seconds:
            by_price.setdefault(hourly, []).append((run, seconds))
        elif alone is not None:
            costs[run.path] = alone
    for hourly, trained in by_price.items():
        whole = sum(seconds for _, seconds in trained)
        billed = min(whole, _seconds_of_any([run for run, _ in trained]))
        for run, seconds in trained:
            costs[run.path] = hourly * billed / 3600 * seconds / whole
    return costs


def _seconds_of_any(runs: Sequence[RunDir]) -> float:
    """Seconds in which at least one of the runs was under way; endless where a run does not say."""
    total, until = 0.0, -math.inf
    spans: list[tuple[float, float]] = []
    for attempt in (each for run in runs for each in run.record.attempts):
        if attempt.ended_at is None:
            return math.inf
        first, last = map(datetime.fromisoformat, (attempt.started_at, attempt.ended_at))
        spans.append((first.timestamp(), last.timestamp()))
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, until))
        until = max(until, last)
    return total


def best_heading(metric: str | None) -> str:
    """Heading of the best value of a metric."""
    return f"best {metric or 'value'}"


def find_sweep(root: Path, text: str) -> SweepDir:
    """The sweep that a path names, or the name of a folder in `root/sweeps/`.

    Raises:
        RunError: there is none.
    """
    for path in (Path(text).expanduser(), root / SWEEPS / text):
        if (path / SWEEP_FILE).is_file():
            return SweepDir.open(path)
    raise RunError(
        f"runs compare {text}: name two runs or more, or one sweep, which is a folder in "
        f"{root / SWEEPS}"
    )


def print_sweep(sweep: SweepDir, *, as_json: bool, as_csv: bool) -> None:
    """Prints the table of a sweep; a narrow terminal gets fewer columns, a pipe all of them."""
    table = compare_sweep(sweep)
    if as_json:
        print(to_json({"sweep": str(sweep.path), **asdict(table)}, indent=2))
        return
    if as_csv:
        print(table.to_csv(), end="")
        return
    columns = {key: [cell(row[key]) for row in table.rows] for key in table.rows[0]}
    layouts = [columns]
    for heading in ("path", "why", "tokens", "steps", "best step", "seconds", COST, "run"):
        layouts.append({key: cells for key, cells in layouts[-1].items() if key != heading})
    console = make_console()
    fitting = next((one for one in layouts if columns_fit(console, one)), layouts[-1])
    print_columns(console, fitting)


def cell(value: Any) -> str:
    """A value for people; None is empty."""
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
