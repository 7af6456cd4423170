"""Freezes the rows of a run, and reads them back as they were, whatever became of the source."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

from tunebook.data.rows import Row, fingerprint_of
from tunebook.errors import ConfigError, DataError
from tunebook.runs.files import sync_folder, writing

SPLITS = ("train", "eval")
MANIFEST = "manifest.json"
DEFAULT_PAGE, MAX_PAGE = 25, 200


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The frozen rows of a run."""

    train: list[Row]
    eval: list[Row]
    manifest: dict[str, Any]
    """What `write_snapshot` was given, and `fingerprint`, `rows` and `sha256` a split."""

    @property
    def fingerprint(self) -> str:
        """Over the content of all rows in their order."""
        return self.manifest["fingerprint"]


@dataclass(frozen=True, slots=True)
class Page:
    """Some rows of one side of a snapshot."""

    rows: list[Row]
    indices: list[int]
    """Position of each row within its split, from 0."""
    total: int | None
    """Rows of the split; None when searching, since finding out would read them all."""
    next_offset: int | None
    """Offset of the next page; None when this is the last."""


def write_snapshot(
    directory: Path, *, train: Sequence[Row], eval: Sequence[Row], manifest: dict[str, Any]
) -> str:
    """The fingerprint of the snapshot that is now in `directory`: a file of rows for each split,
    one JSON object a line, and a manifest.

    Every file appears whole or not at all, the manifest last, so a folder with a manifest is
    complete.

    Args:
        directory: made if it is not there.
        train: rows to train on.
        eval: rows held out.
        manifest: what else to keep: counts, sources, skipped rows; JSON values.

    Raises:
        StorageError: the disk did not take it.
    """
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    sides = {"train": train, "eval": eval}
    digests = {}
    for split, rows in sides.items():
        digests[split] = _write_rows(_file_of(directory, split), rows, split)
    fingerprint = fingerprint_of(_hashes(train, eval))
    whole = {
        **manifest,
        "version": 1,
        "fingerprint": fingerprint,
        "rows": {split: len(rows) for split, rows in sides.items()},
        "sha256": digests,
    }
    text = json.dumps(whole, ensure_ascii=False, indent=2, allow_nan=False)
    write_atomically(directory / MANIFEST, lambda file: file.write(text.encode("utf-8") + b"\n"))
    return fingerprint


def read_snapshot(directory: Path) -> Snapshot:
    """The rows that a run froze, checked against their fingerprint.

    Raises:
        DataError: no snapshot there, or one that was changed after it was written.
    """
    manifest = read_manifest(directory)
    sides = {}
    for split in SPLITS:
        _check_unchanged(directory, split, manifest)
        sides[split] = list(_iterate(directory, split))
    if fingerprint_of(_hashes(sides["train"], sides["eval"])) != manifest["fingerprint"]:
        raise DataError(_changed(directory / MANIFEST))
    return Snapshot(sides["train"], sides["eval"], manifest)


def page_snapshot(
    directory: Path,
    *,
    split: str = "train",
    search: str | None = None,
    offset: int = 0,
    limit: int = DEFAULT_PAGE,
) -> Page:
    """One page of the rows that a run froze, read from the snapshot and nothing else.

    Args:
        directory: `data/` of a run.
        split: train or eval.
        search: text to find in messages, reasoning, tool calls and columns, whatever its case.
        offset: rows (matches, when searching) to pass over.
        limit: rows, 200 at most.

    Raises:
        ConfigError: no such split, or numbers out of range.
        DataError: as `read_snapshot`.
    """
    if split not in SPLITS:
        raise ConfigError(f"split={split}: must be one of {', '.join(SPLITS)}")
    if not 1 <= limit <= MAX_PAGE:
        raise ConfigError(f"limit={limit}: must be between 1 and {MAX_PAGE} rows")
    if offset < 0:
        raise ConfigError(f"offset={offset}: must be 0 or more rows")
    manifest = read_manifest(directory)
    _check_unchanged(directory, split, manifest)
    found: Iterable[tuple[int, Row]] = enumerate(_iterate(directory, split))
    if search:
        wanted = search.casefold()
        found = ((i, row) for i, row in found if wanted in _text_of(row))
    window = list(islice(found, offset, offset + limit + 1))
    shown = window[:limit]
    return Page(
        rows=[row for _, row in shown],
        indices=[index for index, _ in shown],
        total=None if search else manifest["rows"][split],
        next_offset=offset + limit if len(window) > limit else None,
    )


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a snapshot.

    Raises:
        DataError: there is none, or it cannot be read.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise DataError(
            f"{directory} holds no complete snapshot of the data ({MANIFEST} is missing)"
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        complete = all(split in manifest[key] for key in ("rows", "sha256") for split in SPLITS)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(_changed(path)) from error
    if not complete or "fingerprint" not in manifest:
        raise DataError(_changed(path))
    return manifest


def write_atomically(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Puts at `path` what `write` writes, so that a reader sees the old file or the whole new one.

    Args:
        path: replaced if it is there; its folder exists.
        write: called once with a binary file.

    Raises:
        StorageError: it could not be written; the old file is intact.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        try:
            with temporary.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)


def _write_rows(path: Path, rows: Iterable[Row], split: str) -> str:
    digest = hashlib.sha256()

    def write(file: IO[bytes]) -> None:
        for row in rows:
            values = {"split": split, **row.to_json()}
            text = json.dumps(values, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
            line = text.encode("utf-8") + b"\n"
            digest.update(line)
            file.write(line)

    write_atomically(path, write)
    return digest.hexdigest()


def _file_of(directory: Path, split: str) -> Path:
    return directory / f"{split}.jsonl"


def _hashes(train: Iterable[Row], evaluation: Iterable[Row]) -> Iterator[str]:
    """Content hashes in order, with a mark where the eval rows begin."""
    yield from (row.content_hash for row in train)
    yield "eval"
    yield from (row.content_hash for row in evaluation)


def _check_unchanged(directory: Path, split: str, manifest: dict[str, Any]) -> None:
    path = _file_of(directory, split)
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing from the snapshot of the run") from error
    if digest != manifest["sha256"][split]:
        raise DataError(_changed(path))


def _changed(path: Path) -> str:
    return (
        f"{path} was changed after the run froze its data, so it no longer says what the run "
        "trained on. Put the file back as it was, or start a new run."
    )


def _iterate(directory: Path, split: str) -> Iterator[Row]:
    with _file_of(directory, split).open("rb") as file:
        for line in file:
            values = json.loads(line)
            del values["split"]
            yield Row.from_json(values)


def _text_of(row: Row) -> str:
    """Everything of a row that a search looks through, in lower case."""
    turns = [*row.messages, *row.chosen, *row.rejected]
    parts = [turn["content"] for turn in turns]
    parts += [turn.get("reasoning_content", "") for turn in turns]
    for value in (*(turn.get("tool_calls") for turn in turns), *row.columns.values()):
        if isinstance(value, str):
            parts.append(value)
        elif value is not None:
            parts.append(json.dumps(value, ensure_ascii=False))
    return "\n".join(parts).casefold()
