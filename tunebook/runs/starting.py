"""Attempts that are started from outside: in a process of their own, again, or further."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tunebook.display import tunebook_command
from tunebook.errors import RunError
from tunebook.recipe_files import recipe_files
from tunebook.runs import attempts
from tunebook.runs.attempts import LEASE_VARIABLE
from tunebook.runs.checkpoints import newest_checkpoint
from tunebook.runs.directory import RunDir, only_writer
from tunebook.runs.files import append_text
from tunebook.runs.record import Attempt, RunState
from tunebook.runs.status import OUTPUT_FILE, observed


class NoCheckpointError(RunError):
    """A run was to go on from a checkpoint and has none."""

    code = "no_checkpoint"


@dataclass(frozen=True, slots=True)
class Started:
    """An attempt that was asked for."""

    path: Path
    """The run directory."""
    attempt: Attempt
    is_new: bool
    """False = its idempotency key was used before, and this is the attempt of that time."""


def next_commands(run: RunDir) -> str:
    """The command lines for a run that trains in the background, one a line."""
    command = f"{tunebook_command()} runs"
    root = run.path.parents[1]
    where = "" if root == Path("runs").absolute() else f" --root {shlex.quote(str(root))}"
    number = run.record.number
    return "\n".join(
        [
            f"  {command} follow {number}{where}     what happens",
            f"  {command} wait {number}{where}       until it ends",
            f"  {command} cancel {number}{where}     after the step in flight",
        ]
    )


def start(path: Path | str) -> Started:
    """Trains a prepared or interrupted run in a background process, which outlives this one.

    It goes on from the newest checkpoint, or begins where there is none.

    Raises:
        RunError: it was not prepared to the end, has succeeded, is being trained, or is of a recipe
            of one's own.
        StorageError: the folder cannot be written.
    """
    run = RunDir.open(path)
    require_command(run)
    with only_writer(run):
        run.require_prepared()
        newest = newest_checkpoint(run.checkpoints())
        step = newest.step if newest else 0
        if run.record.state is RunState.SUCCEEDED and step >= run.read_plan()["planned_steps"]:
            raise RunError(
                f"{run.path}: has succeeded. To train it further, raise plan.epochs or "
                "plan.max_steps with `runs resume`"
            )
        with _leased(run, resumed_from_step=step, idempotency_key=None):
            _launch(run)
    return Started(run.path, run.record.attempts[-1], is_new=True)


def retry(path: Path | str, *, resume: bool = False, idempotency_key: str | None = None) -> Started:
    """Trains a run that failed or was cancelled once more, in a background process.

    It has the same arguments and the same frozen data, and is another attempt of the same run.

    Args:
        path: the run directory.
        resume: go on from its newest checkpoint; else it begins at step 0, and what it had trained
            is set aside when the new attempt begins.
        idempotency_key: a second call with the same key returns the attempt of the first.

    Raises:
        NoCheckpointError: `resume`, and there is none.
        RunError: the run is being trained, has not been tried, has succeeded, or is of a recipe of
            one's own.
        StorageError: the folder cannot be written.
    """
    run, known = _lease_retry(path, resume=resume, idempotency_key=idempotency_key, launch=True)
    return Started(run.path, known or run.record.attempts[-1], is_new=known is None)


def lease_retry(
    path: Path | str, *, resume: bool = False, idempotency_key: str | None = None
) -> Started:
    """As `retry`, but leaves the training to this process, which holds the attempt's lease."""
    run, known = _lease_retry(path, resume=resume, idempotency_key=idempotency_key, launch=False)
    return Started(run.path, known or run.record.attempts[-1], is_new=known is None)


@contextmanager
def ending_lease(path: Path | str | None) -> Iterator[None]:
    """Ends the attempt that is leased to this process if the block raises before it has begun.

    Whoever waits for it learns what went wrong in its preparation.

    Args:
        path: the run directory; None = a new run, of which no attempt can be leased.

    Raises:
        RunError: there is no such run.
    """
    run = None if path is None else RunDir.open(path)
    try:
        yield
    except BaseException as error:
        if run is not None:
            with attempts.shielded():
                _end_own_lease(run, error)
        raise


def _end_own_lease(run: RunDir, error: BaseException) -> None:
    if not attempts.is_leased_here(RunDir.open(run.path).record):
        return  # the usual case: it takes no lock, which another process may hold
    try:
        with only_writer(run):
            if attempts.is_leased_here(run.record):
                run.end_lease(error)
    except RunError as refused:
        error.add_note(f"The run directory could not record this end: {refused}")


def override_line(key: str, value: str) -> str:
    """A Hydra override of a string, quoted where the value needs it."""
    if re.fullmatch(r"[\w./-]+", value):
        return f"{key}={value}"
    # Hydra reads a backslash as one unless a quote follows.
    escaped = re.sub(r'(\\*)("|$)', _escaped, value)
    return f'{key}="{escaped}"'


def resume_text(run: RunDir, *, path: str, change: str = "") -> str:
    """The command that goes on with a run; of a recipe of one's own, what its program is told.

    Args:
        run: the run.
        path: its directory, as it is shown.
        change: an override that makes its plan longer.
    """
    recipe, override = run.record.recipe, typed_override("resume", path)
    more = f" {change}" if change else ""
    if recipe in recipe_files():
        return f"{tunebook_command()} {recipe} {override}{more}"
    return f"# the program of your own recipe {recipe!r}, with {override}{more}"


def require_command(run: RunDir) -> None:
    """Returns if the recipe of a run is a command, so that tunebook can train it.

    Raises:
        RunError: it is a recipe of one's own.
    """
    if run.record.recipe not in recipe_files():
        raise RunError(
            f"{run.path}: its recipe {run.record.recipe!r} is none that tunebook has "
            f"({', '.join(recipe_files())}). A recipe of your own goes on from its own program, "
            f"with {override_line('resume', str(run.path))} in its config"
        )


def typed_override(key: str, value: str) -> str:
    """An override as typed into a shell, quoted for both where the value needs it."""
    return shlex.quote(override_line(key, value))


def _escaped(found: re.Match[str]) -> str:
    return found[1] * 2 + ('\\"' if found[2] else "")


def _lease_retry(
    path: Path | str, *, resume: bool, idempotency_key: str | None, launch: bool
) -> tuple[RunDir, Attempt | None]:
    run = RunDir.open(path)
    known = _attempt_of(run, idempotency_key)
    if known is not None:
        return run, known
    if launch:
        require_command(run)
    with only_writer(run):
        known = _attempt_of(run, idempotency_key)
        if known is not None:
            return run, known
        run.require_prepared()
        if not run.record.attempts:
            raise RunError(f"{run.path}: was never tried, so there is nothing to retry; start it")
        if run.record.state is RunState.SUCCEEDED:
            raise RunError(
                f"{run.path}: has succeeded, so there is nothing to retry. To train it further, "
                "raise plan.epochs or plan.max_steps with `runs resume`"
            )
        newest = newest_checkpoint(run.checkpoints())
        if resume and newest is None:
            raise NoCheckpointError(
                f"{run.path}: has no checkpoint to go on from; retry it from the beginning, "
                "without --resume"
            )
        step = newest.step if resume and newest else 0
        with _leased(run, resumed_from_step=step, idempotency_key=idempotency_key):
            if launch:
                _launch(run)
            else:
                run.accept(os.getpid())
    return run, None


@contextmanager
def _leased(run: RunDir, *, resumed_from_step: int, idempotency_key: str | None) -> Iterator[None]:
    """Leases an attempt for a block, which fails if the block does."""
    run.lease(resumed_from_step=resumed_from_step, idempotency_key=idempotency_key)
    try:
        yield
    except BaseException as error:
        with attempts.shielded():
            run.end_lease(error)
        raise


def _launch(run: RunDir) -> None:
    """Starts the process of the leased attempt in a session of its own, without a terminal."""
    file = run.path / OUTPUT_FILE
    append_text(file, f"attempt {run.record.attempts[-1].number}\n")
    command = [sys.executable, "-P", "-m", "tunebook.cli", "run", run.record.recipe]
    imports = os.pathsep.join(os.path.abspath(each) for each in sys.path)
    environment = {
        **os.environ,
        LEASE_VARIABLE: attempts.lease_text(run.record),
        "PYTHONPATH": imports,
    }
    with file.open("ab") as output:
        try:
            process = subprocess.Popen(
                [*command, override_line("resume", str(run.path))],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=environment,
            )
        except OSError as error:
            raise RunError(f"{sys.executable}: no process can be started: {error}") from error
    process.returncode = 0  # it outlives us: no warning when the object goes
    run.accept(process.pid)


def _attempt_of(run: RunDir, idempotency_key: str | None) -> Attempt | None:
    if idempotency_key is None:
        return None
    found = [one for one in observed(run).attempts if one.idempotency_key == idempotency_key]
    return found[-1] if found else None
