"""Remembers which side of the split each row of a dataset is on, across runs and added rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunebook.config import DataConfig
from tunebook.data.snapshot import write_atomically
from tunebook.data.sources import source_identity, sources_of
from tunebook.errors import DataError
from tunebook.models import tunebook_home
from tunebook.runs.files import writing

SIDES = ("train", "eval")


def dataset_key(data: DataConfig, *, fraction: float, min_rows: int, max_rows: int) -> str:
    """32 hex digits that name the ledger of a dataset under one way of holding rows out.

    The same dataset is the same places (absolute paths, Hub ids, functions with their arguments),
    in any order and whatever they hold now, so that rows may be added. Another `id_column`,
    `group_column`, fraction, minimum or maximum is another exam, with a ledger of its own; so is a
    source cut short by `limit`, or a look at the first rows would decide the split of all. Weights,
    renames and revisions are not part of it.

    Args:
        data: sources and the columns that identify a row.
        fraction: share held out.
        min_rows: rows.
        max_rows: rows.

    Raises:
        ConfigError: sources that do not fit together.
    """
    places = [{**source_identity(source), "limit": source.limit} for _, source in sources_of(data)]
    described = {
        "sources": sorted(json.dumps(place, sort_keys=True, default=str) for place in places),
        "identity": [data.id_column, data.group_column],
        "held_out": [fraction, min_rows, max_rows],
    }
    text = json.dumps(described, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:32]


def ledger_path(key: str) -> Path:
    """The file of a ledger."""
    return tunebook_home() / "ledgers" / f"{key}.json"


def read_ledger(key: str) -> dict[str, str]:
    """Identity of a row -> `train` or `eval`; empty for a dataset that was never split.

    Raises:
        DataError: the file is damaged.
    """
    path = ledger_path(key)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except UnicodeDecodeError as error:
        raise DataError(_damaged(path, error)) from error
    try:
        assignments = json.loads(text)["assignments"]
        if not all(side in SIDES for side in assignments.values()):
            raise ValueError("a row is on neither side")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(_damaged(path, error)) from error
    return assignments


def write_ledger(key: str, assignments: Mapping[str, str]) -> dict[str, str]:
    """Everything the ledger holds once `assignments` have joined it.

    What was there already stays where it is, also when another run wrote it a moment ago: go on
    with the answer, not with what was passed.

    Raises:
        DataError: the file is damaged.
        StorageError: it cannot be written.
    """
    from filelock import FileLock

    assert all(side in SIDES for side in assignments.values())
    path = ledger_path(key)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        known = read_ledger(key)
        merged = {**assignments, **known}
        if merged != known:
            whole: dict[str, Any] = {"version": 1, "key": key, "assignments": merged}
            text = json.dumps(whole, ensure_ascii=False, indent=0, sort_keys=True)
            write_atomically(path, lambda file: file.write(text.encode("utf-8")))
    return merged


def _damaged(path: Path, error: Exception) -> str:
    return (
        f"{path}: the record of which rows are held out is damaged ({error}). Restore it from a "
        "backup, or delete it to draw the eval rows anew; metrics of earlier runs over this "
        "dataset are then no longer comparable."
    )
