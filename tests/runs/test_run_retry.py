"""Trying a run again: the same run, another attempt, once per key."""

from pathlib import Path

import pytest

from tunebook.errors import AdmissionError, RunError
from tunebook.runs import (
    AttemptState,
    Checkpoint,
    NoCheckpointError,
    RunDir,
    RunState,
    StopReason,
    events,
    samples,
    starting,
)
from tunebook.runs.starting import ending_lease, lease_retry, override_line, retry
from tunebook.types import CheckpointRef


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path, "sft", "x")
    with run.preparing():
        run.write_plan({"planned_steps": 4, "hash": "a"})
    return run


def fail(run: RunDir, *, steps: int, save: bool = True) -> None:
    with pytest.raises(ZeroDivisionError), run.attempt(planned_steps=4):
        for step in range(1, steps + 1):
            run.log_metrics(step, {"train/loss": 1.0})
            if save:
                folder = run.checkpoints_dir / f"step_{step:06d}"
                folder.mkdir()
                ref = CheckpointRef(folder.name, str(folder), True)
                run.record_checkpoint(Checkpoint(step, ref, None))
            run.write_samples(step, [{"prompt": "p", "completion": "c"}])
        raise ZeroDivisionError


def finish(run: RunDir) -> None:
    run = RunDir.open(run.path)
    with run.attempt(planned_steps=4) as attempt:
        assert attempt.state is AttemptState.STARTED
        run.finish(StopReason.CANCELLED, steps=0)


def test_from_the_beginning_sets_aside_what_was_trained(run: RunDir) -> None:
    fail(run, steps=2)
    started = lease_retry(run.path)
    assert (started.attempt.number, started.attempt.state) == (2, AttemptState.ACCEPTED)
    assert (started.is_new, started.attempt.resumed_from_step) == (True, 0)
    again = RunDir.open(run.path)
    assert again.record.state is RunState.PENDING and again.record.failure is None
    assert again.checkpoints() == []  # for this process, which begins the attempt
    assert len(again.metrics()) == len(list(run.checkpoints_dir.iterdir())) == 2
    finish(run)
    assert again.metrics() == RunDir.open(run.path).checkpoints() == []
    assert list(run.checkpoints_dir.iterdir()) == [] and again.samples() == {}
    assert again.superseded_step() == 2
    assert [one.state for one in RunDir.open(run.path).record.attempts] == [
        AttemptState.FAILED,
        AttemptState.CANCELLED,
    ]


def test_what_was_trained_stays_if_the_new_attempt_never_begins(run: RunDir) -> None:
    fail(run, steps=2)
    with pytest.raises(AdmissionError), ending_lease(run.path):
        lease_retry(run.path)
        raise AdmissionError("it would take too long")
    again = RunDir.open(run.path)
    assert [one.step for one in again.checkpoints()] == [row["step"] for row in again.metrics()]
    assert len(again.checkpoints()) == len(again.samples()) == 2
    assert again.record.state is RunState.FAILED and again.record.failure is not None
    assert again.record.failure.code == "over_limit"
    assert again.record.attempts[-1].state is AttemptState.FAILED
    assert again.record.outcome is not None and again.record.outcome.steps == 2
    assert events(run.path)[-1].type == "attempt_ended"
    assert "it would take too long" in (run.path / "log.txt").read_text()
    assert lease_retry(run.path, resume=True).attempt.resumed_from_step == 2


def test_an_interrupted_preparation_is_a_cancelled_attempt(run: RunDir) -> None:
    fail(run, steps=1)
    with pytest.raises(SystemExit), ending_lease(run.path):
        lease_retry(run.path)
        raise SystemExit(143)
    record = RunDir.open(run.path).record
    assert (record.state, record.failure) == (RunState.CANCELLED, None)
    assert record.attempts[-1].state is AttemptState.CANCELLED


def test_an_attempt_that_began_is_not_ended_as_one_that_waits(run: RunDir) -> None:
    fail(run, steps=1)
    with pytest.raises(ZeroDivisionError), ending_lease(run.path):
        lease_retry(run.path)
        fail(RunDir.open(run.path), steps=1)
        raise ZeroDivisionError
    told = [event.type for event in events(run.path) if event.attempt == 2]
    assert told.count("attempt_ended") == 1


def test_killed_while_it_sets_aside_the_next_attempt_does_the_rest(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    fail(run, steps=2)
    lease_retry(run.path)
    monkeypatch.setattr(samples, "move_superseded", killed)
    with pytest.raises(KeyboardInterrupt):
        finish(run)
    again = RunDir.open(run.path)
    assert again.checkpoints() == [] and again.metrics() != []  # by which it is rewound once more


def test_from_a_checkpoint(run: RunDir) -> None:
    fail(run, steps=2)
    assert lease_retry(run.path, resume=True).attempt.resumed_from_step == 2
    assert [one.step for one in RunDir.open(run.path).checkpoints()] == [1, 2]
    assert len(RunDir.open(run.path).metrics()) == 2
    finish(run)


def test_without_a_checkpoint_it_cannot_resume(run: RunDir) -> None:
    fail(run, steps=2, save=False)
    with pytest.raises(NoCheckpointError, match="without --resume") as raised:
        lease_retry(run.path, resume=True)
    assert raised.value.code == "no_checkpoint"
    assert len(RunDir.open(run.path).record.attempts) == 1


def test_a_repeated_key_is_the_same_attempt_whatever_became_of_it(run: RunDir) -> None:
    fail(run, steps=1)
    first = lease_retry(run.path, idempotency_key="k")
    before = (run.path / "run.json").read_bytes()
    assert lease_retry(run.path, idempotency_key="k") == starting.Started(
        run.path, first.attempt, is_new=False
    )
    assert (run.path / "run.json").read_bytes() == before
    finish(run)
    again = retry(run.path, idempotency_key="k")  # starts no process
    assert (again.attempt.number, again.is_new) == (2, False)
    assert again.attempt.state is AttemptState.CANCELLED
    assert again.attempt.idempotency_key == "k"
    assert lease_retry(run.path, idempotency_key="other").attempt.number == 3
    finish(run)


def test_a_repeated_key_is_answered_while_the_attempt_trains(run: RunDir) -> None:
    fail(run, steps=1)
    lease_retry(run.path, idempotency_key="k")
    training = RunDir.open(run.path)
    with training.attempt(planned_steps=4):
        again = retry(run.path, idempotency_key="k")
        assert (again.is_new, again.attempt.state) == (False, AttemptState.STARTED)
        with pytest.raises(RunError, match="is training this run"):
            retry(run.path, idempotency_key="other")
        training.finish(StopReason.CANCELLED, steps=0)


@pytest.mark.parametrize("how", ["new", "succeeded", "unprepared"])
def test_what_cannot_be_retried(run: RunDir, how: str) -> None:
    words = "never tried"
    if how == "succeeded":
        with run.attempt(planned_steps=1):
            run.finish(StopReason.COMPLETED, steps=1)
        words = "has succeeded"
    if how == "unprepared":
        run = RunDir.create(run.path.parents[1], "sft", "y")
        words = "preparation is queued"
    with pytest.raises(RunError, match=words):
        lease_retry(run.path)


def test_a_process_that_cannot_be_started_fails_its_attempt(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(run, steps=1)
    monkeypatch.setattr(starting.sys, "executable", str(run.path / "no_python"))
    with pytest.raises(RunError, match="no process can be started"):
        retry(run.path, idempotency_key="k")
    record = RunDir.open(run.path).record
    assert record.state is RunState.FAILED and record.failure is not None
    assert record.attempts[-1].state is AttemptState.FAILED


def test_events_tell_attempts_apart(run: RunDir) -> None:
    fail(run, steps=1)
    lease_retry(run.path)
    finish(run)
    told = [(event.attempt, event.type) for event in events(run.path)]
    assert (2, "attempt_leased") in told and (2, "rewound") in told
    assert told.count((2, "attempt_started")) == 1


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("runs/sft/2026_x", "resume=runs/sft/2026_x"),
        ("a b", 'resume="a b"'),
        ("it's, (x)", 'resume="it\'s, (x)"'),
        ('a"b\\c', 'resume="a\\"b\\c"'),
        ('a\\"b\\', 'resume="a\\\\\\"b\\\\"'),
    ],
)
def test_overrides_are_quoted_for_hydra(value: str, line: str) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    assert override_line("resume", value) == line
    [parsed] = OverridesParser.create().parse_overrides([line])
    assert parsed.value() == value
