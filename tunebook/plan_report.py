"""A plan for people: rows, tokens, steps, learning rate, estimate, and what was downgraded."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tunebook.curves import sparkline
from tunebook.display import can_draw, duration_text, short_path
from tunebook.text_tables import add_line, as_text, count_text, lines_of, print_table, two_columns

BAR_WIDTH = 30


def render_plan(console: Console, plan: Mapping[str, Any]) -> None:
    """Prints a plan; `plan_text` says what the dict holds."""
    print_table(console, _plan_table(plan, unicode=can_draw(console)))


def plan_text(plan: Mapping[str, Any], *, width: int = 100, unicode: bool = True) -> str:
    """A plan as plain text. Every key may be missing or None, and its line is then left out.

    Args:
        plan: a dict with
            `recipe`, `name`, `model`, `start_from`, `backend`, `loss`, `reference`,
            `normalization`, `rollout`, `reward`, `environment`,
            `monitor`: text;
            `unit`: what rows are called, "rows" if it is missing;
            `data`: names of the sources;
            `rows_read`, `rows_skipped`: counts over all sources;
            `train`, `eval`: {`rows`, `kept`, `truncated`, `dropped`: {reason: count}, `tokens`};
            `split`: {`rule`, `exact_duplicates_across`, `normalised_duplicates_across`};
            `supervised_tokens`, `max_seq_len`: of the train rows;
            `token_histogram`: list of {`low`, `high`, `count`}, tokens of a train row;
            `batch_size`, `steps_per_epoch`, `planned_steps`, `epochs`, `unused_rows_per_epoch`;
            `eval_steps`, `checkpoint_steps`: lists of steps;
            `learning_rate`: one a step;
            `lora`: the adapter as a dict, None = full weights where the key is there;
            `trainable_parameters`, `total_parameters`: counts;
            `estimate`: {`seconds`, `train_tokens`, `peak_memory_bytes`, `price`, `basis`};
            `downgrades`: `setting:action:cause` tokens; `warnings`, `notes`: sentences;
            `hash`: text.
        width: characters of a line.
        unicode: blocks and dashes; else ASCII.
    """
    return as_text(_plan_table(plan, unicode=unicode), width)


def data_lines(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a plan says about rows and tokens, as labels and texts; no histogram."""
    table = two_columns()
    _add_data(table, {**plan, "token_histogram": None}, unicode=True)
    return lines_of(table)


def run_lines(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a plan says about all but its data, as labels and texts."""
    table = two_columns()
    _add_head(table, plan)
    _add_training(table, plan, unicode=True)
    return lines_of(table)


def downgrade_text(token: str) -> str:
    """A `setting:action:cause` token as words: `early stopping: disabled (no eval set)`."""
    setting, _, rest = token.partition(":")
    action, _, cause = rest.partition(":")
    words = f"{setting}: {action}" if action else setting
    return (f"{words} ({cause})" if cause else words).replace("_", " ")


def _place(text: Any) -> str:
    """A path from where the person stands; anything else as it is."""
    text = "" if text is None else str(text)
    return short_path(Path(text)) if os.path.isabs(text) else text


def _plan_table(plan: Mapping[str, Any], *, unicode: bool) -> Table:
    table = two_columns()
    _add_head(table, plan)
    _add_data(table, plan, unicode=unicode)
    _add_training(table, plan, unicode=unicode)
    return table


def _add_head(table: Table, plan: Mapping[str, Any]) -> None:
    head = " ".join(str(plan[key]) for key in ("recipe", "name") if plan.get(key))
    add_line(table, "plan", head)
    for key in (
        "model", "start_from", "backend", "loss", "reference", "normalization", "rollout",
        "reward", "environment", "monitor",
    ):  # fmt: skip
        add_line(table, key.replace("_", " "), _place(plan.get(key)))


def _add_data(table: Table, plan: Mapping[str, Any], *, unicode: bool) -> None:
    add_line(table, "data", ", ".join(map(_place, plan.get("data") or [])))
    _add_rows(table, plan)
    _add_tokens(table, plan, unicode)


def _add_training(table: Table, plan: Mapping[str, Any], *, unicode: bool) -> None:
    _add_steps(table, plan)
    rates = plan.get("learning_rate") or []
    if rates:
        arrow = "→" if unicode else "->"
        figures = f"first {rates[0]:.3g} {arrow} peak {max(rates):.3g} {arrow} last {rates[-1]:.3g}"
        add_line(
            table, "learning rate", f"{sparkline(rates, width=24, unicode=unicode)}  {figures}"
        )
    _add_adapter(table, plan)
    _add_estimate(table, plan.get("estimate") or {})
    for token in plan.get("downgrades") or []:
        add_line(table, "downgrade", f"{downgrade_text(token)} [{token}]", style="yellow")
    for sentence in plan.get("warnings") or []:
        add_line(table, "warning", sentence, style="yellow")
    for number, sentence in enumerate(plan.get("notes") or []):
        add_line(table, "" if number else "notes", sentence)
    add_line(table, "hash", plan.get("hash"))


def _add_rows(table: Table, plan: Mapping[str, Any]) -> None:
    unit = _unit(plan)
    figures = (("rows_read", "read"), ("rows_skipped", "skipped as unusable"))
    add_line(table, "rows", _figures(plan, figures))
    for side in ("train", "eval"):
        part = plan.get(side) or {}
        cut = "answers truncated" if unit == "pairs" else "truncated"
        figures = (("rows", unit), ("kept", "kept"), ("truncated", cut))
        add_line(table, side, _figures(part, figures))
        for reason, count in (part.get("dropped") or {}).items():
            add_line(table, "", f"{count_text(count)} dropped: {reason}")
    if plan.get("unused_rows_per_epoch"):
        add_line(table, "", f"{count_text(plan['unused_rows_per_epoch'])} {unit} unused per epoch")
    split = plan.get("split") or {}
    add_line(table, "split", split.get("rule"))
    figures = (
        ("exact_duplicates_across", "exact"),
        ("normalised_duplicates_across", "but for case, spacing and punctuation"),
    )
    duplicates = _figures(split, figures)
    add_line(table, "", duplicates and f"duplicates across splits: {duplicates}")


def _add_tokens(table: Table, plan: Mapping[str, Any], unicode: bool) -> None:
    tokens = {
        "total": (plan.get("train") or {}).get("tokens"),
        "supervised": plan.get("supervised_tokens"),
        "allowed": plan.get("max_seq_len"),
    }
    unit = _unit(plan)
    parts = [_figures(tokens, (("total", f"in the train {unit}"), ("supervised", "supervised")))]
    if tokens["allowed"] is not None:
        one = "prompt and answer" if unit == "pairs" else "row"
        parts.append(f"at most {count_text(tokens['allowed'])} a {one}")
    add_line(table, "tokens", ", ".join(part for part in parts if part))
    buckets = plan.get("token_histogram") or []
    most = max((bucket["count"] for bucket in buckets), default=0)
    labels = [f"{bucket['low']}-{bucket['high']}" for bucket in buckets]
    width = max(map(len, labels), default=0)
    for label, bucket in zip(labels, buckets, strict=True):
        filled = -(-bucket["count"] * BAR_WIDTH // most) if most else 0
        bar = ("█" if unicode else "#") * filled
        add_line(
            table, "", f"{label:>{width}} {bar}{' ' if bar else ''}{count_text(bucket['count'])}"
        )


def _add_steps(table: Table, plan: Mapping[str, Any]) -> None:
    figures = (
        ("planned_steps", "planned"),
        ("steps_per_epoch", "an epoch"),
        ("batch_size", f"{_unit(plan)} each"),
    )
    add_line(table, "steps", _figures(plan, figures))
    if plan.get("epochs") is not None:
        add_line(table, "epochs", f"{plan['epochs']:.4g}")
    evals, saves = plan.get("eval_steps"), plan.get("checkpoint_steps")
    if evals and evals == saves:
        add_line(table, "evaluate, save", f"after {_steps(evals)}")
        return
    if evals is not None:
        add_line(table, "evaluate", f"after {_steps(evals)}" if evals else "never")
    if saves is not None:
        add_line(table, "save", f"after {_steps(saves)}" if saves else "never")


def _add_adapter(table: Table, plan: Mapping[str, Any]) -> None:
    lora = plan.get("lora")
    if lora:
        settings = ", ".join(f"{key} {_plain(value)}" for key, value in lora.items())
        add_line(table, "adapter", settings)
    elif "lora" in plan:
        add_line(table, "adapter", "none: full weights are trained")
    trainable, total = plan.get("trainable_parameters"), plan.get("total_parameters")
    if trainable is not None:
        share = f" of {count_text(total)} ({trainable / total:.2%})" if total else ""
        add_line(table, "parameters", f"{count_text(trainable)} trainable{share}")


def _add_estimate(table: Table, estimate: Mapping[str, Any]) -> None:
    parts: list[str] = []
    if estimate.get("seconds") is not None:
        parts.append(duration_text(estimate["seconds"]))
    if estimate.get("train_tokens") is not None:
        parts.append(f"{count_text(estimate['train_tokens'])} train tokens")
    if estimate.get("peak_memory_bytes") is not None:
        parts.append(f"{estimate['peak_memory_bytes'] / 2**30:.2f} GiB peak memory")
    if estimate.get("price") is not None:
        parts.append(f"US$ {estimate['price']:.2f}")
    basis = f" ({estimate['basis']})" if parts and estimate.get("basis") else ""
    add_line(table, "estimate", ", ".join(parts) + basis)


def _figures(values: Mapping[str, Any], named: Sequence[tuple[str, str]]) -> str:
    """The known counts among `values`, each followed by its words."""
    return ", ".join(
        f"{count_text(values[key])} {words}" for key, words in named if values.get(key) is not None
    )


def _unit(plan: Mapping[str, Any]) -> str:
    """What the rows of a plan are called."""
    return plan.get("unit") or "rows"


def _steps(steps: Sequence[int]) -> str:
    """`step 20, 40, 60, ..., 180, 200 (10 times)`."""
    if len(steps) <= 6:
        return "step " + ", ".join(map(str, steps))
    head, tail = ", ".join(map(str, steps[:3])), ", ".join(map(str, steps[-2:]))
    return f"step {head}, ..., {tail} ({len(steps)} times)"


def _plain(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "+".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
