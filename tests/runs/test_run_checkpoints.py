"""Newest by step, best by monitor, and what rotation keeps."""

import math
import shutil
from pathlib import Path

import pytest

from tunebook.runs import (
    Checkpoint,
    RunDir,
    best_checkpoint,
    checkpoints_to_discard,
    newest_checkpoint,
)
from tunebook.types import CheckpointRef


def at(step: int, monitor: float | None = None) -> Checkpoint:
    return Checkpoint(step, CheckpointRef(f"step_{step}", f"svc://{step}", True), monitor)


def saved(run: RunDir, step: int, monitor: float | None = None) -> Checkpoint:
    folder = run.checkpoints_dir / f"step_{step:06d}"
    folder.mkdir()
    checkpoint = Checkpoint(step, CheckpointRef(folder.name, str(folder), True), monitor)
    run.record_checkpoint(checkpoint)
    return checkpoint


def test_newest_goes_by_step_number() -> None:
    """Case 116: times, which a service writes in several precisions, are not read."""
    assert newest_checkpoint([at(100), at(1000), at(99)]) == at(1000)
    assert newest_checkpoint([]) is None


@pytest.mark.parametrize(
    ("monitors", "direction", "best"),
    [
        ([3.0, 1.0, 2.0], "down", 2),
        ([3.0, 1.0, 2.0], "up", 1),
        ([1.0, 1.0, 1.0], "down", 1),
        ([1.0, 1.0, 1.0], "up", 1),
        ([math.nan, 1.0, math.nan, 1.2], "down", 2),
        ([math.nan, 1.0, math.nan, 1.2], "up", 4),
        ([None, 5.0], "down", 2),
        ([math.nan, None], "down", None),
        ([0.0, -1.0], "down", 2),
        ([], "down", None),
    ],
)
def test_best_by_monitor(monitors: list[float | None], direction: str, best: int | None) -> None:
    checkpoints = [at(step, value) for step, value in enumerate(monitors, start=1)]
    found = best_checkpoint(checkpoints, direction)
    assert (found and found.step) == best


def test_an_unknown_direction_is_refused() -> None:
    with pytest.raises(ValueError, match="allowed: down, up"):
        best_checkpoint([at(1, 1.0)], "lower")


@pytest.mark.parametrize(
    ("steps", "keep", "best", "discarded"),
    [
        ([10, 20, 30, 40], 2, 20, [10, 30]),
        ([10, 20, 30, 40], 2, 40, [10, 20]),
        ([10, 20, 30, 40], 3, 10, [20]),
        ([10, 20, 30, 40], 1, 20, [10, 30]),
        ([10, 20, 30, 40], 1, 40, [10, 20, 30]),
        ([10, 20, 30, 40], 2, None, [10, 20]),
        ([10, 20, 30, 40], 9, 20, []),
        ([40, 10, 30, 20], 2, 20, [10, 30]),
        ([10, 20], 1, 99, [10]),
        ([], 2, None, []),
    ],
)
def test_rotation(steps: list[int], keep: int, best: int | None, discarded: list[int]) -> None:
    found = checkpoints_to_discard([at(step) for step in steps], keep, best)
    assert [one.step for one in found] == discarded


def test_rotation_over_a_whole_run_never_loses_best_or_newest() -> None:
    monitors = [5.0, 3.0, 4.0, 2.0, 6.0, math.nan, 2.0, 7.0]
    kept: list[Checkpoint] = []
    for step, value in enumerate(monitors, start=1):
        kept.append(at(step, value))
        best = best_checkpoint(kept, "down")
        gone = checkpoints_to_discard(kept, 3, best and best.step)
        kept = [one for one in kept if one not in gone]
        assert len(kept) <= 3
        assert kept[-1].step == step
    assert [one.step for one in kept] == [4, 7, 8]


def test_only_complete_and_existing_checkpoints_count(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "sft", None)
    first, second, third = (saved(run, step, 1.0 / step) for step in (2, 4, 6))
    run.record_discarded(second)
    shutil.rmtree(third.ref.location)
    with (run.path / "checkpoints.jsonl").open("ab") as file:
        file.write(b'{"step": 8, "ref":')
    assert run.checkpoints() == [first]


def test_a_moved_run_still_finds_its_checkpoints(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "a", "sft", "x")
    saved(run, 3, 0.5)
    moved = tmp_path / "elsewhere"
    run.path.rename(moved)
    (found,) = RunDir.open(moved).checkpoints()
    assert found.ref.location == str(moved / "checkpoints" / "step_000003")
    assert found.monitor == 0.5


def test_what_a_service_keeps_is_stored_as_it_is(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "sft", None)
    remote = Checkpoint(3, CheckpointRef("c", "tinker://abc/3", False), math.nan)
    run.record_checkpoint(remote)
    (found,) = RunDir.open(run.path).checkpoints()
    assert found.ref == remote.ref
    assert found.monitor is not None and math.isnan(found.monitor)


def test_a_checkpoint_outside_the_run_keeps_its_absolute_place(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "runs", "sft", None)
    outside = tmp_path / "other"
    outside.mkdir()
    run.record_checkpoint(Checkpoint(1, CheckpointRef("o", str(outside), True), None))
    assert run.checkpoints()[0].ref.location == str(outside)
    outside.rmdir()
    assert run.checkpoints() == []
