"""Creation, numbers, files written once, the record."""

import errno
import json
import math
import multiprocessing
import os
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tunebook.errors import RunError
from tunebook.runs import Evaluation, Preparation, RunDir, StorageError, numbering
from tunebook.runs.record import record_from_json, record_to_json

MOMENT = datetime(2026, 1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        (None, "2026-01-02_03-04-05"),
        ("", "2026-01-02_03-04-05"),
        ("first try", "2026-01-02_03-04-05_first-try"),
        ("a/../b", "2026-01-02_03-04-05_a-..-b"),
        ("../..", "2026-01-02_03-04-05"),
        ("lr=1e-4", "2026-01-02_03-04-05_lr-1e-4"),
        ("größe", "2026-01-02_03-04-05_gr-e"),
        ("x" * 300, "2026-01-02_03-04-05_" + "x" * 80),
    ],
)
def test_folder_names(name: str | None, folder: str) -> None:
    assert numbering.folder_name(MOMENT, name) == folder


def test_a_run_directory_has_the_files_of_the_design(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "sft", "try")
    assert run.path.parent == tmp_path / "sft"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_try", run.path.name)
    names = {one.name for one in run.path.iterdir()}
    assert names == {"run.json", "events.jsonl", "data", "checkpoints", "samples", "model"}
    record = json.loads((run.path / "run.json").read_text())
    assert record["number"] == 1
    assert re.fullmatch(r"[a-z][a-z2-9]{7}", record["id"])
    assert record["state"] == "pending"
    assert record["preparation"] == "queued"
    assert record["attempts"] == []
    assert set(record["timing"].values()) == {None}
    assert record["evaluation"] is None and record["outcome"] is None
    assert record["model_available"] is False


def _create(root: str, barrier: Any, queue: Any) -> None:
    barrier.wait()
    runs = [RunDir.create(Path(root), "sft", "same") for _ in range(4)]
    queue.put([(str(run.path), run.record.number, run.record.id) for run in runs])


def test_five_processes_that_start_at_once_get_different_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(numbering, "folder_name", lambda moment, name: "one-second")
    barrier, queue = context.Barrier(5), context.Queue()
    workers = [
        context.Process(target=_create, args=(str(tmp_path), barrier, queue)) for _ in range(5)
    ]
    for worker in workers:
        worker.start()
    made = [run for _ in workers for run in queue.get(timeout=30)]
    for worker in workers:
        worker.join()
    assert sorted(number for _, number, _ in made) == list(range(1, 21))
    assert len({path for path, _, _ in made}) == 20
    assert len({id for _, _, id in made}) == 20
    names = sorted(Path(path).name for path, _, _ in made)
    assert names == sorted(["one-second", *(f"one-second-{n}" for n in range(2, 21))])


def test_numbers_are_shared_by_recipes_and_never_given_twice(tmp_path: Path) -> None:
    first = RunDir.create(tmp_path, "sft", None)
    second = RunDir.create(tmp_path, "dpo", None)
    assert (first.record.number, second.record.number) == (1, 2)
    second.path.rename(tmp_path / "gone")
    assert RunDir.create(tmp_path, "dpo", None).record.number == 3
    (tmp_path / ".last_number").unlink()
    assert RunDir.create(tmp_path, "sft", None).record.number == 4


def test_a_damaged_counter_says_what_to_do(tmp_path: Path) -> None:
    RunDir.create(tmp_path, "sft", None)
    (tmp_path / ".last_number").write_text("many")
    with pytest.raises(RunError, match="Delete the file"):
        RunDir.create(tmp_path, "sft", None)


def test_a_read_only_root_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(StorageError, match=r"sft/\S+: cannot be written: Read-only file system"):
        RunDir.create(tmp_path, "sft", None)


def test_a_root_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(StorageError, match="runs/sft"):
        RunDir.create(tmp_path / "runs", "sft", None)


def test_opening_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no run directory"):
        RunDir.open(tmp_path)
    with pytest.raises(RunError, match="no run directory"):
        RunDir.open(tmp_path / "missing")
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(RunError, match="record is damaged"):
        RunDir.open(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RunError, match="cannot be read as JSON"):
        RunDir.open(tmp_path)


def test_the_record_survives_reopening(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "sft", "x")
    run.set_preparation(Preparation.VERIFIED)
    run.add_time("preparing_s", 1.5)
    run.add_time("preparing_s", 2.0)
    run.set_evaluation(Evaluation("eval/loss", "down", None, None, -math.inf, 3, 2, None, False))
    run.set_tracker({"id": "abc"})
    again = RunDir.open(run.path)
    assert again.record == run.record
    assert again.record.timing.preparing_s == 3.5
    assert again.record.timing.training_s is None


def test_a_record_of_a_later_version_is_readable(tmp_path: Path) -> None:
    value = record_to_json(RunDir.create(tmp_path, "sft", None).record)
    later = {**value, "new_key": 1, "timing": {**value["timing"], "other_s": 1.0}}
    assert record_from_json(later) == record_from_json(value)


def test_files_are_written_once(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "sft", None)
    run.write_plan({"hash": "abc", "planned_steps": 3})
    run.write_plan({"hash": "abc", "planned_steps": 3})
    run.write_split({"rule": "x"})
    assert run.read_plan() == {"hash": "abc", "planned_steps": 3}
    assert run.read_split() == {"rule": "x"}
    assert run.record.plan_hash == "abc"
    with pytest.raises(RunError, match=r"plan\.json: is written once"):
        run.write_plan({"hash": "def", "planned_steps": 4})
    with pytest.raises(RunError, match=r"config\.yaml: there is no such file"):
        run.read_config()


def test_the_config_keeps_values_and_types(tmp_path: Path) -> None:
    config = {
        "name": "1e5",
        "url": None,
        "tag": "a: b",
        "flag": "true",
        "xs": ["a", "b"],
        "lr": 1e-05,
        "n": 3,
        "on": True,
        "date": "2026-01-01",
        "path": "${hydra:runtime.cwd}/x",
        "text": "zwei\nZeilen ☃",
    }
    run = RunDir.create(tmp_path, "sft", None)
    run.write_config(OmegaConf.create(config))
    read = run.read_config()
    assert read == config
    assert {key: type(value) for key, value in read.items()} == {
        key: type(value) for key, value in config.items()
    }


def test_a_longer_plan_replaces_the_former_which_stays(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "sft", None)
    run.write_config({"epochs": 1})
    run.write_plan({"hash": "a"})
    run.amend_plan({"epochs": 2}, {"hash": "b"})
    assert (run.read_config(), run.read_plan()) == ({"epochs": 2}, {"hash": "b"})
    assert run.record.plan_hash == "b"
    assert json.loads((run.path / "plan.before_1.json").read_text()) == {"hash": "a"}
    assert (run.path / "config.before_1.yaml").read_text() == "epochs: 1\n"
    run.amend_plan({"epochs": 2}, {"hash": "b"})
    assert len(list(run.path.glob("*.before_*"))) == 2


SENTINELS = {
    "WANDB_API_KEY": "sentinel-one-0001",
    "HF_TOKEN": "hf_sentinelTwoSentinelTwo",
    "TOGETHER_API_KEY": "sentinel-three-0003",
    "MY_PASSWORD": "sentinel four 0004",
}


def test_no_sentinel_key_reaches_any_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SENTINELS.items():
        monkeypatch.setenv(name, value)
    everything = " ".join(SENTINELS.values())
    run = RunDir.create(tmp_path, "sft", f"x {everything}")
    assert run.record.name is not None
    for secret in SENTINELS.values():
        assert secret not in f"{run.path.name} {run.record.name}"
    run.write_config({"backend": {"api_key": "plain-0005", "note": everything}})
    run.write_plan({"hash": "h", "warnings": [everything]})
    run.write_split({"rule": everything})
    run.event("note", text=everything)
    run.log(everything)
    run.write_samples(1, [{"prompt": everything, "completion": everything}])
    run.log_metrics(1, {everything: 1.0})
    run.set_tracker({"id": everything})
    with (
        pytest.raises(ValueError),
        run.attempt(planned_steps=1, downgrades=[everything]),
    ):
        raise ValueError(everything)
    written = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    assert {"config.yaml", "plan.json", "split.json", "run.json", "log.txt"} <= {
        path.name for path in written
    }
    for path, content in written.items():
        for secret in (*SENTINELS.values(), "plain-0005"):
            assert secret.encode() not in content, path.name
    assert b"[redacted]" in (run.path / "log.txt").read_bytes()
