"""The plan of a run as a person reads it and as `plan.json` keeps it, and its hash."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tunebook.compose import as_dict
from tunebook.config import DPOConfig, GRPOConfig, RecipeConfig, SFTConfig
from tunebook.errors import ConfigError
from tunebook.evaluate import Monitor
from tunebook.models import model_fingerprint
from tunebook.opening import weights_digest
from tunebook.plan import MixedRows, Plan, checkpoint_steps, make_plan
from tunebook.preparation import PreparedRows
from tunebook.runs import RunDir, newest_checkpoint
from tunebook.schedule import Schedule, learning_rate_at, warmup_steps
from tunebook.settings import make_schedule
from tunebook.types import Datum, Workload

if TYPE_CHECKING:
    from tunebook.data.rows import Row
    from tunebook.render import RenderedRows

HISTOGRAM_BUCKETS = 10
SHOWN_ROWS = 10
CUT_AWAY = {
    "no_target_after_truncation": "max_seq_len ends before an answer begins",
    "identical_after_truncation": "max_seq_len ends before the answers differ",
}
"""Reason why a row was dropped -> in words."""
CURVE_POINTS = 500
"""Steps of which the plan names the learning rate, evenly spread; peak and last among them."""
NOT_PART_OF_THE_PLAN = (
    "name", "runs_dir", "tracker", "dry_run", "resume", "strict", "sweep", "samples",
    "checkpoints", "limits",
    "plan.hash", "plan.probe", "backend.device", "backend.micro_batch_tokens", "backend.recompute",
    "backend.generator_memory", "health", "reward.timeout_s", "reward.max_concurrency",
    "backend.model_resources_id", "backend.base_url", "backend.gpu_type",
    "backend.generator_replicas", "backend.inactive_timeout", "backend.ready_timeout",
    "backend.keep_alive", "backend.stall_timeout", "backend.retry_budget", "backend.recover",
    "backend.max_cost", "backend.tokens_per_second", "backend.price_per_million_tokens",
    "backend.checkpoint_ttl", "backend.sampler", "backend.scope", "backend.max_runs",
    "backend.submit_timeout",
)  # fmt: skip
"""Keys that change nothing about what is trained on what."""
MAY_CHANGE_ON_RESUME = ("plan.epochs", "plan.max_steps", "plan.checkpoint_every", "early_stopping")
"""Keys of the plan that do not touch the steps already made."""
UNITS = {"dpo": "pairs", "grpo": "prompts"}
"""What `plan.batch_size` counts in a recipe; rows in any other."""
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


def downgrades_for(
    config: RecipeConfig,
    plan: Plan,
    *,
    monitor: Monitor | None,
    of_backend: Sequence[str],
    no_samples: str | None = None,
) -> tuple[str, ...]:
    """Settings that this run cannot honour, as `setting:action:cause`.

    Args:
        config: of the run.
        plan: its steps.
        monitor: what it evaluates; None = there are no rows to evaluate.
        of_backend: those that the backend brings.
        no_samples: why no answers are sampled though some are asked for; None = they are.

    Raises:
        ConfigError: there are some and `strict` is set.
    """
    found = list(of_backend)
    patience = config.early_stopping.patience
    if monitor is None:
        if patience is not None:
            found.append("early_stopping:disabled:no_eval_set")
        if config.eval.monitor is not None:
            found.append("eval.monitor:ignored:no_eval_set")
    # One evaluation sets the mark, `patience` more stop the run, and the last comes at its end.
    elif patience is not None and len(_evaluated_steps(config, plan, monitor)) < patience + 2:
        found.append("early_stopping:ineffective:too_few_evaluations")
    if no_samples is not None:
        found.append(f"samples:disabled:{no_samples}")
    if found and config.strict:
        raise ConfigError(
            f"strict=true and the run would be downgraded: {', '.join(found)}. Change these "
            "settings, or the eval split, or accept the downgrade with strict=false"
        )
    return tuple(found)


def _evaluated_steps(config: RecipeConfig, plan: Plan, monitor: Monitor) -> set[int]:
    """The steps after which a run has evaluated or will, those before a resume included."""
    planned = checkpoint_steps(plan.planned_steps, checkpoint_every=config.plan.checkpoint_every)
    if config.resume is None:
        return set(planned)
    run = RunDir.open(config.resume)
    newest = newest_checkpoint(run.checkpoints())
    done = newest.step if newest else 0
    made = {step for step, _ in run.history(monitor.metric) if step <= done}
    return made | {step for step in planned if step > done}


def summarize(
    recipe: str,
    config: RecipeConfig,
    rows: PreparedRows,
    plan: Plan,
    *,
    train_data: RenderedRows,
    eval_data: RenderedRows | None,
    monitor: Monitor | None,
    downgrades: Sequence[str],
) -> dict[str, Any]:
    """What `plan.json` holds; `hash` covers everything that decides what is trained on what."""
    schedule = make_schedule(config)
    stride = -(-plan.planned_steps // CURVE_POINTS)
    num_warmup = warmup_steps(plan.planned_steps, warmup=schedule.warmup)
    peak_at = min(max(num_warmup, 1), plan.planned_steps)
    steps = sorted({*range(1, plan.planned_steps, stride), peak_at, plan.planned_steps})
    settings = _without(as_dict(config), NOT_PART_OF_THE_PLAN)
    fingerprints = {
        "settings": _hash(_without(settings, MAY_CHANGE_ON_RESUME)),
        "rows": _hash([[row.content_hash for row in side] for side in (rows.train, rows.eval)]),
        "tokens": _hash([_digest(train_data), _digest(eval_data)]),
        "start": weights_digest(config.start_from),
    }
    content = {
        "settings": settings,
        "fingerprints": fingerprints,
        "model": model_fingerprint(config.model.name, revision=config.model.revision),
        "planned_steps": plan.planned_steps,
    }
    supervised = np.asarray(train_data.supervised)
    saves_at = checkpoint_steps(plan.planned_steps, checkpoint_every=config.plan.checkpoint_every)
    return {
        "recipe": recipe,
        "name": config.name,
        "model": config.model.name,
        "backend": str(config.backend.get("_target_", "")).rpartition(".")[2],
        "loss": str(config.loss.get("_target_", "")),
        "data": [source["name"] for source in rows.manifest["sources"]],
        "start_from": config.start_from,
        "unit": UNITS.get(recipe, "rows"),
        "rows_read": rows.manifest["rows_read"],
        "rows_skipped": rows.manifest["rows_skipped"],
        "train": _side(len(rows.train), train_data),
        "eval": _side(len(rows.eval), eval_data),
        "split": rows.split,
        "sources": rows.manifest["sources"],
        "supervised_tokens": int(supervised.sum()) or None,
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
        "warmup_steps": num_warmup,
        "lora": as_dict(config)["lora"],
        "normalization": _normalization(config),
        "rollout": _rollout(config),
        "reward": _reward(config),
        "environment": _environment(config),
        "monitor": None if monitor is None else _monitor_text(monitor),
        "downgrades": list(downgrades),
        "notes": train_data.report.notes,
        "warnings": [
            *rows.warnings,
            *train_data.report.warnings,
            *(f"eval: {each}" for each in (eval_data.report.warnings if eval_data else [])),
            *_warmup_doubts(schedule, plan),
        ],
        "fingerprints": fingerprints,
        "hash": _hash(content),
    }


def _warmup_doubts(schedule: Schedule, plan: Plan) -> list[str]:
    num_steps = plan.planned_steps
    if warmup_steps(num_steps, warmup=schedule.warmup) <= num_steps:
        return []
    highest = learning_rate_at(num_steps, num_steps, schedule)
    return [
        f"schedule.warmup={schedule.warmup:g} is longer than the plan of {num_steps} steps: the "
        f"learning rate gets to {highest:.3g} and never to "
        f"optimizer.learning_rate={schedule.peak:g}"
    ]


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


def check_resumed(
    config: RecipeConfig, summary: dict[str, Any], *, needs_start: bool = False
) -> list[str]:
    """What a person should know before a run goes on; empty for a new run.

    Args:
        config: of the run, resumed or new.
        summary: its plan as it is now.
        needs_start: the weights that it began from are read again, whatever it has saved since.

    Raises:
        ConfigError: what the run was trained with so far is no longer what it would go on with.
    """
    if config.resume is None:
        return []
    run = RunDir.open(config.resume)
    before = run.read_plan()
    causes = {
        "settings": "config.yaml in it was edited",
        "rows": "the rows in data/ were changed",
        "tokens": "the rows render to other tokens than before, because the chat template, the "
        "tokenizer or a package has changed and the tokens in data/ are gone",
    }
    if needs_start or newest_checkpoint(run.checkpoints()) is None:
        causes["start"] = (
            f"the weights that it began from were changed or are gone: {config.start_from}"
        )
    for part, cause in causes.items():
        if before["fingerprints"].get(part) != summary["fingerprints"][part]:
            raise ConfigError(
                f"resume={config.resume}: the run cannot go on exactly: {cause}. Put it back as it "
                f"was, or begin a new run from its weights with start_from={config.resume}"
            )
    if before["planned_steps"] == summary["planned_steps"]:
        return []
    return [
        f"the plan now has {summary['planned_steps']} steps instead of {before['planned_steps']}: "
        "the learning rate of the steps to come is that of the new plan, so it may jump where the "
        "run goes on"
    ]


def cut_rows(rows: Sequence[Row], data: RenderedRows) -> list[str]:
    """Where the rows are of which `max_seq_len` left nothing to train, a sentence a reason."""
    sentences: list[str] = []
    for reason, words in CUT_AWAY.items():
        lost = data.report.dropped_rows.get(reason, [])
        if lost:
            places = ", ".join(f"{rows[row].file}:{rows[row].line}" for row in lost[:SHOWN_ROWS])
            more = f" and {len(lost) - SHOWN_ROWS} more" if len(lost) > SHOWN_ROWS else ""
            sentences.append(f"{len(lost)} left out, {words}: {places}{more}")
    return sentences


def workload_for(
    config: RecipeConfig,
    plan: Plan,
    *,
    train_data: RenderedRows,
    eval_data: RenderedRows | None,
    sample: Sequence[Datum],
    completions: int = 1,
    completion_tokens: int = 0,
) -> Workload:
    """What a run will ask of a backend.

    Args:
        config: of the run.
        plan: its steps.
        train_data: the rows.
        eval_data: the rows that are evaluated by `forward`; None = none are.
        sample: the data of its first step.
        completions: that are sampled and trained for each row; their sampling is not counted.
        completion_tokens: of each, at most.
    """
    saves_at = checkpoint_steps(plan.planned_steps, checkpoint_every=config.plan.checkpoint_every)
    return Workload(
        lengths=np.repeat(train_data.lengths + completion_tokens, completions).tolist(),
        eval_lengths=eval_data.lengths.tolist() if eval_data else [],
        supervised=np.repeat(train_data.supervised + completion_tokens, completions).tolist(),
        batch_size=plan.batch_size * completions,
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
    shortest, longest = int(lengths.min(initial=1 << 30)), int(lengths.max(initial=1))
    width = max(-(-(longest - shortest + 1) // HISTOGRAM_BUCKETS), 1)
    buckets = []
    for low in range(shortest, longest + 1, width):
        high = min(low + width - 1, longest)
        count = int(((lengths >= low) & (lengths <= high)).sum())
        buckets.append({"low": low, "high": high, "count": count})
    return buckets


def _monitor_text(monitor: Monitor) -> str:
    return f"{monitor.metric}, the {'lowest' if monitor.lower_is_better else 'highest'} is the best"


def _normalization(config: RecipeConfig) -> str | None:
    if isinstance(config, DPOConfig):
        return "none: log-probs of an answer are not divided, the loss is a mean over pairs"
    if not isinstance(config, SFTConfig | GRPOConfig):
        return None
    horizon = config.normalization.horizon
    return config.normalization.kind.value + (f" over {horizon} tokens" if horizon else "")


def _rollout(config: RecipeConfig) -> str | None:
    if not isinstance(config, GRPOConfig):
        return None
    rollout = config.rollout
    parts = [
        f"{rollout.group_size} completions a prompt of at most {rollout.max_new_tokens} tokens, "
        f"temperature {rollout.temperature:g}",
        f"truncated: {rollout.truncated.value}",
    ]
    updates = rollout.num_substeps * rollout.num_iterations
    if updates > 1:
        parts.append(f"{updates} updates a step")
    if rollout.policy_lag:
        parts.append("sampled one step behind")
    if rollout.dynamic_sampling:
        parts.append(f"up to {rollout.dynamic_sampling} further prompts a step")
    if config.kl.beta:
        kl = config.kl
        parts.append(f"KL {kl.estimator.value} x {kl.beta:g} in the {kl.placement.value}")
    return ", ".join(parts)


def _environment(config: RecipeConfig) -> str | None:
    if not isinstance(config, GRPOConfig) or config.environment is None:
        return None
    node = config.environment
    name = str(node["_target_"]).rpartition(".")[2]
    return f"{name}, at most {node['max_turns']} turns of the model"


def _reward(config: RecipeConfig) -> str | None:
    if not isinstance(config, GRPOConfig):
        return None
    weights = {
        name: (node or {}).get("weight", 1) for name, node in config.reward.functions.items()
    }
    return ", ".join(f"{name} x {weight:g}" for name, weight in weights.items())


def _without(settings: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """A copy of nested settings that lacks some dotted keys, and where the rows are."""
    found = copy.deepcopy(settings)
    for key in keys:
        *sections, leaf = key.split(".")
        section = found
        for name in sections:
            section = section.get(name) or {}
        section.pop(leaf, None)
    for source in (found["data"], found["data"]["eval"], *found["data"]["sources"]):
        for name in NOT_PART_OF_THE_DATA:
            source.pop(name, None)
    return found


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
