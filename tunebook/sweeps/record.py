"""The folder of a sweep: what it is made of, and how far each of its trials has come.

`runs/sweeps/<date_time>_<name>/sweep.json`; the run directories of the trials are ordinary ones
beside those of single runs.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tunebook.compose import as_dict
from tunebook.config import RecipeConfig
from tunebook.errors import ConfigError, RunError
from tunebook.runs import RunDir, RunState, observed, redact_config
from tunebook.runs.attempts import utc_now
from tunebook.runs.files import read_json, replace_json, writing
from tunebook.runs.numbering import claim_folder, folder_name
from tunebook.runs.redaction import REDACTED
from tunebook.runs.status import INTERRUPTED, shown
from tunebook.sweeps.trial import FINAL, STATE_OF_RUN, STOPPED_EVENT, Trial, TrialState

SWEEP_FILE = "sweep.json"
SWEEPS = "sweeps"
LOCK_FILE = ".lock"


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """What `sweep.json` holds of one trial."""

    number: int
    label: str
    overrides: tuple[str, ...]
    """Redacted."""
    config_hash: str
    plan_hash: str | None
    """None = it has not been prepared."""
    state: TrialState
    run: str | None
    """Its run directory, from the folder of all runs."""
    metric: str | None
    value: float | None
    """Best value of the metric."""
    why: str | None


class SweepDir:
    """One folder of a sweep. Every change is on disk when the method returns."""

    def __init__(self, path: Path, head: dict[str, Any], trials: Sequence[TrialRecord]) -> None:
        self.path = path
        """Absolute."""
        self.head = head
        """Recipe, name, when and by which version it was made, and its halving."""
        self.trials = list(trials)
        """By number."""

    @classmethod
    def create(cls, path: Path, recipe: str, *, halving: dict[str, Any] | None) -> SweepDir:
        """A sweep without trials in a folder that `claim_sweep` has made."""
        from tunebook import __version__

        head = {
            "version": 1,
            "recipe": recipe,
            "created_at": utc_now(),
            "tunebook_version": __version__,
            "halving": halving,
        }
        return cls(path, head, [])

    @classmethod
    def open(cls, path: Path | str) -> SweepDir:
        """The sweep in a folder, as it was last written.

        Raises:
            RunError: the folder holds no sweep, or its record is damaged.
        """
        path = Path(os.path.abspath(os.path.expanduser(path)))
        file = path / SWEEP_FILE
        if not file.is_file():
            raise RunError(f"{path}: no sweep (there is no {SWEEP_FILE} in it)")
        try:
            content = read_json(file)
            trials = [
                TrialRecord(
                    **{
                        **each,
                        "state": TrialState(each["state"]),
                        "overrides": tuple(each["overrides"]),
                    }
                )
                for each in content.pop("trials")
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(f"{file}: the record is damaged: {error}") from error
        return cls(path, content, trials)

    @property
    def recipe(self) -> str:
        """Name of the recipe."""
        return self.head["recipe"]

    @property
    def runs_dir(self) -> Path:
        """The folder of all runs."""
        return self.path.parent.parent

    def save(self) -> None:
        """Writes `sweep.json`."""
        content = {**self.head, "trials": [asdict(each) for each in self.trials]}
        replace_json(self.path / SWEEP_FILE, content)

    def note(self, trial: Trial) -> None:
        """Records how far a trial has come; a new one is added."""
        evaluation = trial.run.record.evaluation if trial.run else None
        record = TrialRecord(
            number=trial.number,
            label=trial.label,
            overrides=public_overrides(trial.overrides),
            config_hash=config_hash(trial.config),
            plan_hash=trial.plan_hash,
            state=trial.state,
            run=os.path.relpath(trial.run.path, self.runs_dir) if trial.run else None,
            metric=evaluation.metric if evaluation else None,
            value=evaluation.best if evaluation else None,
            why=trial.why,
        )
        self.trials = sorted(
            [record, *(each for each in self.trials if each.number != trial.number)],
            key=lambda each: each.number,
        )
        self.save()

    def run_of(self, record: TrialRecord) -> RunDir | None:
        """The run directory of a trial; None = it has none, or somebody deleted it."""
        if record.run is None or not (self.runs_dir / record.run / "run.json").is_file():
            return None
        return RunDir.open(self.runs_dir / record.run)

    def current(self, record: TrialRecord) -> TrialRecord:
        """The record of a trial, corrected by its run: the last moments may be missing in it."""
        if record.state in FINAL:
            return record
        run = self.run_of(record)
        found = None if run is None else observed(run)
        lost = found is not None and shown(found) == INTERRUPTED
        if run is not None and (lost or run.record.state is RunState.CANCELLED):
            reason = _stopped_for(run)
            if reason is not None:
                return replace(record, state=TrialState.STOPPED, why=reason)
        state = record.state if found is None else STATE_OF_RUN.get(found.state, record.state)
        if record.state is TrialState.PENDING and state not in FINAL:
            return record  # the sweep, should it go on, has yet to begin with it
        alive = found is not None and found.live_attempt is not None
        if lost or (state is TrialState.RUNNING and not alive and not self.is_driven()):
            state = TrialState.INTERRUPTED
        return record if state is record.state else replace(record, state=state)

    def is_driven(self) -> bool:
        """Whether a process holds the lock of the sweep."""
        lock = FileLock(self.path / LOCK_FILE, thread_local=False)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return True
        lock.release()
        return False

    @contextmanager
    def only_writer(self) -> Iterator[None]:
        """Holds the lock of the sweep, which the operating system frees when the process dies.

        Raises:
            RunError: another process drives the sweep.
        """
        lock = FileLock(self.path / LOCK_FILE, thread_local=False)
        with writing(self.path / LOCK_FILE):
            try:
                lock.acquire(timeout=1.0)
            except Timeout:
                raise RunError(f"{self.path}: another process drives this sweep") from None
        try:
            yield
        finally:
            lock.release()


def _stopped_for(run: RunDir) -> str | None:
    """Why a sweep stopped the last attempt of a run; None = it did not.

    That it did is written before the run ends, so it is known of a run that was killed meanwhile.
    """
    last = len(run.record.attempts)
    for event in run.events():
        if event["type"] == STOPPED_EVENT and event["attempt"] == last:
            return str(event["reason"])
    return None


def claim_sweep(runs_dir: Path, name: str) -> Path:
    """A new folder for a sweep, below the folder of all runs.

    Raises:
        StorageError: it cannot be made.
    """
    moment = datetime.now().astimezone()
    return claim_folder(runs_dir.absolute() / SWEEPS, folder_name(moment, name))


def check_unchanged(sweep: SweepDir, recipe: str, trials: Sequence[Trial], *, whole: bool) -> None:
    """Returns if trials are those of an earlier start of the sweep.

    Args:
        sweep: of the earlier start.
        recipe: of this start.
        trials: of this start.
        whole: whether they are to be all trials of the sweep, not a part of them.

    Raises:
        ConfigError: they are not.
    """
    again = (
        f"sweep.resume={sweep.path}: a sweep goes on as it was begun, and this command line makes "
        "another one"
    )
    advice = (
        "Leave out everything but sweep.resume to go on with it, or begin a new sweep without "
        "sweep.resume"
    )
    if recipe != sweep.recipe:
        raise ConfigError(f"{again}: its recipe is {sweep.recipe}. {advice}")
    if whole and len(trials) != len(sweep.trials):
        raise ConfigError(
            f"{again}: it has {len(sweep.trials)} trials, not {len(trials)}. {advice}"
        )
    known = {each.number: each for each in sweep.trials}
    for trial in trials:
        before = known.get(trial.number)
        if before is None or before.config_hash != config_hash(trial.config):
            was = "is not in it" if before is None else f"was {' '.join(before.overrides)}"
            raise ConfigError(f"{again}: trial {trial.number} {was}. {advice}")


def recorded_overrides(sweep: SweepDir) -> list[tuple[str, ...]]:
    """The overrides of every trial of a sweep, to compose them again.

    Raises:
        ConfigError: they held a secret, which is not in the record.
    """
    for trial in sweep.trials:
        if any(REDACTED in override for override in trial.overrides):
            raise ConfigError(
                f"{sweep.path}: its command line held a secret, which is not in the record; give "
                "the whole command line again, with sweep.resume"
            )
    return [trial.overrides for trial in sweep.trials]


def config_hash(config: RecipeConfig) -> str:
    """16 hex digits over the public part of a trial's config, wherever its run lies."""
    public = redact_config(as_dict(config), os.environ)
    for key in ("runs_dir", "sweep"):
        del public[key]
    return hashlib.sha256(json.dumps(public, sort_keys=True).encode()).hexdigest()[:16]


def public_overrides(overrides: Sequence[str]) -> tuple[str, ...]:
    """Override lines with the values of secret-looking keys redacted."""
    public: list[str] = []
    for override in overrides:
        key, equals, value = override.partition("=")
        leaf = key.rpartition(".")[2]
        public.append(f"{key}{equals}{redact_config({leaf: value}, os.environ)[leaf]}")
    return tuple(public)
