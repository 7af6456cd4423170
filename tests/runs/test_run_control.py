"""Waiting for, following and cancelling a run from another process, and how a run stands."""

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tunebook.errors import (
    RunCancelled,
    RunEndedError,
    RunError,
    RunFinalizingError,
    WaitTimeout,
)
from tunebook.runs import (
    AttemptState,
    Preparation,
    RunDir,
    RunState,
    StopReason,
    cancel,
    cancellation,
    control,
    events,
    follow,
    run_status,
    wait,
)
from tunebook.runs.attempts import locked
from tunebook.runs.status import shown
from tunebook.runs_commands import exit_code_of

TRAINER = """
import sys, time
from tunebook.runs import RunDir, StopReason, terminable
run = RunDir.open(sys.argv[1])
last = int(sys.argv[2])
with terminable(), run.attempt(planned_steps=last):
    step, reason = 0, StopReason.COMPLETED
    for step in range(1, last + 1):
        run.log_metrics(step, {"train/loss": 1.0})
        if step == 1:
            print("ready", flush=True)
        time.sleep(0.01)
        if run.cancel_requested():
            break
    reason = run.finalize(reason)
    run.finish(reason, steps=step)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path, "sft", "x")
    with run.preparing():
        run.write_plan({"planned_steps": 9, "hash": "a"})
    return run


@contextmanager
def trainer(run: RunDir, *, steps: int = 100_000) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(run.path), str(steps)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def on_disk(run: RunDir) -> RunState:
    return RunDir.open(run.path).record.state


def test_how_a_run_stands(run: RunDir) -> None:
    before = run_status(run.path)
    assert (before.record.state, before.done, before.steps) == (RunState.PENDING, False, 0)
    assert before.planned_steps == 9 and before.total_s is None
    with run.attempt(planned_steps=3):
        run.log_metrics(1, {"train/loss": 1.0})
        during = run_status(run.path)
        assert (during.record.state, during.done, during.steps) == (RunState.RUNNING, False, 1)
        run.finish(StopReason.MAX_STEPS, steps=1)
    after = run_status(run.path)
    assert after.done and after.succeeded and not after.record.model_available
    assert after.planned_steps == 3
    assert after.total_s is not None and after.total_s >= after.record.timing.training_s > 0


def test_a_killed_process_is_expired_for_every_reader_and_nothing_is_written(run: RunDir) -> None:
    with trainer(run) as process:
        assert run_status(run.path).record.state is RunState.RUNNING
        process.kill()
        process.wait()
        before = (run.path / "run.json").read_bytes()
        status = wait(run.path)
    assert status.done and not status.succeeded
    assert status.record.state is RunState.FAILED
    assert status.record.attempts[-1].state is AttemptState.EXPIRED
    assert status.record.failure is not None
    assert (status.record.failure.code, status.record.failure.category) == (
        "process_lost",
        "system",
    )
    assert (run.path / "run.json").read_bytes() == before


def test_a_time_out_cancels_nothing(run: RunDir) -> None:
    with trainer(run):
        with pytest.raises(WaitTimeout, match=r"is running after 0.05 s .*step \d+ of 9"):
            wait(run.path, poll_s=0.01, timeout_s=0.05)
        with pytest.raises(WaitTimeout):
            wait(run.path, timeout_s=0)
        assert not cancellation.is_requested(run.path, 1)
        assert run_status(run.path).record.state is RunState.RUNNING


def test_cancelling_is_cooperative_and_confirmed(run: RunDir) -> None:
    with trainer(run) as process:
        outcome = cancel(run.path, wait_s=20)
        assert process.wait(timeout=20) == 0
    assert outcome.confirmed
    record = outcome.status.record
    assert record.state is RunState.CANCELLED
    assert record.attempts[-1].state is AttemptState.CANCELLED
    assert record.outcome is not None
    assert record.outcome.stop_reason is StopReason.CANCELLED
    assert record.outcome.steps == outcome.status.steps > 0
    assert [event.type for event in events(run.path)][-3:] == [
        "cancel_requested",
        "finalizing",
        "attempt_ended",
    ]
    assert cancel(run.path).confirmed  # asking again changes nothing
    assert len(RunDir.open(run.path).record.attempts) == 1
    assert list(run.path.glob(".cancel*")) == []


def test_a_request_is_seen_before_the_trainer_reads_it(run: RunDir) -> None:
    with run.attempt(planned_steps=3):
        outcome = cancel(run.path)
        assert not outcome.confirmed
        assert outcome.status.record.state is RunState.CANCEL_REQUESTED
        assert on_disk(run) is RunState.RUNNING
        assert run.cancel_requested()
        assert on_disk(run) is RunState.CANCEL_REQUESTED
        assert not cancel(run.path).confirmed
        assert run.finalize(StopReason.COMPLETED) is StopReason.CANCELLED
        assert not cancel(run.path).confirmed  # it is cancelled already, only not yet written
        run.finish(StopReason.CANCELLED, steps=1)


def test_a_run_that_finalizes_refuses_with_its_own_code(run: RunDir) -> None:
    with run.attempt(planned_steps=3):
        assert run.finalize(StopReason.COMPLETED) is StopReason.COMPLETED
        assert run_status(run.path).record.attempts[-1].state is AttemptState.FINALIZING
        with pytest.raises(RunFinalizingError, match="not interrupted") as raised:
            cancel(run.path)
        assert (raised.value.code, raised.value.exit_code) == ("run_finalizing", 5)
        run.finish(StopReason.COMPLETED, steps=3)
    assert on_disk(run) is RunState.SUCCEEDED
    with pytest.raises(RunEndedError, match="has succeeded already"):
        cancel(run.path)


def test_either_the_request_or_the_end_comes_first(run: RunDir) -> None:
    """Whatever the two do at the same time, a request that was taken makes the run cancelled."""
    for number in range(1, 41):
        with run.attempt(planned_steps=1):
            barrier = threading.Barrier(2)
            taken: list[bool] = []

            def ask(
                number: int = number, barrier: threading.Barrier = barrier, taken: list = taken
            ):
                barrier.wait()
                taken.append(cancellation.request(run.path, number))

            thread = threading.Thread(target=ask)
            thread.start()
            barrier.wait()
            reason = run.finalize(StopReason.COMPLETED)
            thread.join()
            assert taken == [reason is StopReason.CANCELLED]
            run.finish(reason, steps=1)


def test_a_run_that_nobody_trains_is_cancelled_at_once_and_repeatably(run: RunDir) -> None:
    for _ in range(2):
        outcome = cancel(run.path)
        assert outcome.confirmed
    record = RunDir.open(run.path).record
    assert (record.state, record.attempts, record.model_available) == (
        RunState.CANCELLED,
        [],
        False,
    )
    assert record.outcome is not None
    assert (record.outcome.planned_steps, record.outcome.steps) == (9, 0)
    assert [event.type for event in events(run.path)].count("cancelled") == 1


def test_an_interrupted_run_is_cancelled_and_its_attempt_expired(run: RunDir) -> None:
    with trainer(run) as process:
        process.kill()
        process.wait()
    assert cancel(run.path).confirmed
    record = RunDir.open(run.path).record
    assert record.attempts[-1].state is AttemptState.EXPIRED
    assert record.outcome is not None and record.outcome.steps > 0


def test_cancelled_before_the_first_step_there_is_no_artefact(run: RunDir) -> None:
    with run_lease(run):
        assert not cancel(run.path).confirmed
    with pytest.raises(RunCancelled, match="before its first step"), run.attempt(planned_steps=9):
        pytest.fail("it was opened")
    record = RunDir.open(run.path).record
    assert record.state is RunState.CANCELLED
    assert record.attempts[-1].state is AttemptState.CANCELLED
    assert record.failure is None and not record.model_available
    assert list(run.model_dir.iterdir()) == list(run.checkpoints_dir.iterdir()) == []


@contextmanager
def run_lease(run: RunDir) -> Iterator[RunDir]:
    from tunebook.runs import only_writer

    with only_writer(run):
        run.lease(resumed_from_step=0, idempotency_key=None)
    yield run


def test_an_interrupted_wait_asks_to_cancel_and_says_whether_it_was_confirmed(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ctrl_c(seconds: float) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with trainer(run):
        monkeypatch.setattr(control.time, "sleep", ctrl_c)
        with pytest.raises(KeyboardInterrupt) as raised:
            wait(run.path)
    assert raised.value.__notes__ == ["The run is cancelled: confirmed."]
    assert on_disk(run) is RunState.CANCELLED


def test_an_interrupted_wait_says_when_it_is_not_confirmed(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "CONFIRM_S", 0.0)
    with run.attempt(planned_steps=1):
        assert "not confirmed yet" in control.cancellation_text(run.path)
        run.finish(StopReason.COMPLETED, steps=1)
    assert "was not cancelled" in control.cancellation_text(run.path)


def test_events_are_followed_from_any_seq_to_the_end(run: RunDir) -> None:
    with trainer(run, steps=20):
        seen = list(follow(run.path, after=2, poll_s=0.01))
    assert [event.seq for event in seen] == list(range(3, 3 + len(seen)))
    assert seen[-1].type == "attempt_ended"
    assert seen[-1].fields == {"state": "succeeded", "stop_reason": "completed"}
    assert {event.attempt for event in seen} <= {0, 1}
    assert list(follow(run.path, after=seen[-1].seq)) == []
    assert events(run.path, after=seen[-2].seq) == seen[-1:]


def test_stopping_to_follow_cancels_nothing(run: RunDir) -> None:
    with trainer(run):
        assert next(follow(run.path)).type == "created"
        assert not cancellation.is_requested(run.path, 1)


# Attempts that wait for their process.


def test_a_leased_attempt_belongs_to_one_process(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tunebook.runs import attempts, only_writer

    with run_lease(run):
        run.accept(os.getppid())  # some process that is alive and not this one
    assert run_status(run.path).record.attempts[-1].state is AttemptState.ACCEPTED
    other = RunDir.open(run.path)
    for writer in (only_writer(other), other.attempt(planned_steps=1)):
        with pytest.raises(RunError, match=f"process {os.getppid()} on"), writer:
            pytest.fail("two writers")
    monkeypatch.setenv(attempts.LEASE_VARIABLE, attempts.lease_text(run.record))
    with other.attempt(planned_steps=1) as attempt:
        assert (attempt.number, attempt.state, attempt.pid) == (
            1,
            AttemptState.STARTED,
            os.getpid(),
        )
        other.finish(StopReason.COMPLETED, steps=1)
    assert attempts.LEASE_VARIABLE not in os.environ
    assert len(other.record.attempts) == 1


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_process_that_died_before_it_began_is_expired(run: RunDir) -> None:
    with run_lease(run):
        run.accept(dead_pid())
    status = run_status(run.path)
    assert status.done and status.record.attempts[-1].state is AttemptState.EXPIRED
    with run.attempt(planned_steps=1) as attempt:
        assert attempt.number == 2
        run.finish(StopReason.COMPLETED, steps=1)


def test_a_child_that_died_is_no_live_process(run: RunDir) -> None:
    """Nobody waits for a process in the background, so it stays a zombie of whoever started it."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    with run_lease(run):
        run.accept(process.pid)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert run_status(run.path).record.attempts[-1].state is AttemptState.EXPIRED
    process.returncode = 0


def test_an_uncertain_submission_is_never_made_twice(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever was starting the process died: it may come or not, and it comes too late."""
    from tunebook.runs import attempts

    with run_lease(run):
        attempt = replace(run.record.attempts[-1], pid=dead_pid())
        run.save(run.record.with_attempt(attempt))
    lease = attempts.lease_text(run.record)
    assert run_status(run.path).record.attempts[-1].state is AttemptState.SUBMISSION_UNCERTAIN
    with run.attempt(planned_steps=1):
        run.finish(StopReason.CANCELLED, steps=0)
    states = [one.state for one in RunDir.open(run.path).record.attempts]
    assert states == [AttemptState.SUBMISSION_UNCERTAIN, AttemptState.CANCELLED]
    monkeypatch.setenv(attempts.LEASE_VARIABLE, lease)
    with pytest.raises(RunError, match="given up meanwhile"), run.attempt(planned_steps=1):
        pytest.fail("the late process trains")
    assert len(RunDir.open(run.path).record.attempts) == 2


def test_a_process_of_another_machine_is_taken_to_be_alive(run: RunDir) -> None:
    with run_lease(run):
        attempt = replace(run.record.attempts[-1], pid=dead_pid(), host="elsewhere")
        run.save(run.record.with_attempt(attempt))
    assert run_status(run.path).record.state is RunState.PENDING
    with pytest.raises(RunError, match="on elsewhere"), run.attempt(planned_steps=1):
        pytest.fail("two writers")
    assert socket.gethostname() != "elsewhere"
    attempt = replace(attempt, started_at="2020-01-01T00:00:00.000+00:00")
    run.save(run.record.with_attempt(attempt))
    assert run_status(run.path).done
    with run.attempt(planned_steps=1):
        run.finish(StopReason.CANCELLED, steps=0)


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


@needs_proc
def test_a_dead_process_of_any_parent_is_no_live_process(run: RunDir) -> None:
    parent = subprocess.Popen(
        ["sh", "-c", "sleep 0.1 & echo $!; exec sleep 60"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None
        with run_lease(run):
            run.accept(int(parent.stdout.readline()))
        status = wait(run.path, poll_s=0.02, timeout_s=20)
        assert status.record.attempts[-1].state is AttemptState.EXPIRED
    finally:
        parent.kill()
        parent.communicate()


@needs_proc
def test_a_later_process_with_the_same_pid_is_another(run: RunDir) -> None:
    with run_lease(run):
        run.accept(os.getppid())
    assert not run_status(run.path).done
    attempt = run.record.attempts[-1]
    assert attempt.process_started is not None
    boot, ticks = attempt.process_started.split()
    earlier = replace(attempt, process_started=f"{boot} {int(ticks) - 1}")
    run.save(run.record.with_attempt(earlier))
    assert run_status(run.path).record.attempts[-1].state is AttemptState.EXPIRED
    assert cancel(run.path).confirmed


# Preparation.


@pytest.mark.parametrize(
    ("error", "preparation", "state", "code"),
    [
        (ValueError("bad"), Preparation.FAILED, RunState.FAILED, "internal"),
        (KeyboardInterrupt(), Preparation.CANCELLED, RunState.CANCELLED, None),
        (OSError(28, "No space left on device"), Preparation.FAILED, RunState.FAILED, "storage"),
    ],
)
def test_a_preparation_that_ends_badly_is_recorded(
    tmp_path: Path,
    error: BaseException,
    preparation: Preparation,
    state: RunState,
    code: str | None,
) -> None:
    run = RunDir.create(tmp_path, "sft", None)
    with pytest.raises(type(error)), run.preparing():
        assert on_disk(run) is RunState.PENDING
        assert RunDir.open(run.path).record.preparation is Preparation.SNAPSHOTTING
        raise error
    record = RunDir.open(run.path).record
    assert (record.preparation, record.state, record.attempts) == (preparation, state, [])
    assert (record.failure and record.failure.code) == code


def test_cancelled_while_it_is_prepared_it_is_never_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tunebook.runs.attempts.LOCK_WAIT_S", 0.05)
    run = RunDir.create(tmp_path, "sft", None)
    with pytest.raises(RunCancelled), run.preparing():
        for _ in range(2):
            assert not cancel(run.path).confirmed
        assert on_disk(run) is RunState.PENDING
    status = run_status(run.path)
    assert (status.done, status.record.state) == (True, RunState.CANCELLED)
    assert status.record.preparation is Preparation.CANCELLED
    assert cancel(run.path).confirmed
    seqs = [event.seq for event in events(run.path)]
    assert seqs == list(range(1, len(seqs) + 1))
    assert list(run.path.glob(".cancel*")) == []


def test_cancelled_before_it_is_prepared_it_is_not(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "sft", None)
    assert cancel(run.path).confirmed
    with pytest.raises(RunCancelled), run.preparing():
        pytest.fail("it is prepared")
    assert on_disk(run) is RunState.CANCELLED


def test_cancelled_between_preparation_and_attempt_it_is_not_trained(run: RunDir) -> None:
    assert cancel(run.path).confirmed
    with pytest.raises(RunCancelled), run.attempt(planned_steps=1):
        pytest.fail("it trains")
    assert on_disk(run) is RunState.CANCELLED
    again = RunDir.open(run.path)  # who knows that it is cancelled may go on with it
    with again.attempt(planned_steps=1):
        again.finish(StopReason.COMPLETED, steps=1)


@pytest.mark.parametrize("preparation", [Preparation.QUEUED, Preparation.SNAPSHOTTING])
def test_a_preparation_whose_process_is_gone_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preparation: Preparation
) -> None:
    run = RunDir.create(tmp_path, "sft", None)
    if preparation is Preparation.QUEUED:
        assert not run_status(run.path).done  # it may begin yet
        monkeypatch.setattr("tunebook.runs.status.QUEUED_S", 0.0)
        time.sleep(0.002)
    run.set_preparation(preparation)
    with locked(run.path):
        assert not run_status(run.path).done
    status = wait(run.path, timeout_s=0)
    assert (shown(status.record), exit_code_of(status)) == ("interrupted", 4)
    assert on_disk(run) is RunState.PENDING
    assert cancel(run.path).confirmed


# A clock that is set back.


def test_a_clock_that_steps_back_changes_no_order_and_no_duration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours = itertools.count(23, -1)

    def back() -> str:
        return f"2026-03-01T{next(hours):02d}:00:00.000+00:00"

    monkeypatch.setattr("tunebook.runs.directory.utc_now", back)
    monkeypatch.setattr("tunebook.runs.attempts.utc_now", back)
    run = RunDir.create(tmp_path, "sft", "first")
    with run.attempt(planned_steps=2):
        for step in (1, 2):
            run.log_metrics(step, {"train/loss": 1.0})
        run.finish(StopReason.COMPLETED, steps=2)
    times = [event.time for event in events(run.path)]
    assert times == sorted(times, reverse=True)
    assert [event.seq for event in events(run.path)] == list(range(1, len(times) + 1))
    status = run_status(run.path)
    assert status.record.timing.training_s is not None and status.record.timing.training_s >= 0
    assert status.total_s is not None and status.total_s >= status.record.timing.training_s
    assert RunDir.create(tmp_path, "sft", "second").record.number == 2


def test_a_signal_to_the_trainer_is_a_cancellation_for_whoever_waits(run: RunDir) -> None:
    with trainer(run) as process:
        process.send_signal(signal.SIGTERM)
        status = wait(run.path, poll_s=0.01, timeout_s=20)
    assert status.record.state is RunState.CANCELLED
