"""Cancellation of an attempt by another process: whoever creates its file first decides.

A canceller creates the file to ask; while a run is prepared, that of its first attempt. The process
that trains looks for it between steps, and creates it itself when it begins to write the model,
after which nobody can ask any more. Creating a file succeeds for exactly one process, so a request
is never half accepted.
"""

from __future__ import annotations

from pathlib import Path

from tunebook.runs.files import writing


def request(run_path: Path, attempt: int) -> bool:
    """Asks to cancel an attempt; returns whether nobody had asked or closed it before.

    Raises:
        StorageError: the folder cannot be written.
    """
    file = cancel_file(run_path, attempt)
    with writing(file):
        try:
            file.open("x").close()
        except FileExistsError:
            return False
    return True


def is_requested(run_path: Path, attempt: int) -> bool:
    """Whether somebody has asked to cancel an attempt that has not closed this door."""
    return cancel_file(run_path, attempt).exists()


def forget(run_path: Path, attempt: int) -> None:
    """Removes what is left of a request when the attempt has ended and says so itself."""
    with writing(cancel_file(run_path, attempt)):
        cancel_file(run_path, attempt).unlink(missing_ok=True)


def cancel_file(run_path: Path, attempt: int) -> Path:
    """The file of an attempt."""
    return run_path / f".cancel_{attempt}"
