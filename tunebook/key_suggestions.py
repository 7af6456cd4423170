"""Finds the key that a misspelt or foreign one meant."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Sequence
from typing import Any

FOREIGN_NAMES = {
    "num_train_epochs": "plan.epochs",
    "num_epochs": "plan.epochs",
    "n_epochs": "plan.epochs",
    "per_device_train_batch_size": "plan.batch_size",
    "train_batch_size": "plan.batch_size",
    "bs": "plan.batch_size",
    "num_steps": "plan.max_steps",
    "save_steps": "plan.checkpoint_every",
    "save_every": "plan.checkpoint_every",
    "eval_steps": "plan.checkpoint_every",
    "eval_every": "plan.checkpoint_every",
    "gradient_accumulation_steps": "backend.micro_batch_tokens",
    "per_device_eval_batch_size": "backend.micro_batch_tokens",
    "warmup_ratio": "schedule.warmup",
    "warmup_steps": "schedule.warmup",
    "lr_schedule": "schedule.kind",
    "lr_scheduler_type": "schedule.kind",
    "grad_clip": "optimizer.max_grad_norm",
    "grad_clip_norm": "optimizer.max_grad_norm",
    "adam_epsilon": "optimizer.eps",
    "r": "lora.rank",
    "lora_r": "lora.rank",
    "lora_rank": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "targets": "lora.target_modules",
    "use_rslora": "lora.rslora",
    "max_length": "max_seq_len",
    "max_seq_length": "max_seq_len",
    "model_name": "model.name",
    "model_name_or_path": "model.name",
    "base_model": "model.name",
    "dataset": "data.path",
    "file_path": "data.path",
    "train_file": "data.path",
    "train_on_what": "data.mask",
    "loss_mask": "data.mask",
    "test_size": "eval.fraction",
    "val_size": "eval.fraction",
    "early_stopping_patience": "early_stopping.patience",
    "metric_for_best_model": "eval.monitor",
    "save_total_limit": "checkpoints.keep",
    "output_dir": "runs_dir",
    "log_path": "runs_dir",
    "run_name": "name",
    "load_checkpoint_path": "start_from",
    "resume_from_checkpoint": "resume",
}
"""Names of the same thing in TRL, transformers, tinker-cookbook and Together's cookbook."""


def explain_unknown_key(key: str, known: Sequence[str]) -> str:
    """One sentence that names the unknown key, its section, and the nearest valid key."""
    section, _, leaf = key.rpartition(".")
    where = f"there is no {leaf!r} in {section!r}" if section else "there is no such key"
    best = nearest_key(key, known)
    if best is not None:
        return f"{key}: {where}. Did you mean {best}?"
    siblings = [name for name in known if section and name.startswith(section + ".")]
    allowed = siblings or sorted({name.split(".")[0] for name in known})
    return f"{key}: {where}. Known: {', '.join(allowed)}"


def nearest_key(key: str, known: Sequence[str]) -> str | None:
    """The known key that `key` most likely means; None if nothing is near."""
    section, _, leaf = key.rpartition(".")
    if FOREIGN_NAMES.get(leaf) in known:
        return FOREIGN_NAMES[leaf]
    scored = max(((_likeness(section, leaf, name), name) for name in known), default=(0.0, ""))
    return scored[1] if scored[0] >= 0.6 else None


def schema_keys(schema: type) -> list[str]:
    """Every dotted key of a schema dataclass, sections before their fields."""
    return [key for key, _ in schema_fields(schema)]


def schema_fields(schema: type) -> list[tuple[str, type]]:
    """Every dotted key of a schema dataclass with the dataclass that declares it."""
    hints = typing.get_type_hints(schema)
    keys: list[tuple[str, type]] = []
    for field in dataclasses.fields(schema):
        keys.append((field.name, schema))
        nested = _dataclass_in(hints[field.name])
        if nested is not None:
            keys += [(f"{field.name}.{name}", owner) for name, owner in schema_fields(nested)]
    return keys


def _dataclass_in(annotation: Any) -> type | None:
    """The dataclass of `X` or `X | None`; lists of dataclasses have no dotted keys."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        for option in typing.get_args(annotation):
            found = _dataclass_in(option)
            if found is not None:
                return found
        return None
    return annotation if dataclasses.is_dataclass(annotation) else None  # type: ignore[return-value]


def _likeness(section: str, leaf: str, name: str) -> float:
    known_section, _, known_leaf = name.rpartition(".")
    likeness = difflib.SequenceMatcher(None, leaf, known_leaf).ratio()
    initials = "".join(word[:1] for word in known_leaf.split("_"))
    if leaf in (initials, known_leaf.replace("_", "")):
        likeness = 0.9
    elif len(leaf) >= 3 and known_leaf.startswith(leaf):
        likeness = max(likeness, 0.8)
    return likeness + (0.1 if section == known_section else 0.0)
