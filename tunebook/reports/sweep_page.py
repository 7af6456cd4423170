"""`report.html` of a sweep: its trials over each other, and a table of what came of them."""

from __future__ import annotations

import math
import os
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

from tunebook.curves import smoothed
from tunebook.display import duration_text, short_path, tunebook_command
from tunebook.reports import page
from tunebook.reports.charts import FEWEST_SMOOTHED, OTHER, Chart, Series, Style
from tunebook.reports.run_page import state_class
from tunebook.reports.svg import NUM_COLOURS, number_text
from tunebook.runs.files import replace_text
from tunebook.runs.metrics import finite, history
from tunebook.runs.starting import typed_override
from tunebook.sweeps.compare import SweepTable, compare_sweep
from tunebook.sweeps.record import SweepDir
from tunebook.sweeps.trial import FINAL

LOG_FROM = 8.0
"""How many times the smallest value of a key the largest is, from which on its axis is a log."""


def write_sweep_report(sweep: SweepDir) -> Path:
    """Writes `report.html` of a sweep, and returns its path."""
    table = compare_sweep(sweep)
    title = f"{sweep.recipe} sweep: {sweep.path.name}"
    trials = [sweep.current(each) for each in sweep.trials]
    states = Counter(each.state.value for each in trials)
    told = ", ".join(f"{count} {state}" for state, count in states.items())
    worst = "failed" if states["failed"] else "succeeded"
    if not all(each.state in FINAL for each in trials):
        worst = "failed" if states["failed"] else "running"
    count = "1 trial" if len(trials) == 1 else f"{len(trials)} trials"
    parts = [
        f"<h1>{page.escaped(title)}</h1>",
        f'<p class="{state_class(worst)}">{count}: {page.escaped(told)}</p>',
        page.cards(_cards(sweep, table)),
        page.section("Curves", page.figures(sweep_charts(sweep, table))),
        page.section("Trials", _trials(sweep, table)),
        _next(sweep, left=sum(each.state not in FINAL for each in trials)),
    ]
    path = sweep.path / "report.html"
    replace_text(path, page.page(title, parts))
    return path


def sweep_charts(sweep: SweepDir, table: SweepTable) -> list[Chart]:
    """Curves of all trials over steps, and the best value of each over what was swept."""
    labels = {each.number: each.label for each in sweep.trials}
    colours = _colours(table)
    evals: list[Series] = []
    trained: list[Series] = []
    runs = {each.number: sweep.run_of(each) for each in sweep.trials}
    metrics = {number: run.metrics() if run else [] for number, run in runs.items()}
    rewarded = any("train/reward" in row for rows in metrics.values() for row in rows)
    drawn = "reward" if rewarded else "loss"
    any_calm = False
    for row in sorted(table.rows, key=lambda row: colours[row["trial"]] != OTHER):
        number = row["trial"]
        name, rows = f"{number}: {labels[number]}", metrics[number]
        if table.metric is not None:
            start = table.metric.replace("eval/", "start/", 1)
            points = finite([*history(rows, start), *history(rows, table.metric)])
            evals.append(Series(name, points, Style.MARKED, colours[number]))
        train = finite(history(rows, f"train/{drawn}"))
        calm = len(train) >= FEWEST_SMOOTHED
        any_calm = any_calm or calm
        points = smoothed(train, max(len(train) // 20, 2)) if calm else train
        trained.append(Series(name, points, Style.LINE, colours[number]))
    train_label = f"train/{drawn}, smoothed" if any_calm else f"train/{drawn}"
    charts = [
        Chart("metric", table.metric or "value", [each for each in evals if each.points]),
        Chart(f"train_{drawn}", train_label, [each for each in trained if each.points]),
        *(_over_key(table, key, labels) for key in table.settings),
    ]
    return [chart for chart in charts if chart.series]


def _colours(table: SweepTable) -> dict[int, int]:
    """Trial -> its colour: by number while they suffice, else the best have one, others `OTHER`."""
    numbers = [row["trial"] for row in table.rows]
    if len(numbers) <= NUM_COLOURS:
        return {number: place for place, number in enumerate(sorted(numbers))}
    return {n: place if place < NUM_COLOURS else OTHER for place, n in enumerate(numbers)}


def _over_key(table: SweepTable, key: str, labels: dict[int, str]) -> Chart:
    """The best value of each trial over its value of a swept key, where that is a number."""
    best = table.best
    found = [
        (row[key], row[best], f"{row['trial']}: {labels[row['trial']]}: {number_text(row[best])}")
        for row in table.rows
        if isinstance(row[key], (int, float))
        and not isinstance(row[key], bool)
        and row[best] is not None
        and math.isfinite(row[best])
    ]
    values = {value for value, _, _ in found}
    title = f"{best} by {key}"
    series: list[Series] = []
    if len(values) > 1:
        points = [(float(value), result) for value, result, _ in found]
        series = [Series(title, points, Style.DOTS, 3, [label for _, _, label in found])]
    is_log = bool(values) and min(values) > 0 and max(values) / min(values) >= LOG_FROM
    return Chart(f"by_{key}", best, series, x_label=key, x_is_log=is_log, caption=title)


def _cards(sweep: SweepDir, table: SweepTable) -> dict[str, tuple[str, str]]:
    best = table.best
    shown: dict[str, tuple[str, str]] = {}
    labels = {each.number: each.label for each in sweep.trials}
    if table.metric is not None and table.rows and table.rows[0][best] is not None:
        first = table.rows[0]
        shown[best] = (number_text(first[best]), f"at step {first['best step']}")
        shown["best trial"] = (f"trial {first['trial']}", labels[first["trial"]])
    tokens = _sum(table, "tokens")
    seconds = _sum(table, "seconds")
    shown["trials"] = (str(len(table.rows)), "")
    shown["tokens"] = (f"{tokens:,.0f}", "trained on, of all trials")
    told = "summed over trials; trials that ran together each count the whole time"
    shown["training"] = (duration_text(seconds), told)
    return shown


def _sum(table: SweepTable, key: str) -> float:
    return math.fsum(row[key] for row in table.rows if row[key] is not None)


def _trials(sweep: SweepDir, table: SweepTable) -> str:
    if not table.rows:
        return ""
    columns: dict[str, list[Any]] = {
        heading: [row[heading] for row in table.rows]
        for heading in table.rows[0]
        if heading != "path" and any(row[heading] is not None for row in table.rows)
    }
    if "tokens" in columns:
        columns["tokens"] = [None if n is None else page.Count(n) for n in columns["tokens"]]
    if "run" in columns:
        columns["run"] = [
            None if row["path"] is None else _run_link(sweep, row) for row in table.rows
        ]
    return page.table(columns, kind="plain", long=("why",))


def _run_link(sweep: SweepDir, row: dict[str, Any]) -> str:
    report = sweep.runs_dir / row["path"] / "report.html"
    if not report.is_file():
        return row["run"]
    return page.link(row["run"], os.path.relpath(report, sweep.path))


def _next(sweep: SweepDir, *, left: int) -> str:
    command, where = tunebook_command(), short_path(sweep.path)
    commands = [("see this table in a terminal", f"runs compare {shlex.quote(where)}")]
    if left:
        resume = f"{sweep.recipe} --multirun {typed_override('sweep.resume', where)}"
        missing = "one that is missing" if left == 1 else f"{left} that are missing"
        commands = [(f"train the {missing}", resume), *commands]
    shown = "".join(
        f"<p>To {page.escaped(what)}:</p><pre>{page.escaped(f'{command} {rest}')}</pre>"
        for what, rest in commands
    )
    return page.section("What next", shown)
