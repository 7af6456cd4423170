"""Whether a run may start: what it is projected to take, against its `limits` and the disk."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunebook.config import LimitsConfig, RecipeConfig
from tunebook.display import duration_text
from tunebook.errors import AdmissionError
from tunebook.runs import RunDir, newest_checkpoint

CHECKPOINT_BYTES = 12
"""Of each trained parameter in a checkpoint: itself and two moments, in float32."""
MODEL_BYTES = 4
"""Of each trained parameter in `model/`, in float32."""


def needs_estimate(config: RecipeConfig) -> bool:
    """Whether a limit, or a dry run, asks what the run will take."""
    return _is_limited(config.limits) or (config.dry_run and config.plan.probe)


def check_limits(config: RecipeConfig, summary: Mapping[str, Any]) -> None:
    """Returns if a run may start.

    Projected are the seconds and the price of the backend's estimate for the steps that are left,
    and the bytes of the checkpoints that are kept, of one being written, and of the model.

    Args:
        config: of the run.
        summary: its plan; with `estimate` where `needs_estimate`.

    Raises:
        AdmissionError: a limit would be exceeded, or the backend cannot know or was not asked;
            gives both numbers.
    """
    steps = summary["planned_steps"]
    left = max(steps - _steps_made(config), 0)
    if _is_limited(config.limits):
        if summary.get("estimate") is None:
            raise AdmissionError(
                "limits.max_seconds and limits.max_cost need to know what the run will take, which "
                "the backend has not been asked. Call tunebook.launch.admit(task, backend) before "
                "start_run"
            )
        _check_estimate(config.limits, summary["estimate"], left=left, steps=steps)
    check_disk(config, summary)


def check_sweep_cost(max_cost: float, estimates: Sequence[Mapping[str, Any]]) -> None:
    """Returns if the runs of a sweep may start together.

    Args:
        max_cost: US dollars, of `sweep.max_cost`.
        estimates: of each run that is left, by the backend, for its whole plan.

    Raises:
        AdmissionError: they are expected to cost more, or the backend cannot know.
    """
    prices = [each["price"] for each in estimates]
    if None in prices:
        raise AdmissionError(
            f"sweep.max_cost={max_cost:g}: this backend cannot say beforehand what a run will cost "
            f"({estimates[prices.index(None)]['basis']}). Leave the limit out: sweep.max_cost=null"
        )
    total = sum(prices)
    if total > max_cost:
        raise AdmissionError(
            f"sweep.max_cost={max_cost:g}: the {len(prices)} runs to train are expected to cost "
            f"{total:.2f} US dollars together ({estimates[0]['basis']}). Nothing was started. Plan "
            "fewer or shorter runs, or raise sweep.max_cost"
        )


def projected_bytes(trainable_parameters: int, *, keep: int) -> int:
    """Bytes that a run writes at most at one time.

    Args:
        trainable_parameters: of the run.
        keep: checkpoints that stay; the best and the newest always do, and one is being written.
    """
    checkpoints = max(keep, 2) + 1
    return trainable_parameters * (checkpoints * CHECKPOINT_BYTES + MODEL_BYTES)


def _is_limited(limits: LimitsConfig) -> bool:
    return limits.max_seconds is not None or limits.max_cost is not None


def _check_estimate(
    limits: LimitsConfig, estimate: Mapping[str, Any], *, left: int, steps: int
) -> None:
    checks = (
        ("max_seconds", limits.max_seconds, estimate["seconds"], duration_text),
        ("max_cost", limits.max_cost, estimate["price"], lambda price: f"{price:.2f} US dollars"),
    )
    for key, limit, whole, in_words in checks:
        if limit is None:
            continue
        if whole is None:
            raise AdmissionError(
                f"limits.{key}={limit:g}: this backend cannot say beforehand what the run will "
                f"take ({estimate['basis']}). Run it without this limit: limits.{key}=null"
            )
        projected = whole * left / steps
        if projected > limit:
            raise AdmissionError(
                f"limits.{key}={limit:g}: the {left} steps to make are projected to take "
                f"{projected:.6g} ({in_words(projected)}; {estimate['basis']}). Nothing was "
                f"started. Make the plan smaller, or raise limits.{key}"
            )


def check_disk(config: RecipeConfig, summary: Mapping[str, Any]) -> None:
    """Returns if the disk holds what a run is projected to write, as far as that is known.

    Raises:
        AdmissionError: it does not.
    """
    trainable_parameters: int | None = summary["trainable_parameters"]
    if trainable_parameters is None:
        return
    folder = Path(config.runs_dir)
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    needed = projected_bytes(trainable_parameters, keep=config.checkpoints.keep)
    if free - needed < config.limits.min_free_bytes:
        raise AdmissionError(
            f"{config.runs_dir}: {free:,} bytes are free there. The run is projected to write "
            f"{needed:,} ({trainable_parameters:,} trained parameters, checkpoints.keep="
            f"{config.checkpoints.keep}), and limits.min_free_bytes="
            f"{config.limits.min_free_bytes:,} are to stay free. Nothing was started. Free some "
            "space, keep fewer checkpoints, or use another runs_dir"
        )


def _steps_made(config: RecipeConfig) -> int:
    if config.resume is None:
        return 0
    newest = newest_checkpoint(RunDir.open(config.resume).checkpoints())
    return newest.step if newest else 0
