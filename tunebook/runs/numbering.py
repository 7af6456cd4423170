"""Folders, numbers and ids of new runs: five runs started in one second get five of each."""

from __future__ import annotations

import itertools
import os
import re
import secrets
from datetime import datetime
from pathlib import Path

from filelock import FileLock

from tunebook.errors import RunError
from tunebook.runs.files import read_json, replace_text, writing
from tunebook.runs.redaction import redact

RECORD_FILE = "run.json"
NUMBER_FILE = ".last_number"
MAX_NAME_LENGTH = 80
_ID_LETTERS = "abcdefghjkmnpqrstuvwxyz"
_ID_CHARACTERS = _ID_LETTERS + "23456789"


def folder_name(moment: datetime, name: str | None) -> str:
    """The folder of a run: date, time, and its redacted name with unusual characters made `-`.

    What is left needs no quotes on a command line, in a shell or for Hydra.
    """
    stamp = moment.strftime("%Y-%m-%d_%H-%M-%S")
    public = redact(name or "", os.environ)
    plain = re.sub(r"[^\w.-]+", "-", public, flags=re.ASCII).strip("-.")[:MAX_NAME_LENGTH]
    return f"{stamp}_{plain}" if plain else stamp


def claim_folder(parent: Path, name: str) -> Path:
    """A new folder made in `parent`: `name`, else the first free of `name-2`, `name-3`, ...

    Making a folder either succeeds for exactly one process or says that it exists, so two processes
    never get the same one.

    Raises:
        StorageError: the folder cannot be made.
    """
    with writing(parent / name):
        parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            path = parent / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir()
            except FileExistsError:
                continue
            return path
    raise AssertionError("itertools.count ended")


def next_number(root: Path) -> int:
    """A number that no run below `root` has had, one above the last.

    Raises:
        StorageError: the counter cannot be written.
    """
    counter = root / NUMBER_FILE
    with writing(counter), FileLock(f"{counter}.lock"):
        number = _last_number(root, counter) + 1
        replace_text(counter, f"{number}\n")
    return number


def new_id() -> str:
    """A random id of 8 characters that begins with a letter, so it is never taken for a number."""
    first = secrets.choice(_ID_LETTERS)
    return first + "".join(secrets.choice(_ID_CHARACTERS) for _ in range(7))


def run_folders(root: Path) -> list[Path]:
    """Every run directory below `root/<recipe>/`, by path."""
    return sorted(path.parent for path in root.glob(f"*/*/{RECORD_FILE}"))


def _last_number(root: Path, counter: Path) -> int:
    try:
        return int(counter.read_text(encoding="utf-8"))
    except FileNotFoundError:
        pass
    except ValueError as error:
        raise RunError(
            f"{counter}: holds no number. Delete the file: it is made anew from the runs beside it."
        ) from error
    records = [read_json(path / RECORD_FILE) for path in run_folders(root)]
    return max((int(record["number"]) for record in records), default=0)
