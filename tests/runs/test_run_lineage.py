"""Metrics, events and samples: one lineage, whatever was killed and resumed."""

import gc
import json
import math
import weakref
from pathlib import Path

import pytest
import torch

from tunebook.runs import Checkpoint, RunDir, StopReason
from tunebook.stopping import Evaluation, best_evaluation
from tunebook.types import CheckpointRef


def train(run: RunDir, first: int, last: int, *, save_every: int, shift: float = 0.0) -> None:
    for step in range(first, last + 1):
        run.log_metrics(step, {"train/loss": 1.0 / step + shift, "time/step_s": 0.5 + shift})
        if step % save_every == 0:
            run.log_metrics(step, {"eval/loss": 2.0 / step})
            folder = run.checkpoints_dir / f"step_{step:06d}"
            folder.mkdir(exist_ok=True)
            ref = CheckpointRef(folder.name, str(folder), True)
            run.record_checkpoint(Checkpoint(step, ref, 2.0 / step))
            run.write_samples(step, [{"prompt": "p", "completion": str(step)}])


def test_a_crash_at_57_resumed_from_50_leaves_one_value_per_step_and_key(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "sft", None)
    with (
        pytest.raises(RuntimeError),
        run.attempt(planned_steps=60, resumed_from_step=0),
    ):
        train(run, 1, 57, save_every=10)
        raise RuntimeError("crash")
    run = RunDir.open(run.path)
    assert run.checkpoints()[-1].step == 50
    with run.attempt(planned_steps=60, resumed_from_step=50):
        assert run.rewind(50) == []
        train(run, 51, 60, save_every=10, shift=0.25)
        run.finish(StopReason.COMPLETED, steps=60)
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    pairs = [(line["step"], key) for line in lines for key in line if key != "step"]
    assert len(pairs) == len(set(pairs))
    assert [row["step"] for row in run.metrics()] == list(range(1, 61))
    assert run.metrics()[52]["train/loss"] == 1.0 / 53 + 0.25
    old = [
        json.loads(line)
        for line in (run.path / "metrics.superseded.jsonl").read_text().splitlines()
    ]
    assert [(line["step"], line["superseded_by_attempt"]) for line in old] == [
        (step, 2) for step in range(51, 58)
    ]
    assert run.superseded_step() == 57
    events = run.events()
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert {event["attempt"] for event in events} == {0, 1, 2}
    assert run.events(after=2)[0]["seq"] == 3


def test_rewinding_below_saved_checkpoints_returns_them(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "sft", None)
    train(run, 1, 9, save_every=3)
    gone = run.rewind(3)
    assert [one.step for one in gone] == [6, 9]
    assert [one.step for one in run.checkpoints()] == [3]
    assert list(run.samples()) == [3]
    assert run.history("eval/loss") == [(3, 2.0 / 3)]
    train(run, 4, 6, save_every=3)
    assert [one.step for one in run.checkpoints()] == [3, 6]
    assert list(run.samples()) == [3, 6]


def test_a_rewind_that_was_killed_half_way_is_repeated_without_duplicates(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "sft", None)
    train(run, 1, 5, save_every=2)
    before = (run.path / "metrics.jsonl").read_text()
    run.rewind(2)
    moved = (run.path / "metrics.superseded.jsonl").read_text()
    (run.path / "metrics.jsonl").write_text(before)
    run.rewind(2)
    assert (run.path / "metrics.superseded.jsonl").read_text() == moved
    assert [row["step"] for row in run.metrics()] == [1, 2]


def test_rewinding_to_the_last_step_changes_nothing(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "sft", None)
    train(run, 1, 4, save_every=2)
    before = (run.path / "metrics.jsonl").read_bytes()
    assert run.rewind(4) == []
    assert (run.path / "metrics.jsonl").read_bytes() == before
    assert not (run.path / "metrics.superseded.jsonl").exists()


def test_steps_never_go_back_and_no_value_is_logged_twice(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "sft", None)
    run.log_metrics(3, {"a": 1})
    run.log_metrics(3, {"b": 1})
    with pytest.raises(AssertionError, match="step 2 after 3"):
        run.log_metrics(2, {"a": 1})
    with pytest.raises(AssertionError, match=r"twice: \['a'\]"):
        run.log_metrics(3, {"a": 2})
    with pytest.raises(AssertionError, match="twice"):
        RunDir.open(run.path).log_metrics(3, {"b": 2})
    assert run.metrics() == [{"step": 3, "a": 1, "b": 1}]


def test_metrics_are_python_numbers_and_hold_no_graph(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "sft", None)
    weight = torch.ones((), requires_grad=True)
    loss = weight * 0.5
    alive = weakref.ref(loss)
    run.log_metrics(1, {"loss": loss.detach(), "num": torch.tensor(3), "none": None})
    run.log_metrics(2, {"loss": float("nan")})
    del loss
    gc.collect()
    assert alive() is None
    first, second = run.metrics()
    assert first == {"step": 1, "loss": 0.5, "num": 3.0, "none": None}
    assert type(first["loss"]) is float
    assert math.isnan(second["loss"])


def test_early_stopping_goes_on_from_the_recorded_history(tmp_path: Path) -> None:
    """Patience 3 over 1.0, 1.1, 1.2, [resume], 1.3: the history after the resume is whole."""
    run = RunDir.create(tmp_path, "sft", None)
    for step, value in enumerate([1.0, 1.1, 1.2], start=1):
        run.log_metrics(step, {"eval/loss": value})
    run = RunDir.open(run.path)
    run.log_metrics(4, {"eval/loss": 1.3})
    history = [Evaluation(step, value) for step, value in run.history("eval/loss")]
    assert [one.value for one in history] == [1.0, 1.1, 1.2, 1.3]
    assert best_evaluation(history, lower_is_better=True) == Evaluation(1, 1.0)


def test_samples_with_lone_surrogates_are_written(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "sft", None)
    run.write_samples(0, [{"prompt": "\ud83d", "completion": "ok\n"}])
    run.write_samples(10, [])
    assert run.samples() == {0: [{"prompt": "\ufffd", "completion": "ok\n"}], 10: []}
