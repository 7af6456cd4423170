"""One writer, and a complete record on every way out."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tunebook.errors import NonFiniteError, RewardError, RunError
from tunebook.runs import (
    AttemptState,
    NoStepsError,
    RunDir,
    RunState,
    StopReason,
    cancellation,
    files,
    is_being_trained,
    only_writer,
    shown_state,
)
from tunebook.runs.attempts import failure_of, shielded, terminable


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, "sft", "x")


def on_disk(run: RunDir) -> dict:
    return json.loads((run.path / "run.json").read_text())


def test_a_normal_end(run: RunDir) -> None:
    with run.attempt(planned_steps=3, downgrades=["a:b:c"]) as attempt:
        assert attempt.number == 1
        assert (attempt.pid, attempt.state) == (os.getpid(), AttemptState.STARTED)
        assert on_disk(run)["state"] == "running"
        assert on_disk(run)["outcome"] is None
        assert is_being_trained(run.path)
        run.log_metrics(1, {"train/loss": 1.0})
        run.finish(StopReason.EARLY_STOPPING, steps=1)
    assert not is_being_trained(run.path)
    record = on_disk(run)
    assert record["state"] == "succeeded"
    assert record["outcome"] == {
        "stop_reason": "early_stopping",
        "planned_steps": 3,
        "steps": 1,
        "downgrades": ["a:b:c"],
        "rule": None,
    }
    assert record["failure"] is None
    assert record["attempts"][0]["state"] == "succeeded"
    assert record["attempts"][0]["ended_at"] is not None
    assert record["timing"]["training_s"] > 0


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (
            NonFiniteError("loss is NaN at step 2"),
            {"code": "non_finite", "category": "numeric", "message": "loss is NaN at step 2"},
        ),
        (
            ZeroDivisionError("division\nby zero"),
            {
                "code": "internal",
                "category": "system",
                "message": "ZeroDivisionError: division by zero",
            },
        ),
    ],
)
def test_an_exception_makes_it_failed_and_goes_on(
    run: RunDir, error: Exception, failure: dict
) -> None:
    with (
        pytest.raises(type(error)) as raised,
        run.attempt(planned_steps=3),
    ):
        run.log_metrics(1, {"train/loss": 1.0})
        run.log_metrics(2, {"train/loss": 1.0})
        raise error
    assert raised.value is error
    record = on_disk(run)
    assert (record["state"], record["attempts"][0]["state"]) == ("failed", "failed")
    assert record["failure"] == failure
    assert record["outcome"]["stop_reason"] == "failed"
    assert record["outcome"]["steps"] == 2
    assert "Traceback" not in (run.path / "run.json").read_text()
    assert "Traceback (most recent call last)" in (run.path / "log.txt").read_text()


class OutOfMemoryError(RuntimeError):
    """Called as torch's own."""


@pytest.mark.parametrize(
    ("error", "code", "category"),
    [
        (MemoryError(), "out_of_memory", "capacity"),
        (OutOfMemoryError("tried to allocate 2 GiB"), "out_of_memory", "capacity"),
        (OSError(errno.ENOSPC, "No space left on device"), "storage", "system"),
        (OSError(errno.ENOENT, "No such file"), "internal", "system"),
        (ConnectionRefusedError("refused"), "service_unreachable", "service"),
        (TimeoutError(), "service_unreachable", "service"),
        (KeyError("x"), "internal", "system"),
        (
            RewardError("reward 'a': raised\nTraceback (most recent call last):\n  File"),
            "reward",
            "system",
        ),
    ],
)
def test_foreign_errors_have_a_code(error: Exception, code: str, category: str) -> None:
    failure = failure_of(error)
    assert (failure.code, failure.category) == (code, category)
    assert "Traceback" not in failure.message and "\n" not in failure.message


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143), GeneratorExit()])
def test_an_interruption_makes_it_cancelled_and_goes_on(run: RunDir, error: BaseException) -> None:
    with (
        pytest.raises(type(error)),
        run.attempt(planned_steps=3),
    ):
        raise error
    record = on_disk(run)
    assert record["state"] == "cancelled"
    assert record["failure"] is None
    assert record["outcome"]["stop_reason"] == "cancelled"
    assert record["outcome"]["steps"] == 0


def test_closing_a_generator_in_the_middle_is_a_cancellation(run: RunDir) -> None:
    def steps() -> Iterator[int]:
        with run.attempt(planned_steps=9):
            for step in range(1, 10):
                run.log_metrics(step, {"train/loss": 1.0})
                yield step
            run.finish(StopReason.COMPLETED, steps=9)

    iterator = steps()
    assert [next(iterator), next(iterator)] == [1, 2]
    iterator.close()  # type: ignore[attr-defined]
    assert on_disk(run)["outcome"]["steps"] == 2
    assert run.record.state is RunState.CANCELLED


def test_an_end_that_was_recorded_stays_when_an_exception_follows(run: RunDir) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        run.attempt(planned_steps=1),
    ):
        run.finish(StopReason.COMPLETED, steps=1)
        raise KeyboardInterrupt
    assert on_disk(run)["state"] == "succeeded"


def test_ending_without_saying_how_is_our_mistake_and_a_failure(run: RunDir) -> None:
    with (
        pytest.raises(AssertionError, match="finish"),
        run.attempt(planned_steps=1),
    ):
        pass
    assert on_disk(run)["state"] == "failed"


def test_success_with_0_steps_is_impossible(run: RunDir) -> None:
    with (
        pytest.raises(NoStepsError, match="0 of 5 planned steps"),
        run.attempt(planned_steps=5),
    ):
        run.finish(StopReason.COMPLETED, steps=0)
    assert on_disk(run)["failure"]["code"] == "no_steps"
    assert on_disk(run)["state"] == "failed"


def test_a_full_disk_at_the_end_never_hides_the_cause(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise files.StorageError("disk full")

    with (
        pytest.raises(ZeroDivisionError) as raised,
        run.attempt(planned_steps=1),
    ):
        monkeypatch.setattr(files, "replace_json", full)
        raise ZeroDivisionError
    assert raised.value.__notes__ == ["The run directory could not record this end: disk full"]
    assert on_disk(run)["state"] == "running"
    assert shown_state(RunDir.open(run.path)) == "interrupted"


def test_finalizing_is_not_counted_as_training(run: RunDir) -> None:
    with run.attempt(planned_steps=1):
        with run.phase("finalizing_s"):
            time.sleep(0.3)
        run.finish(StopReason.COMPLETED, steps=1)
    timing = run.record.timing
    assert timing.finalizing_s is not None and timing.training_s is not None
    assert timing.finalizing_s >= 0.3
    assert timing.training_s < 0.25


def test_two_starters_in_one_process(run: RunDir) -> None:
    other = RunDir.open(run.path)
    with run.attempt(planned_steps=1):
        with (
            pytest.raises(RunError, match=f"process {os.getpid()} on .* is training this run"),
            other.attempt(planned_steps=1),
        ):
            pytest.fail("two writers")
        run.finish(StopReason.COMPLETED, steps=1)
    assert len(on_disk(run)["attempts"]) == 1


HOLDER = """
import sys, time
from tunebook.runs import RunDir, terminable
run = RunDir.open(sys.argv[1])
with terminable(), run.attempt(planned_steps=9):
    run.log_metrics(1, {"train/loss": 1.0})
    print("ready", flush=True)
    while True:  # a signal between two bytecodes must not wait for the end of a long sleep
        time.sleep(0.05)
"""


def hold(run: RunDir) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run.path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.stdout.close()
    return process


def test_a_killed_process_holds_nothing_and_its_attempt_is_expired(run: RunDir) -> None:
    process = hold(run)
    with (
        pytest.raises(RunError, match=f"process {process.pid} on"),
        RunDir.open(run.path).attempt(planned_steps=9),
    ):
        pytest.fail("two writers")
    assert shown_state(RunDir.open(run.path)) == "running"
    process.kill()
    process.wait()
    again = RunDir.open(run.path)
    assert shown_state(again) == "interrupted"
    with again.attempt(planned_steps=9, resumed_from_step=0) as attempt:
        assert attempt.number == 2
        again.finish(StopReason.CANCELLED, steps=1)
    first, second = on_disk(run)["attempts"]
    assert (first["state"], first["ended_at"]) == ("expired", None)
    assert (second["state"], second["resumed_from_step"]) == ("cancelled", 0)
    assert [event["seq"] for event in again.events()] == [1, 2, 3, 4]


@pytest.mark.parametrize("lost", ["the request and the event", "the event"])
def test_killed_behind_its_recorded_end_an_attempt_is_completed_by_the_next_writer(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    where = (cancellation, "forget") if lost != "the event" else (files, "append_line")
    with pytest.raises(KeyboardInterrupt), run.attempt(planned_steps=1):
        assert run.finalize(StopReason.COMPLETED) is StopReason.COMPLETED
        run.finish(StopReason.COMPLETED, steps=1)
        monkeypatch.setattr(*where, killed)
    monkeypatch.undo()
    assert on_disk(run)["state"] == "succeeded"
    said = (run.path / "events.jsonl").read_text()
    assert "attempt_ended" not in said
    told = RunDir.open(run.path).events()  # whoever only looks is told, and writes nothing
    end = {"attempt": 1, "type": "attempt_ended", "state": "succeeded", "stop_reason": "completed"}
    assert {**told[-1], **end, "time": on_disk(run)["attempts"][0]["ended_at"]} == told[-1]
    assert [one["seq"] for one in told] == list(range(1, len(told) + 1))
    assert RunDir.open(run.path).events(after=told[-1]["seq"]) == []
    assert (run.path / "events.jsonl").read_text() == said
    with only_writer(RunDir.open(run.path)):
        pass
    assert files.read_lines(run.path / "events.jsonl") == told
    assert not list(run.path.glob(".cancel*"))
    with only_writer(again := RunDir.open(run.path)):
        again.event("next")
    assert [one["type"] for one in again.events()[-2:]] == ["attempt_ended", "next"]
    assert again.events()[-1]["seq"] == len(told) + 1


def test_the_only_writer_may_change_a_run_that_nobody_trains(run: RunDir) -> None:
    other = RunDir.open(run.path)
    run.write_config({"epochs": 1})
    run.write_plan({"hash": "a"})
    with only_writer(other):
        assert other.record.plan_hash == "a"
        other.amend_plan({"epochs": 2}, {"hash": "b"})
        with pytest.raises(RunError, match="is training this run"), run.attempt(planned_steps=1):
            pytest.fail("two writers")
    with only_writer(run):
        assert run.record.plan_hash == "b"
        run.event("mine")
    assert [one["seq"] for one in run.events()] == [1, 2, 3]
    assert not is_being_trained(run.path)
    process = hold(run)
    try:
        with pytest.raises(RunError, match=f"process {process.pid} on"), only_writer(other):
            pytest.fail("two writers")
    finally:
        process.kill()
        process.wait()


def test_a_downgrade_found_while_running_stays_on_every_way_out(run: RunDir) -> None:
    with run.attempt(planned_steps=1, downgrades=["a:b:c"]):
        run.add_downgrade("d:e:f")
        run.add_downgrade("d:e:f")
        run.finish(StopReason.COMPLETED, steps=1)
    assert on_disk(run)["outcome"]["downgrades"] == ["a:b:c", "d:e:f"]
    with pytest.raises(ValueError), run.attempt(planned_steps=1):
        run.add_downgrade("g:h:i")
        raise ValueError
    assert on_disk(run)["outcome"]["downgrades"] == ["g:h:i"]
    assert [one["token"] for one in run.events() if one["type"] == "downgraded"] == [
        "d:e:f",
        "g:h:i",
    ]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -2)])
def test_a_signal_leaves_a_complete_record(run: RunDir, number: signal.Signals, code: int) -> None:
    process = hold(run)
    process.send_signal(number)
    assert process.wait(timeout=20) == code
    record = on_disk(run)
    assert (record["state"], record["attempts"][0]["state"]) == ("cancelled", "cancelled")
    assert record["outcome"]["steps"] == 1


def test_signals_wait_for_the_end_of_a_shield() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), shielded():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append("written")
    assert done == ["written"]
    with pytest.raises(SystemExit, match="143"), terminable(), shielded():
        signal.raise_signal(signal.SIGTERM)
        done.append("again")
    assert done == ["written", "again"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_attempts_add_up(run: RunDir) -> None:
    for number in (1, 2):
        with run.attempt(planned_steps=4, resumed_from_step=number - 1) as attempt:
            assert attempt.number == number
            time.sleep(0.05)
            run.finish(StopReason.COMPLETED, steps=number)
    assert run.record.timing.training_s is not None
    assert run.record.timing.training_s >= 0.1
    assert run.record.outcome is not None and run.record.outcome.steps == 2
