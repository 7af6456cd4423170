"""The run directory: everything a run records, readable while it runs and after it was killed."""

from __future__ import annotations

import os
import shutil
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from tunebook.display import tunebook_command
from tunebook.errors import RunCancelled, RunError
from tunebook.runs import attempts, cancellation, files, metrics, numbering, samples
from tunebook.runs.attempts import utc_now
from tunebook.runs.checkpoints import (
    Checkpoint,
    checkpoint_from_json,
    checkpoint_to_json,
    usable_checkpoints,
)
from tunebook.runs.record import (
    STATE_OF_STOP_REASON,
    Attempt,
    AttemptState,
    Evaluation,
    Outcome,
    Preparation,
    RunRecord,
    RunState,
    StopReason,
    record_from_json,
    record_to_json,
)
from tunebook.runs.redaction import redact, redact_config

EVENTS_FILE = "events.jsonl"
ENDED_EVENT = "attempt_ended"
FOLDERS = ("data", "checkpoints", "samples", "model")


class NoStepsError(RunError):
    """A run that made no optimizer step cannot end well."""

    code = "no_steps"
    exit_code = 1


class RunDir:
    """One run directory. Every change is on disk when the method returns.

    One process writes (see `attempt`); any number read.
    """

    def __init__(self, path: Path, record: RunRecord) -> None:
        self.path = path
        """Absolute folder of the run."""
        self.record = record
        """What `run.json` holds; replaced, never changed in place."""
        self._next_seq = 0
        self._one_event = threading.RLock()
        self._logged_step = -1
        self._logged_keys: set[str] = set()
        self._ending: Outcome | None = None
        self._training_since: float | None = None

    @classmethod
    def create(cls, root: Path, recipe: str, name: str | None) -> RunDir:
        """A new run directory `root/<recipe>/<date_time>_<name>/`, numbered and with empty folders.

        Raises:
            StorageError: the folder cannot be made.
        """
        from tunebook import __version__

        root = Path(root).absolute()
        moment = datetime.now().astimezone()
        path = numbering.claim_folder(root / recipe, numbering.folder_name(moment, name))
        record = RunRecord(
            number=numbering.next_number(root),
            id=numbering.new_id(),
            recipe=recipe,
            name=None if name is None else redact(name, os.environ),
            created_at=utc_now(),
            tunebook_version=__version__,
        )
        run = cls(path, record)
        with files.writing(path):
            for folder in FOLDERS:
                (path / folder).mkdir()
        run.save(record)
        run.event("created", recipe=recipe, name=record.name, number=record.number, id=record.id)
        return run

    @classmethod
    def open(cls, path: Path | str) -> RunDir:
        """The run in a directory, as it was last written.

        Raises:
            RunError: the directory holds no run, or its record is damaged.
        """
        path = Path(path).absolute()
        file = path / numbering.RECORD_FILE
        if not file.is_file():
            raise RunError(
                f"{path}: no run directory (there is no {numbering.RECORD_FILE} in it). "
                f"`{tunebook_command()} runs list` shows the runs there are."
            )
        try:
            record = record_from_json(files.read_json(file))
        except ValueError as error:
            raise RunError(f"{file}: the record is damaged: {error}") from error
        return cls(path, record)

    @property
    def data_dir(self) -> Path:
        """The frozen snapshot of the rows."""
        return self.path / "data"

    @property
    def checkpoints_dir(self) -> Path:
        """Training states, for backends that keep them as files."""
        return self.path / "checkpoints"

    @property
    def samples_dir(self) -> Path:
        """Sampled answers, one file a step."""
        return self.path / "samples"

    @property
    def model_dir(self) -> Path:
        """The promoted model."""
        return self.path / "model"

    def reload(self) -> None:
        """Takes over what other processes have written since; call it when the lock is held."""
        self.record = RunDir.open(self.path).record
        self._next_seq = 0
        self._logged_step = -1

    def save(self, record: RunRecord) -> None:
        """Makes `record` the run's record, on disk and here."""
        files.replace_json(self.path / numbering.RECORD_FILE, record_to_json(record))
        self.record = record

    # Written once, before anything is opened.

    def write_config(self, config: Any) -> None:
        """Writes `config.yaml`, redacted; see `write_once`.

        Args:
            config: a schema dataclass, an OmegaConf config or a dict.
        """
        self.write_once("config.yaml", _yaml(config))

    def write_plan(self, plan: Mapping[str, Any]) -> None:
        """Writes `plan.json`; see `write_once`. Its `hash` becomes `plan_hash` of the record."""
        self.write_once("plan.json", files.to_json(plan, indent=2) + "\n")
        self.save(replace(self.record, plan_hash=plan.get("hash")))

    def write_split(self, split: Mapping[str, Any]) -> None:
        """Writes `split.json`; see `write_once`."""
        self.write_once("split.json", files.to_json(split, indent=2) + "\n")

    def write_once(self, name: str, text: str) -> None:
        """Writes a file that never changes again; the same text a second time is accepted.

        Raises:
            RunError: the file is there with another text.
        """
        path = self.path / name
        if path.exists():
            if path.read_text(encoding="utf-8") != text:
                raise RunError(
                    f"{path}: is written once and holds something else. A different setting needs "
                    "a new run, or a resume that changes only the length of the plan."
                )
            return
        files.replace_text(path, text)

    def amend_plan(self, config: Any, plan: Mapping[str, Any]) -> None:
        """Replaces config and plan for a resume that goes further; the former ones are kept.

        They stay as `config.before_<n>.yaml` and `plan.before_<n>.json`, n the attempt to come.
        Call it inside `only_writer(run)`, unless nobody else can know of the run.
        """
        number = len(self.record.attempts) + 1
        for name, text in (
            ("config.yaml", _yaml(config)),
            ("plan.json", files.to_json(plan, indent=2) + "\n"),
        ):
            path = self.path / name
            former = path.read_text(encoding="utf-8")
            if former != text:
                self.write_once(f"{path.stem}.before_{number}{path.suffix}", former)
                files.replace_text(path, text)
        self.save(replace(self.record, plan_hash=plan.get("hash")))
        self.event("plan_amended", hash=plan.get("hash"))

    def read_config(self) -> dict[str, Any]:
        """`config.yaml` as a dict, interpolations as they were written."""
        from omegaconf import OmegaConf

        loaded = OmegaConf.to_container(OmegaConf.load(self._existing("config.yaml")))
        assert isinstance(loaded, dict)
        return {str(key): value for key, value in loaded.items()}

    def read_plan(self) -> dict[str, Any]:
        """`plan.json`."""
        return files.read_json(self._existing("plan.json"))

    def read_split(self) -> dict[str, Any]:
        """`split.json`."""
        return files.read_json(self._existing("split.json"))

    # Grows while the run goes on.

    def event(self, type: str, **fields: Any) -> None:
        """Appends an event to `events.jsonl`, its `seq` one above the last of any attempt."""
        path = self.path / EVENTS_FILE
        with self._one_event:  # what is noticed in another thread becomes an event, too
            if not self._next_seq:
                lines = files.read_lines(path)
                self._next_seq = lines[-1]["seq"] + 1 if lines else 1
            head = {"seq": self._next_seq, "attempt": len(self.record.attempts), "time": utc_now()}
            files.append_line(path, {**head, "type": type, **fields}, sync=True)
            self._next_seq += 1

    def events(self, *, after: int = 0) -> list[dict[str, Any]]:
        """The events with a `seq` above `after`.

        The end of the last attempt is among them also where a kill came between the record of that
        end and its event; the next writer adds it to the file.
        """
        lines = files.read_lines(self.path / EVENTS_FILE)
        return [one for one in [*lines, *self._unsaid_end(lines)] if one["seq"] > after]

    def log(self, text: str) -> None:
        """Appends redacted text, for people, to `log.txt`."""
        files.append_text(self.path / "log.txt", text if text.endswith("\n") else text + "\n")

    def log_metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends metrics of a step to `metrics.jsonl` as Python numbers.

        Several calls may share a step (an evaluation of step k carries step k), each with other
        keys; a step never goes back.

        Args:
            step: optimizer steps made, from 0 (before training).
            values: numbers, or None for unknown.
        """
        if self._logged_step < 0:
            last = metrics.read_metrics(self.path)[-1:]
            self._logged_step = last[0]["step"] if last else 0
            self._logged_keys = set(last[0]) if last else set()
        assert step >= self._logged_step, f"metrics of step {step} after {self._logged_step}"
        if step > self._logged_step:
            self._logged_keys = set()
        again = self._logged_keys & set(values)
        assert not again, f"metrics of step {step} logged twice: {sorted(again)}"
        line = {"step": step, **{key: metrics.as_number(value) for key, value in values.items()}}
        files.append_line(self.path / metrics.METRICS_FILE, line, sync=False)
        self._logged_step = step
        self._logged_keys |= set(values)

    def metrics(self) -> list[dict[str, Any]]:
        """Metrics of the one lineage: a dict a step, in order, `step` and numbers or None."""
        return metrics.read_metrics(self.path)

    def history(self, metric: str) -> list[tuple[int, float]]:
        """`(step, value)` of every step that has the metric, for early stopping and curves."""
        return metrics.history(self.metrics(), metric)

    def write_samples(self, step: int, values: Sequence[Mapping[str, Any]]) -> None:
        """Writes sampled answers of a step to `samples/step_<step>.jsonl`, whole."""
        samples.write_samples(self.samples_dir, step, values)

    def write_rollouts(self, step: int, values: Sequence[Mapping[str, Any]]) -> None:
        """Writes completions that a step trained on to `samples/rollouts_<step>.jsonl`, whole."""
        samples.write_rollouts(self.samples_dir, step, values)

    def last_rollouts(self) -> list[dict[str, Any]]:
        """Completions that the last step trained on; empty where the recipe samples none."""
        return samples.read_last_rollouts(self.samples_dir)

    def samples(self) -> dict[int, list[dict[str, Any]]]:
        """Step -> sampled answers, in order of steps."""
        return samples.read_samples(self.samples_dir)

    def record_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Appends a saved checkpoint; from then on a resume may start from it.

        Call it after the metrics of its step: they are on disk before the checkpoint counts.
        """
        files.sync_file(self.path / metrics.METRICS_FILE)
        line = checkpoint_to_json(checkpoint, self.path)
        files.append_line(self.path / metrics.CHECKPOINTS_FILE, line, sync=True)
        self._bank_training_time()

    def record_discarded(self, checkpoint: Checkpoint) -> None:
        """Says that a checkpoint is no longer there; call it before it is deleted."""
        self.record_checkpoint(replace(checkpoint, complete=False))

    def checkpoints(self) -> list[Checkpoint]:
        """The complete checkpoints that still exist, by step number.

        A process that was started to begin the run anew sees none: they are set aside when its
        attempt begins, and stay if it never does.
        """
        if attempts.begins_anew(self.record):
            return []
        lines = files.read_lines(self.path / metrics.CHECKPOINTS_FILE)
        return usable_checkpoints(lines, self.path)

    def rewind(self, step: int) -> list[Checkpoint]:
        """Makes `step` the last step of the lineage; returns the checkpoints that left it.

        Metrics and checkpoints of later steps move to `*.superseded.jsonl`, samples to
        `samples/superseded/`. Delete the returned checkpoints before saving new ones: the new take
        their names.
        """
        number = len(self.record.attempts)
        # Checkpoints go first and metrics last: whoever is killed in between leaves a run that goes
        # on from `step` and has metrics beyond it, by which the next attempt rewinds once more.
        moved = metrics.move_superseded(self.path / metrics.CHECKPOINTS_FILE, step, number)
        samples.move_superseded(self.samples_dir, step, number)
        metrics.move_superseded(self.path / metrics.METRICS_FILE, step, number)
        self._logged_step = -1
        self.event("rewound", step=step)
        return [checkpoint_from_json(line, self.path) for line in moved if line["complete"]]

    def superseded_step(self) -> int:
        """The highest step that an earlier attempt recorded and a resume redoes; else 0."""
        return metrics.superseded_step(self.path)

    # The record.

    def set_preparation(self, preparation: Preparation) -> None:
        """Records how far the preparation has come."""
        self.save(replace(self.record, preparation=preparation))
        self.event("preparation", state=preparation)

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Makes the run `verified` at the end of the block; an exception, failed or cancelled.

        What fails here has cost nothing, and the run cannot be trained. The lock of the run is held
        meanwhile, by which others tell that its process is there.

        Raises:
            RunCancelled: somebody asked for that.
        """
        with attempts.locked(self.path):
            self.reload()
            if self.record.state is RunState.CANCELLED:
                raise RunCancelled(f"{self.path}: cancelled before its preparation")
            self.set_preparation(Preparation.SNAPSHOTTING)
            try:
                yield
                if cancellation.is_requested(self.path, 1):
                    raise RunCancelled(f"{self.path}: cancelled before its first step")
            except BaseException as error:
                with attempts.shielded():
                    self._end_preparation(error)
                raise
            self.set_preparation(Preparation.VERIFIED)

    def add_time(self, phase: str, seconds: float) -> None:
        """Adds seconds to a phase of `Timing`, for example `preparing_s`."""
        self.save(replace(self.record, timing=self.record.timing.plus(phase, seconds)))

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """Adds the time spent inside to a phase of `Timing`, on every way out.

        Inside an attempt it is taken out of the time spent training.
        """
        training = self._training_since is not None
        self._bank_training_time()
        self._training_since = None
        start = time.monotonic()
        try:
            yield
        finally:
            self.add_time(phase, time.monotonic() - start)
            self._training_since = time.monotonic() if training else None

    def set_evaluation(self, evaluation: Evaluation) -> None:
        """Records what the evaluations so far said."""
        self.save(replace(self.record, evaluation=evaluation))

    def set_tracker(self, state: Mapping[str, str]) -> None:
        """Records what a tracker needs to go on with the same run after a resume."""
        self.save(replace(self.record, tracker=dict(state)))

    def set_model_available(self, available: bool) -> None:
        """Records whether `model/` holds a complete model."""
        if available:
            with files.writing(self.model_dir):
                files.sync_folder(self.model_dir)
        self.save(replace(self.record, model_available=available))
        self.event("model_available" if available else "model_withdrawn")

    def lease(self, *, resumed_from_step: int, idempotency_key: str | None) -> Attempt:
        """Adds an attempt that waits for its process; call it inside `only_writer(run)`.

        Args:
            resumed_from_step: step whose checkpoint it goes on from; 0 = the beginning.
            idempotency_key: by which a repeated retry is recognised.
        """
        self.save(
            attempts.leased(
                self.record, resumed_from_step=resumed_from_step, idempotency_key=idempotency_key
            )
        )
        self.event("attempt_leased", resumed_from_step=resumed_from_step)
        return self.record.attempts[-1]

    def accept(self, pid: int) -> None:
        """Records the process that was started for the leased attempt."""
        attempt = replace(
            self.record.attempts[-1],
            state=AttemptState.ACCEPTED,
            pid=pid,
            process_started=attempts.process_started(pid),
        )
        self.save(self.record.with_attempt(attempt))
        self.event("attempt_accepted", pid=pid)

    def cancel_requested(self) -> bool:
        """Whether somebody has asked to cancel this attempt; when first seen, it is recorded."""
        attempt = self.record.attempts[-1]
        assert attempt.state is AttemptState.STARTED, "nobody can ask any more"
        if not cancellation.is_requested(self.path, attempt.number):
            return False
        self._note_cancel_request()
        return True

    def finalize(self, stop_reason: StopReason) -> StopReason:
        """Begins the end of an attempt, which nobody can cancel; returns how the run ends.

        A request that came before makes it cancelled.
        """
        attempt = replace(self.record.attempts[-1], state=AttemptState.FINALIZING)
        self.save(self.record.with_attempt(attempt))
        if cancellation.request(self.path, attempt.number):
            self.event("finalizing")
            return stop_reason
        self._note_cancel_request()
        self.event("finalizing")
        return StopReason.CANCELLED

    @contextmanager
    def attempt(
        self, *, planned_steps: int, downgrades: Sequence[str] = (), resumed_from_step: int = 0
    ) -> Iterator[Attempt]:
        """Makes this process the one writer of the run, and records how the block ended.

        The operating system frees the lock of a process that dies. `finish` inside says how a
        normal end came about; an exception makes the run failed and an interruption cancelled, and
        both go on out of the block.

        Args:
            planned_steps: optimizer steps of the plan.
            downgrades: `setting:action:cause` tokens of the plan.
            resumed_from_step: step whose checkpoint the attempt goes on from; 0 = the beginning.

        Raises:
            RunError: another process is training this run.
            RunCancelled: somebody asked for that before the first step.
        """
        known = self.record.state
        with only_writer(self):
            if self.record.state is RunState.CANCELLED and known is not RunState.CANCELLED:
                raise RunCancelled(f"{self.path}: was cancelled before this attempt began")
            anew = attempts.begins_anew(self.record)
            had_model = self.record.model_available
            record = attempts.started(self.record, resumed_from_step)
            if anew:
                assert resumed_from_step == 0, "it was started to begin anew"
                record = replace(record, evaluation=None, model_available=False)
            for folder in (self.path, self.samples_dir):
                files.remove_leftovers(folder)
            for number in range(1, len(record.attempts)):
                cancellation.forget(self.path, number)
            self.save(record)
            self._ending = Outcome(StopReason.FAILED, planned_steps, 0, list(downgrades))
            self._training_since = time.monotonic()
            self.event(
                "attempt_started", resumed_from_step=resumed_from_step, planned_steps=planned_steps
            )
            try:
                if resumed_from_step == 0 and self.cancel_requested():
                    raise RunCancelled(f"{self.path}: cancelled before its first step")
                if anew and record.attempts[-1].number > 1:
                    self._set_aside(had_model=had_model)
                yield record.attempts[-1]
                assert self.record.outcome is not None, "the attempt ended without run.finish(...)"
            except BaseException as error:
                with attempts.shielded():
                    self._end_by(error)
                raise
            with attempts.shielded():
                self._end()

    def add_downgrade(self, token: str) -> None:
        """Adds a downgrade that showed only while running to the outcome of this attempt.

        Call it inside the `with run.attempt(...)` block, before `finish`; a token that is there
        already is not added again.

        Args:
            token: `setting:action:cause`.
        """
        assert self._ending is not None, "add_downgrade belongs inside `with run.attempt(...)`"
        assert self.record.outcome is None, "add_downgrade comes before finish"
        if token not in self._ending.downgrades:
            downgrades = [*self._ending.downgrades, token]
            self._ending = replace(self._ending, downgrades=downgrades)
            self.event("downgraded", token=token)

    def finish(self, stop_reason: StopReason, *, steps: int, rule: str | None = None) -> None:
        """Says how the run ends; call it last inside the `with run.attempt(...)` block.

        Args:
            stop_reason: why no further step was made.
            steps: steps of the run, all attempts together.
            rule: health rule that ended the run.

        Raises:
            NoStepsError: the run would end well without a single step.
        """
        assert self._ending is not None, "finish belongs inside `with run.attempt(...)`"
        state = STATE_OF_STOP_REASON[stop_reason]
        if state is RunState.SUCCEEDED and steps == 0:
            raise NoStepsError(
                f"{self.path}: the run made 0 of {self._ending.planned_steps} planned steps, so "
                f"nothing was trained. `{tunebook_command()} inspect` shows what became of the "
                "rows."
            )
        outcome = replace(self._ending, stop_reason=stop_reason, steps=steps, rule=rule)
        # Written with the end of the attempt: until then, whoever kills us interrupts the run.
        self.record = replace(self.record, state=state, outcome=outcome)

    def _end_by(self, error: BaseException) -> None:
        """Records the end that an exception brought; if the disk refuses, says so in a note."""
        try:
            self.log("".join(traceback.format_exception(error)))
            if self.record.outcome is None:
                assert self._ending is not None
                rows = self.metrics()
                reason, failure = attempts.ending_of(error)
                outcome = replace(
                    self._ending, stop_reason=reason, steps=rows[-1]["step"] if rows else 0
                )
                state = STATE_OF_STOP_REASON[reason]
                self.record = replace(self.record, state=state, failure=failure, outcome=outcome)
            self._end()
        except RunError as refused:
            error.add_note(f"The run directory could not record this end: {refused}")

    def _set_aside(self, *, had_model: bool) -> None:
        """Moves everything that was trained out of the way of an attempt that begins at step 0."""
        if had_model:
            self.event("model_withdrawn")
        for checkpoint in self.rewind(0):
            folder = checkpoint.ref.path
            if folder.is_relative_to(self.checkpoints_dir) and folder.is_dir():
                with files.writing(folder):
                    shutil.rmtree(folder)

    def end_lease(self, error: BaseException) -> None:
        """Records that a leased attempt ends by an exception before it has begun.

        Call it inside `only_writer(run)`.
        """
        self.log("".join(traceback.format_exception(error)))
        reason, failure = attempts.ending_of(error)
        rows = self.metrics()
        steps = rows[-1]["step"] if rows else 0
        outcome = Outcome(reason, self.read_plan()["planned_steps"], steps)
        state = STATE_OF_STOP_REASON[reason]
        self.record = replace(self.record, state=state, failure=failure, outcome=outcome)
        self._end()

    def _note_cancel_request(self) -> None:
        if self.record.state is RunState.RUNNING:
            self.save(replace(self.record, state=RunState.CANCEL_REQUESTED))
            self.event("cancel_requested")

    def _end_preparation(self, error: BaseException) -> None:
        reason, failure = attempts.ending_of(error)
        cancelled = reason is StopReason.CANCELLED
        state = STATE_OF_STOP_REASON[reason]
        try:
            self.save(replace(self.record, state=state, failure=failure))
            self.set_preparation(Preparation.CANCELLED if cancelled else Preparation.FAILED)
            cancellation.forget(self.path, 1)
        except RunError as refused:
            error.add_note(f"The run directory could not record this end: {refused}")

    def _end(self) -> None:
        record = attempts.ended(self.record)
        if self._training_since is not None:
            seconds = time.monotonic() - self._training_since
            record = replace(record, timing=record.timing.plus("training_s", seconds))
        self._training_since = self._ending = None
        self.save(record)  # state, outcome and end of the attempt at once
        self.settle_end()

    def settle_end(self) -> None:
        """Completes the recorded end of the last attempt: its event, and no request is left of it.

        Its own process does, or the next writer if that one was killed in between.
        """
        last = self.record.attempts[-1] if self.record.attempts else None
        if last is None or last.ended_at is None:
            return
        cancellation.forget(self.path, last.number)
        path = self.path / EVENTS_FILE
        with self._one_event:
            for event in self._unsaid_end(files.read_lines(path)):
                files.append_line(path, event, sync=True)
                self._next_seq = event["seq"] + 1

    def _unsaid_end(self, lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The event of the last attempt's end if it has ended and no line says so, else none."""
        last = self.record.attempts[-1] if self.record.attempts else None
        if last is None or last.ended_at is None:
            return []
        if any(one["type"] == ENDED_EVENT and one["attempt"] == last.number for one in lines):
            return []
        assert self.record.outcome is not None, "it is recorded with the end of the attempt"
        event = {
            "seq": lines[-1]["seq"] + 1 if lines else 1,
            "attempt": last.number,
            "time": last.ended_at,
            "type": ENDED_EVENT,
            "state": last.state,
            "stop_reason": self.record.outcome.stop_reason,
        }
        return [event]

    def _bank_training_time(self) -> None:
        if self._training_since is not None:
            now = time.monotonic()
            self.add_time("training_s", now - self._training_since)
            self._training_since = now

    def require_prepared(self) -> None:
        """Returns if the run was prepared to the end, so that it can be trained.

        Raises:
            RunError: it was not.
        """
        if self.record.preparation is not Preparation.VERIFIED:
            raise RunError(
                f"{self.path}: its preparation is {self.record.preparation}, so it cannot be "
                "trained; prepare a new run"
            )

    def _existing(self, name: str) -> Path:
        path = self.path / name
        if not path.is_file():
            raise RunError(f"{path}: there is no such file: the run was not prepared to the end.")
        return path


@contextmanager
def only_writer(run: RunDir) -> Iterator[None]:
    """Holds the lock of a run without an attempt, for changes before one; the record is read anew.

    The operating system frees the lock when the process dies. It cannot be taken twice: leave the
    block before `run.attempt(...)`, which takes it itself.

    Raises:
        RunError: another process is training this run, or starts to; the message names it.
        StorageError: the lock file cannot be made.
    """
    with attempts.locked(run.path):
        run.reload()
        attempts.refuse_if_leased(run.record, run.path)
        run.settle_end()
        yield


def _yaml(config: Any) -> str:
    """Redacted YAML that OmegaConf reads back to the same values and types."""
    from omegaconf import OmegaConf
    from omegaconf.base import SCMode

    node = config if OmegaConf.is_config(config) else OmegaConf.create(config)
    plain = OmegaConf.to_container(
        node, resolve=False, enum_to_str=True, structured_config_mode=SCMode.DICT
    )
    return OmegaConf.to_yaml(OmegaConf.create(redact_config(plain, os.environ)))
