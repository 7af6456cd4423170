"""The plan of a run as a person reads it and as `plan.json` keeps it, and its hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tunebook.compose import as_dict
from tunebook.config import RecipeConfig
from tunebook.errors import ConfigError
from tunebook.plan import MixedRows, Plan, checkpoint_steps, make_plan
from tunebook.preparation import PreparedRows
from tunebook.schedule import learning_rate_at, warmup_steps
from tunebook.settings import make_schedule
from tunebook.types import Datum, Workload

if TYPE_CHECKING:
    from tunebook.render import RenderedRows

HISTOGRAM_BUCKETS = 10
CURVE_POINTS = 500
"""Steps of which the plan names the learning rate, evenly spread; peak and last among them."""
NOT_PART_OF_THE_PLAN = (
    "name", "runs_dir", "tracker", "dry_run", "resume", "strict", "samples", "checkpoints",
    "backend",
)  # fmt: skip
"""Top-level keys that change nothing about what is trained on what."""
NOT_PART_OF_THE_DATA = ("path", "hub", "function", "revision", "subset", "split", "function_args")
"""Where rows come from; what they hold is in the fingerprint."""


def plan_for(config: RecipeConfig, sources: tuple[MixedRows, ...]) -> Plan:
    """The plan of a config over the rows that can be trained.

    Raises:
        ConfigError: a plan that cannot be.
    """
    try:
        return make_plan(
            sum(source.rows_per_epoch for source in sources),
            batch_size=config.plan.batch_size,
            epochs=config.plan.epochs,
            max_steps=config.plan.max_steps,
            drop_last=config.plan.drop_last,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def downgrades_for(config: RecipeConfig, *, has_eval: bool) -> tuple[str, ...]:
    """Settings that this run cannot honour, as `setting:action:cause`.

    Raises:
        ConfigError: there are some and `strict` is set.
    """
    found: list[str] = []
    if not has_eval:
        if config.early_stopping.patience is not None:
            found.append("early_stopping:disabled:no_eval_set")
        if config.eval.monitor is not None:
            found.append("eval.monitor:ignored:no_eval_set")
    if found and config.strict:
        raise ConfigError(
            f"strict=true and the run would be downgraded: {', '.join(found)}. Change these "
            "settings, or the eval split, or accept the downgrade with strict=false"
        )
    return tuple(found)


def summarize(
    config: RecipeConfig,
    rows: PreparedRows,
    plan: Plan,
    *,
    train_data: RenderedRows,
    eval_data: RenderedRows | None,
    downgrades: Sequence[str],
) -> dict[str, Any]:
    """What `plan.json` holds; `hash` covers everything that decides what is trained on what."""
    schedule = make_schedule(config)
    stride = -(-plan.planned_steps // CURVE_POINTS)
    peak_at = min(
        max(warmup_steps(plan.planned_steps, warmup=schedule.warmup), 1), plan.planned_steps
    )
    steps = sorted({*range(1, plan.planned_steps, stride), peak_at, plan.planned_steps})
    content = {
        "config": _hashed_config(config),
        "train": [row.content_hash for row in rows.train],
        "eval": [row.content_hash for row in rows.eval],
        "train_tokens": _digest(train_data),
        "eval_tokens": _digest(eval_data),
        "planned_steps": plan.planned_steps,
    }
    supervised = np.asarray(train_data.supervised)
    saves_at = checkpoint_steps(plan.planned_steps, checkpoint_every=config.plan.checkpoint_every)
    return {
        "name": config.name,
        "model": config.model.name,
        "rows_read": rows.manifest["rows_read"],
        "rows_skipped": rows.manifest["rows_skipped"],
        "train": _side(len(rows.train), train_data),
        "eval": _side(len(rows.eval), eval_data),
        "split": rows.split,
        "sources": rows.manifest["sources"],
        "supervised_tokens": int(supervised.sum()),
        "token_histogram": _histogram(np.asarray(train_data.lengths)),
        "batch_size": plan.batch_size,
        "steps_per_epoch": plan.steps_per_epoch,
        "planned_steps": plan.planned_steps,
        "epochs": round(plan.epochs, 4),
        "rows_per_epoch": plan.train_rows,
        "unused_rows_per_epoch": plan.unused_rows_per_epoch,
        "checkpoint_steps": saves_at,
        "eval_steps": saves_at if eval_data else (),
        "max_seq_len": config.max_seq_len,
        "learning_rate": [learning_rate_at(step, plan.planned_steps, schedule) for step in steps],
        "warmup_steps": warmup_steps(plan.planned_steps, warmup=schedule.warmup),
        "lora": as_dict(config)["lora"],
        "downgrades": list(downgrades),
        "notes": train_data.report.notes,
        "warnings": [*rows.warnings, *train_data.report.warnings],
        "hash": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16],
    }


def check_plan_hash(config: RecipeConfig, summary: dict[str, Any]) -> None:
    """Returns if the config asks for no particular plan, or for this one.

    Raises:
        ConfigError: the plan has changed since its hash was noted.
    """
    if config.plan.hash is not None and config.plan.hash != summary["hash"]:
        raise ConfigError(
            f"plan.hash={config.plan.hash}: the plan is now {summary['hash']}; the rows, their "
            "tokens or a setting have changed. Look at it with dry_run=true, then use the new hash"
        )


def workload_for(
    config: RecipeConfig,
    plan: Plan,
    *,
    train_data: RenderedRows,
    eval_data: RenderedRows | None,
    sample: Sequence[Datum],
) -> Workload:
    """What a run will ask of a backend; `sample` is the data of its first step."""
    saves_at = checkpoint_steps(plan.planned_steps, checkpoint_every=config.plan.checkpoint_every)
    return Workload(
        lengths=train_data.lengths.tolist(),
        eval_lengths=eval_data.lengths.tolist() if eval_data else [],
        supervised=train_data.supervised.tolist(),
        batch_size=plan.batch_size,
        planned_steps=plan.planned_steps,
        num_evaluations=len(saves_at) if eval_data else 0,
        lora=config.lora.to_lora() if config.lora else None,
        sample=sample,
    )


def _digest(data: RenderedRows | None) -> str:
    """32 hex digits over tokens and masks, in order."""
    digest = hashlib.sha256()
    for rendered in data or ():
        digest.update(rendered.tokens.tobytes())
        digest.update(rendered.mask.tobytes())
    return digest.hexdigest()[:32]


def _side(num_rows: int, data: RenderedRows | None) -> dict[str, Any]:
    if data is None:
        return {"rows": num_rows}
    report = data.report
    return {
        "rows": num_rows,
        "kept": len(report.kept_rows),
        "truncated": report.truncated,
        "dropped": report.dropped,
        "problems": [str(problem) for problem in report.problems],
        "tokens": int(np.asarray(data.lengths).sum()),
    }


def _histogram(lengths: np.ndarray) -> list[dict[str, int]]:
    """Rows by length: buckets from `low` to `high` tokens, both included."""
    longest = int(lengths.max(initial=1))
    width = max(-(-longest // HISTOGRAM_BUCKETS), 1)
    buckets = []
    for low in range(1, longest + 1, width):
        high = min(low + width - 1, longest)
        count = int(((lengths >= low) & (lengths <= high)).sum())
        buckets.append({"low": low, "high": high, "count": count})
    return buckets


def _hashed_config(config: RecipeConfig) -> dict[str, Any]:
    values = as_dict(config)
    for key in NOT_PART_OF_THE_PLAN:
        values.pop(key, None)
    for key in ("hash", "probe"):
        values["plan"].pop(key)
    for source in (values["data"], values["data"]["eval"], *values["data"]["sources"]):
        for key in NOT_PART_OF_THE_DATA:
            source.pop(key)
    return values
