"""What a run did, in words and figures for a terminal; a plan is in `plan_report`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tunebook.curves import curve_of_run, loss_curve, plot_curves
from tunebook.display import (
    can_draw,
    duration_text,
    script_command,
    short_path,
    tunebook_command,
)
from tunebook.plan_report import downgrade_text, plan_text, render_plan
from tunebook.runs.directory import RunDir
from tunebook.runs.files import without_surrogates
from tunebook.runs.record import Evaluation, Preparation, RunRecord, RunState, StopReason
from tunebook.runs.starting import resume_text
from tunebook.runs.status import INTERRUPTED, shown_state
from tunebook.text_tables import (
    LABEL_WIDTH,
    add_line,
    as_text,
    lines_of,
    print_table,
    two_columns,
)

__all__ = [
    "curve_of_run",
    "downgrade_text",
    "loss_curve",
    "plan_text",
    "plot_curves",
    "render_plan",
    "render_summary",
    "rollouts_table",
    "samples_table",
    "summary_lines",
    "summary_text",
]

MAX_SAMPLE_CHARACTERS = 200
FEWEST_CURVE_STEPS = 4
"""Steps of a run below which its numbers say more than a drawing of them."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def summary_text(run: RunDir, *, width: int = 100) -> str:
    """What became of a run, in words: why it stopped, what is best, where it lies, what is next.

    Paths and commands are never broken, however narrow the lines.
    """
    return as_text(_summary_table(run), width) + "\n".join(_places(run)) + "\n"


def summary_lines(run: RunDir) -> list[tuple[str, str]]:
    """What became of a run, as labels and sentences."""
    return lines_of(_summary_table(run))


def render_summary(console: Console, run: RunDir) -> None:
    """Prints the summary of a run under its loss curve, which takes more than a few steps."""
    rows = run.metrics()
    drawn = [row for row in rows if {"train/loss", "eval/loss", "train/reward"} & set(row)]
    if len(drawn) >= FEWEST_CURVE_STEPS:
        width = min(console.width, 76)
        console.print(Text(curve_of_run(rows, width=width, unicode=can_draw(console))))
        console.print()
    print_table(console, _summary_table(run))
    for line in _places(run):
        console.print(Text(line), soft_wrap=True)


def samples_table(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> Table:
    """Prompts with the answers before and after training, as a rich table.

    Args:
        before: dicts with `prompt`, `completion` and, where known, `expected` and `reward`.
        after: the same prompts in the same order; their answers after training.
    """
    expected = [sample.get("expected") for sample in before]
    table = Table(box=box.SIMPLE_HEAD, show_lines=True, pad_edge=False)
    headings = ["prompt", "before", "after", *(["expected"] if any(expected) else [])]
    for heading in headings:
        table.add_column(heading, overflow="fold", ratio=1)
    for old, new, answer in zip(before, after, expected, strict=True):
        cells = [_sample(old["prompt"]), _answer(old), _answer(new)]
        table.add_row(*cells, *([_sample(answer)] if any(expected) else []))
    return table


def rollouts_table(rollouts: Sequence[Mapping[str, Any]]) -> Table:
    """Completions that a step trained on, with rewards and advantages, as a rich table.

    Args:
        rollouts: dicts with `prompt`, `completion`, `reward` and `advantage`, those of a prompt
            after each other.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("prompt", overflow="fold", ratio=2)
    table.add_column("completion", overflow="fold", ratio=3)
    for heading in ("reward", "advantage"):
        table.add_column(heading, justify="right", no_wrap=True)
    last = None
    for each in rollouts:
        new = each["prompt"] != last
        if new and last is not None:
            table.add_section()
        last = each["prompt"]
        advantage = each.get("advantage")
        table.add_row(
            _sample(last if new else ""),
            _sample(each["completion"]),
            reward_text(each.get("reward")),
            "" if advantage is None else f"{advantage:+.2f}",
        )
    return table


def reward_text(reward: float | None) -> str:
    """A reward for people."""
    return "unscored" if reward is None else f"{reward:.3g}"


def state_text(run: RunDir) -> str:
    """One sentence on how a run stands or ended."""
    record = run.record
    outcome = record.outcome
    if outcome is None:
        return {
            "pending": "has not started",
            "dry run": "is a dry run: planned, and not trained",
            "running": "is running",
            "interrupted": "was interrupted: its process is gone",
        }.get(shown_state(run), shown_state(run))
    made = f"{outcome.steps} of {outcome.planned_steps} planned steps"
    if outcome.stop_reason is StopReason.FAILED:
        return f"failed after {made}"
    if outcome.stop_reason is StopReason.CANCELLED:
        return f"was cancelled after {made}"
    why = {
        StopReason.COMPLETED: "all epochs are done",
        StopReason.MAX_STEPS: "plan.max_steps is reached",
        StopReason.EARLY_STOPPING: "stopped early, the evaluation no longer improved",
        StopReason.HEALTH: f"stopped by the health rule {outcome.rule}",
    }[outcome.stop_reason]
    return f"succeeded: {why} ({made})"


def _summary_table(run: RunDir) -> Table:
    record = run.record
    table = two_columns()
    add_line(table, "run", f"#{record.number} {record.id} {state_text(run)}", style="bold")
    if record.failure is not None:
        add_line(table, "why", f"{record.failure.message} [{record.failure.code}]", style="red")
    rows = run.metrics()
    if record.evaluation is not None:
        metric = record.evaluation.metric
        start = run.history(metric.replace("eval/", "start/", 1))
        add_line(table, "best", _best_text(record.evaluation, [*start, *run.history(metric)]))
        add_line(table, "last", _last_text(record.evaluation))
        add_line(table, "beside it", _beside_text(record.evaluation, rows))
    elif rows:
        add_line(table, "evaluation", "never evaluated")
    for name in ("reward", "loss"):
        values = [row[f"train/{name}"] for row in rows if row.get(f"train/{name}") is not None]
        if values:
            add_line(table, f"train {name}", f"{values[0]:.4f} at first, {values[-1]:.4f} at last")
    add_line(table, "time", _time_text(record, rows))
    for token in record.outcome.downgrades if record.outcome else []:
        add_line(table, "downgrade", f"{downgrade_text(token)} [{token}]", style="yellow")
    return table


def _places(run: RunDir) -> list[str]:
    """Lines of where things lie and what to do next."""
    places = [("model", run.model_dir)] if run.record.model_available else []
    places += [("folder", run.path), *(("W&B files", one) for one in _offline_wandb(run))]
    lines = [f"{label:<{LABEL_WIDTH}}  {short_path(path)}" for label, path in places]
    for label, command in next_commands(run):
        lines += ["", f"To {label}:", f"  {command}"]
    return lines


def _offline_wandb(run: RunDir) -> list[Path]:
    """Folders of what W&B kept here for lack of a connection, one an attempt."""
    return sorted((run.path / "wandb").glob("offline-run-*"))


def next_commands(run: RunDir) -> list[tuple[str, str]]:
    """What a person can do next with a run, each with the exact command or code."""
    record = run.record
    commands: list[tuple[str, str]] = []
    where = short_path(run.path)
    resume = resume_text(run, path=where)
    has_config = (run.path / "config.yaml").is_file()
    config = run.read_config() if has_config else {}
    if record.state is RunState.SUCCEEDED:
        longer = _longer(config.get("plan") or {})
        commands.append(("train further", resume_text(run, path=where, change=longer)))
    elif record.state is RunState.PENDING:
        if record.preparation is Preparation.VERIFIED:
            commands.append(("start it", resume))
    elif run.checkpoints():
        commands.append(("go on from the last checkpoint", resume))
    elif shown_state(run) == INTERRUPTED:
        commands.append(("begin again, as no checkpoint was saved", resume))
    if record.model_available:
        commands.append(("use the model in Python", _loading_code(run, config)))
    if offline := _offline_wandb(run):
        folders = " ".join(shlex.quote(short_path(one)) for one in offline)
        sync = script_command("wandb", module="wandb")
        commands.append(("send it to W&B", f"{sync} sync {folders}"))
    show = f"{tunebook_command()} runs show {shlex.quote(short_path(run.path))}"
    commands.append(("see it again", show))
    return commands


def _longer(plan: Mapping[str, Any]) -> str:
    if plan.get("max_steps") is not None:
        return f"plan.max_steps={2 * plan['max_steps']}"
    epochs = plan.get("epochs")
    return f"plan.epochs={epochs + 1:g}" if epochs is not None else "plan.epochs=..."


def _loading_code(run: RunDir, config: Mapping[str, Any]) -> str:
    folder = short_path(run.model_dir)
    if not (run.model_dir / "adapter_config.json").is_file():
        return f"transformers.AutoModelForCausalLM.from_pretrained({folder!r})"
    return f"peft.AutoPeftModelForCausalLM.from_pretrained({folder!r})"


def _best_text(evaluation: Evaluation, history: Sequence[tuple[int, float]]) -> str:
    if evaluation.best is None:
        return f"{evaluation.metric} was never a finite number"
    text = f"{evaluation.metric} {evaluation.best:.4f} at step {evaluation.best_step}"
    if history and history[0][0] != evaluation.best_step:
        first = history[0][1]
        change = f", {(evaluation.best - first) / abs(first):+.1%}" if first else ""
        text += f" (first {first:.4f} at step {history[0][0]}{change})"
    if evaluation.promoted_step is not None:
        text += f"; the model is from step {evaluation.promoted_step}"
    return text


def _beside_text(evaluation: Evaluation, rows: Sequence[Mapping[str, Any]]) -> str:
    """What else the best evaluation found, where there is more to say than the monitor does."""
    best = next((row for row in rows if row["step"] == evaluation.best_step), {})
    named = ("eval/loss", "eval/reward", "eval/accuracy", "eval/margin")
    others = [key for key in named if key != evaluation.metric and best.get(key) is not None]
    found = ", ".join(f"{key} {best[key]:.4f}" for key in others)
    return found and f"{found} at step {evaluation.best_step}"


def _last_text(evaluation: Evaluation) -> str:
    last = "unknown" if evaluation.last is None else f"{evaluation.last:.4f}"
    times = "evaluation" if evaluation.count == 1 else "evaluations"
    return f"{evaluation.metric} {last} at step {evaluation.last_step}, {evaluation.count} {times}"


def _time_text(record: RunRecord, rows: Sequence[Mapping[str, Any]]) -> str:
    timing = record.timing
    phases = {"preparing": timing.preparing_s, "training": timing.training_s}
    parts = [
        f"{duration_text(value)} {name}" for name, value in phases.items() if value is not None
    ]
    measured = [
        (row["train/tokens"], row["time/step_s"])
        for row in rows
        if row.get("train/tokens") is not None and row.get("time/step_s")
    ]
    seconds = sum(one for _, one in measured)
    if seconds > 0:
        parts.append(f"{sum(one for one, _ in measured) / seconds:,.0f} tokens/s in the steps")
    if len(record.attempts) > 1:
        parts.append(f"{len(record.attempts)} attempts")
    return ", ".join(parts)


def _answer(sample: Mapping[str, Any]) -> Text:
    """An answer, with its reward below it where it has one."""
    text = _sample(sample["completion"])
    if "reward" in sample:
        text.append(f"\nreward {reward_text(sample['reward'])}", style="dim")
    return text


def _sample(text: Any) -> Text:
    shown = without_surrogates("" if text is None else str(text)).strip()
    shown = _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", shown)
    if len(shown) > MAX_SAMPLE_CHARACTERS:
        shown = shown[:MAX_SAMPLE_CHARACTERS] + f" ... (+{len(shown) - MAX_SAMPLE_CHARACTERS})"
    return Text(shown)
