"""`report.html` of a run."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from tunebook.composition_errors import SCHEMAS
from tunebook.curves import plot_curves
from tunebook.display import duration_text, short_path
from tunebook.plan_report import data_lines, run_lines
from tunebook.report import next_commands, reward_text, state_text, summary_lines
from tunebook.reports import page
from tunebook.reports.charts import run_charts, throughput
from tunebook.reports.mask_sample import mask_sample_html
from tunebook.runs.directory import RunDir
from tunebook.runs.files import replace_text
from tunebook.runs.listing import flattened
from tunebook.runs.status import shown_state

GOOD = frozenset({"succeeded"})
BAD = frozenset({"failed", "interrupted"})
WHERE = frozenset({"runs_dir", "name", "resume", "dry_run"})
"""Keys of a config that say where a run is, not what it is."""
UNSET = "not set"
_composing = threading.Lock()
"""Hydra composes for one thread at a time."""


def write_run_report(run: RunDir) -> Path:
    """Writes `report.html` and `curves.png` of a run, and returns the path of the page."""
    evaluation = run.record.evaluation
    title = f"{run.record.recipe} #{run.record.number}: {run.path.name}"
    rows = run.metrics()
    plot_curves(rows, run.path / "curves.png", title=title, evaluation=evaluation)
    plan = run.read_plan() if (run.path / "plan.json").is_file() else {}
    parts = [
        f"<h1>{page.escaped(title)}</h1>",
        f'<p class="{state_class(shown_state(run))}">{page.escaped(state_text(run))}</p>',
        page.cards(_cards(run, rows, plan)),
        page.section("Curves", page.figures(run_charts(rows, evaluation=evaluation))),
        page.section("Outcome", page.pairs(summary_lines(run)), _plan_and_done(run, rows, plan)),
        _answers(run.samples()),
        _rollouts(run.last_rollouts()),
        page.section("Data", page.pairs(data_lines(plan)), _histogram(plan), mask_sample_html(run)),
        page.section("Plan", page.pairs(run_lines(plan))),
        _config(run),
        _next(run),
    ]
    path = run.path / "report.html"
    replace_text(path, page.page(title, parts))
    return path


def state_class(state: str) -> str:
    """The class of a state's words."""
    return "good" if state in GOOD else "bad" if state in BAD else "warn"


def config_differences(recipe: str, config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> its default and its value, where a config departs from those of its recipe."""
    ours, defaults = _flat(config), _flat(_defaults(recipe))
    return {
        key: (defaults.get(key, UNSET), ours.get(key, UNSET))
        for key in sorted(ours.keys() | defaults.keys())
        if ours.get(key) != defaults.get(key) and key not in WHERE
    }


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> value; an empty section says as much as none."""
    return {key: None if value == {} else value for key, value in flattened(config).items()}


@cache
def _defaults(recipe: str) -> dict[str, Any]:
    from tunebook.recipe_help import default_config

    with _composing:
        values = OmegaConf.to_container(default_config(recipe))
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _cards(
    run: RunDir, rows: Sequence[Mapping[str, Any]], plan: Mapping[str, Any]
) -> dict[str, tuple[str, str]]:
    record = run.record
    shown: dict[str, tuple[str, str]] = {}
    evaluation = record.evaluation
    if evaluation is not None and evaluation.best is not None:
        where = f"at step {evaluation.best_step}"
        shown[f"best {evaluation.metric}"] = (f"{evaluation.best:.4f}", where)
    steps = rows[-1]["step"] if rows else 0
    planned = record.outcome.planned_steps if record.outcome else plan.get("planned_steps")
    shown["steps"] = (str(steps), "" if planned is None else f"of {planned} planned")
    if record.timing.training_s is not None:
        attempts = len(record.attempts)
        more = f"in {attempts} attempts" if attempts > 1 else "training"
        shown["time"] = (duration_text(record.timing.training_s), more)
    speeds = sorted(speed for _, speed in throughput(rows))
    if speeds:
        shown["speed"] = (f"{speeds[len(speeds) // 2]:,.0f}", "tokens a second, median step")
    model = "adapter" if (run.model_dir / "adapter_config.json").is_file() else "full weights"
    step = None if evaluation is None else evaluation.promoted_step
    if record.model_available:
        shown["model"] = (model, "" if step is None else f"of step {step}")
    else:
        shown["model"] = ("none", "")
    return shown


def _plan_and_done(run: RunDir, rows: Sequence[Mapping[str, Any]], plan: Mapping[str, Any]) -> str:
    """What was planned beside what was done, where both or one of them are known."""
    record = run.record
    estimate = plan.get("estimate") or {}
    steps = rows[-1]["step"] if rows else 0
    per_epoch = plan.get("steps_per_epoch")
    tokens = [row["train/tokens"] for row in rows if row.get("train/tokens") is not None]
    evaluated = None if record.evaluation is None else record.evaluation.count
    epochs = plan.get("epochs")
    seconds = estimate.get("seconds")
    taken = record.timing.training_s
    lines: list[tuple[str, Any, Any]] = [
        ("steps", plan.get("planned_steps"), steps),
        (
            "epochs",
            None if epochs is None else f"{epochs:.4g}",
            f"{steps / per_epoch:.4g}" if per_epoch else None,
        ),
        ("evaluations", len(plan["eval_steps"]) if plan.get("eval_steps") else None, evaluated),
        ("train tokens", estimate.get("train_tokens"), round(sum(tokens)) if tokens else None),
        (
            "training time",
            None if seconds is None else duration_text(seconds),
            None if taken is None else duration_text(taken),
        ),
    ]
    known = [
        [
            name,
            *("" if one is None else f"{one:,}" if isinstance(one, int) else one for one in both),
        ]
        for name, *both in lines
        if any(one is not None for one in both)
    ]
    if not plan or not known:
        return ""
    names, planned, done = zip(*known, strict=True)
    columns = {"": names, "planned": planned, "done": done}
    return f"<h3>Planned and done</h3>{page.table(columns, kind='plain short')}"


def _answers(samples: Mapping[int, Sequence[Mapping[str, Any]]]) -> str:
    """One column of answers for the first and last step that was sampled, and one of expected."""
    if not samples:
        return ""
    steps = sorted({min(samples), max(samples)})
    by_prompt = list(zip(*(samples[step] for step in steps), strict=False))
    columns: dict[str, list[Any]] = {"prompt": [each[0].get("prompt") for each in by_prompt]}
    names = ["before training", f"after step {steps[-1]}"] if steps[0] == 0 else None
    for number, step in enumerate(steps):
        name = names[number] if names else f"step {step}"
        columns[name] = [_answer(each[number]) for each in by_prompt]
    expected = [each[0].get("expected") for each in by_prompt]
    if any(expected):
        columns["expected"] = expected
    return page.section("Answers before and after", page.table(columns, kind="texts"))


def _answer(sample: Mapping[str, Any]) -> str | None:
    if "reward" not in sample:
        return sample.get("completion")
    return f"{sample.get('completion')}\n\nreward {reward_text(sample['reward'])}"


def _rollouts(rollouts: Sequence[Mapping[str, Any]]) -> str:
    """What the last step was trained on."""
    if not rollouts:
        return ""
    advantages = [each.get("advantage") for each in rollouts]
    columns = {
        "prompt": [
            None
            if before is not None and before.get("prompt") == each.get("prompt")
            else each.get("prompt")
            for before, each in zip([None, *rollouts], rollouts, strict=False)
        ],
        "completion": [each.get("completion") for each in rollouts],
        "reward": [reward_text(each.get("reward")) for each in rollouts],
        "advantage": ["" if each is None else f"{each:+.2f}" for each in advantages],
    }
    return page.section("Trained on in the last step", page.table(columns, kind="texts"))


def _histogram(plan: Mapping[str, Any]) -> str:
    buckets = plan.get("token_histogram") or []
    most = max((bucket["count"] for bucket in buckets), default=0)
    if not most:
        return ""
    rows = "".join(
        f'<tr><td class="number">{bucket["low"]}–{bucket["high"]}</td><td>'
        f'<span class="bar" style="width:{70 * bucket["count"] / most:.1f}%"></span>'
        f"<small>{bucket['count']:,}</small></td></tr>"
        for bucket in buckets
    )
    unit = page.escaped(plan.get("unit") or "rows")
    return f'<h3>Tokens of the {unit}</h3><table class="bars">{rows}</table>'


def _config(run: RunDir) -> str:
    file = run.path / "config.yaml"
    if not file.is_file():
        return ""
    whole = f"<pre>{page.escaped(file.read_text(encoding='utf-8'))}</pre>"
    if run.record.recipe not in SCHEMAS:  # a recipe of one's own has no defaults to depart from
        return page.section("Config", page.details("All keys", whole))
    differences = config_differences(run.record.recipe, run.read_config())
    columns = {
        "key": list(differences),
        "default": [_value(default) for default, _ in differences.values()],
        "here": [_value(ours) for _, ours in differences.values()],
    }
    shown = page.table(columns) if differences else "<p>Every key has its default.</p>"
    return page.section(
        "Config", "<h3>What departs from the defaults</h3>", shown, page.details("All keys", whole)
    )


def _value(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _next(run: RunDir) -> str:
    commands = "".join(
        f"<p>To {page.escaped(label)}:</p><pre>{page.escaped(command)}</pre>"
        for label, command in next_commands(run)
    )
    return page.section("What next", page.pairs([("folder", short_path(run.path))]), commands)
