"""The server's memory on disk: one SQLite file.

A record is one JSON document. Every change is one transaction, which a killed process leaves done
or undone; a machine that loses power may lose the last moments (WAL, synchronous NORMAL).
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from tunebook.errors import ConfigError
from tunebook.serve.records import (
    Checkpoint,
    Operation,
    OperationStatus,
    Resource,
    Session,
    checkpoint_from,
    resource_from,
    session_from,
    to_plain,
)

FORMAT = "1"
SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS resources (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, document TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS sessions (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, document TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS checkpoints (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, document TEXT NOT NULL,
    session_id TEXT NOT NULL AS (json_extract(document, '$.session_id')));
CREATE INDEX IF NOT EXISTS checkpoints_of_session ON checkpoints (session_id, number);
CREATE TABLE IF NOT EXISTS operations (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, session_id TEXT NOT NULL,
    kind TEXT NOT NULL, key TEXT NOT NULL, digest BLOB NOT NULL, status TEXT NOT NULL,
    body BLOB, payload BLOB, output BLOB, error TEXT, ended_at REAL, UNIQUE (session_id, key));
CREATE INDEX IF NOT EXISTS large_outputs ON operations (ended_at)
    WHERE output IS NOT NULL AND length(output) > 4096;
CREATE INDEX IF NOT EXISTS operations_of_session ON operations (session_id, seq);
CREATE TABLE IF NOT EXISTS payloads (
    id TEXT PRIMARY KEY, session_id TEXT NOT NULL, created_at REAL NOT NULL);
CREATE INDEX IF NOT EXISTS payloads_by_age ON payloads (created_at);
"""
TABLES = {Resource: "resources", Session: "sessions", Checkpoint: "checkpoints"}
READERS: dict[type, Callable[[dict[str, Any]], Any]] = {
    Resource: resource_from,
    Session: session_from,
    Checkpoint: checkpoint_from,
}
R = TypeVar("R", Resource, Session, Checkpoint)
COLUMNS = "id, session_id, seq, kind, status, error"


class Store:
    """Reads and writes records; safe to call from several threads."""

    def __init__(self, path: Path) -> None:
        """Opens the file, or makes it.

        Raises:
            ConfigError: it is not such a file, or of another version.
        """
        self._lock = threading.RLock()
        try:
            self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=NORMAL")
            self._connection.executescript(SCHEMA)
        except sqlite3.DatabaseError as error:
            raise ConfigError(f"{path}: cannot be used: {error}; name another --home") from error
        found = self.meta("format", FORMAT)
        if found != FORMAT:
            raise ConfigError(
                f"{path}: written by another version of tunebook (format {found}); "
                "name another --home"
            )

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All that is written within it is written, or nothing; nested ones are one."""
        with self._lock:
            if self._connection.in_transaction:
                yield
                return
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    def meta(self, name: str, default: str) -> str:
        """A setting of the file, `default` being written where there is none."""
        with self.transaction():
            self._connection.execute(
                "INSERT OR IGNORE INTO meta (name, value) VALUES (?, ?)", (name, default)
            )
            row = self._connection.execute("SELECT value FROM meta WHERE name = ?", (name,))
            return str(row.fetchone()[0])

    def put(self, record: Resource | Session | Checkpoint) -> None:
        """Writes a record, new or changed."""
        with self._lock:
            self._connection.execute(
                f"INSERT INTO {TABLES[type(record)]} (id, document) VALUES (?, ?) "
                "ON CONFLICT (id) DO UPDATE SET document = excluded.document",
                (record.id, json.dumps(to_plain(record))),
            )

    def find(self, kind: type[R], identity: str) -> R | None:
        """The record with an id."""
        query = f"SELECT document FROM {TABLES[kind]} WHERE id = ?"
        row = self._one(query, (identity,))
        return None if row is None else READERS[kind](json.loads(row[0]))

    def all(self, kind: type[R]) -> Iterator[R]:
        """All records of a kind, newest first."""
        return (record for _, record in self._after(kind, None))

    def page(
        self, kind: type[R], *, after: str | None, limit: int, keep: Callable[[R], bool]
    ) -> tuple[list[R], bool]:
        """Records of a kind, newest first, and whether there are more.

        Args:
            kind: of record.
            after: id of the last record of the page before; None = from the newest.
            limit: records of a page.
            keep: whether a record is wanted.

        Raises:
            LookupError: there is no record `after`.
        """
        start = None
        if after is not None:
            row = self._one(f"SELECT number FROM {TABLES[kind]} WHERE id = ?", (after,))
            if row is None:
                raise LookupError(after)
            start = row[0]
        found = [
            r for _, r in islice((x for x in self._after(kind, start) if keep(x[1])), limit + 1)
        ]
        return found[:limit], len(found) > limit

    def _after(self, kind: type[R], number: int | None) -> Iterator[tuple[int, R]]:
        """Records older than a number, newest first, read in pieces."""
        last = 2**62 if number is None else number
        while True:
            with self._lock:
                rows = self._connection.execute(
                    f"SELECT number, document FROM {TABLES[kind]} WHERE number < ? "
                    "ORDER BY number DESC LIMIT 200",
                    (last,),
                ).fetchall()
            for last, document in rows:
                yield last, READERS[kind](json.loads(document))
            if not rows:
                return

    def count(self, kind: type[R]) -> int:
        """How many records of a kind there have been."""
        # Not the highest number: an update of a record uses one up too.
        return self._one(f"SELECT count(*) FROM {TABLES[kind]}", ())[0]

    def count_operations(self, kind: str, *, up_to: int) -> int:
        """How many operations of a kind there have been up to a number."""
        query = "SELECT count(*) FROM operations WHERE kind = ? AND seq <= ?"
        return self._one(query, (kind, up_to))[0]

    def checkpoints_of(self, session_id: str) -> list[Checkpoint]:
        """Checkpoints of a session, oldest first."""
        with self._lock:
            rows = self._connection.execute(
                "SELECT document FROM checkpoints WHERE session_id = ? ORDER BY number",
                (session_id,),
            ).fetchall()
        return [checkpoint_from(json.loads(row[0])) for row in rows]

    def add_operation(
        self, operation: Operation, *, key: str, digest: bytes, body: bytes, payload: bytes | None
    ) -> None:
        """Writes a new operation and gives it its number."""
        with self._lock:
            cursor = self._connection.execute(
                "INSERT INTO operations (id, session_id, kind, key, digest, status, body, payload) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    operation.id,
                    operation.session_id,
                    operation.kind,
                    key,
                    digest,
                    operation.status,
                    body,
                    payload,
                ),
            )
            assert cursor.lastrowid is not None
            operation.seq = cursor.lastrowid

    def end_operation(self, operation: Operation, *, output: bytes | None, now: float) -> None:
        """Writes how an operation ended."""
        error = None if operation.error is None else json.dumps(operation.error)
        with self._lock:
            self._connection.execute(
                "UPDATE operations SET status = ?, error = ?, output = ?, ended_at = ? "
                "WHERE seq = ?",
                (operation.status, error, output, now, operation.seq),
            )

    def operation(
        self, session_id: str, operation_id: str
    ) -> tuple[Operation, bytes | None] | None:
        """An operation and its output."""
        row = self._one(
            f"SELECT {COLUMNS}, output FROM operations WHERE id = ? AND session_id = ?",
            (operation_id, session_id),
        )
        return None if row is None else (_operation(row[:-1]), row[-1])

    def operation_of_key(self, session_id: str, key: str) -> tuple[Operation, bytes] | None:
        """The operation that a key has made, and the digest of what was asked for."""
        row = self._one(
            f"SELECT {COLUMNS}, digest FROM operations WHERE session_id = ? AND key = ?",
            (session_id, key),
        )
        return None if row is None else (_operation(row[:-1]), row[-1])

    def body(self, seq: int) -> tuple[bytes, bytes | None]:
        """What an operation was asked for, and the payload that was uploaded for it."""
        row = self._one("SELECT body, payload FROM operations WHERE seq = ?", (seq,))
        assert row is not None and row[0] is not None
        return row[0], row[1]

    def unended_operations(self, session_id: str) -> list[Operation]:
        """Operations of a session that have not run to their end, in order."""
        return self._operations(
            "session_id = ? AND status IN (?, ?)",
            (session_id, OperationStatus.PENDING, OperationStatus.RUNNING),
        )

    def completed_operations(
        self, session_id: str, *, after: int, kinds: Sequence[str]
    ) -> list[Operation]:
        """Completed operations of some kinds with a larger number than `after`, in order."""
        marks = ", ".join("?" * len(kinds))
        return self._operations(
            f"session_id = ? AND seq > ? AND status = ? AND kind IN ({marks})",
            (session_id, after, OperationStatus.COMPLETED, *kinds),
        )

    def forget_bodies(self, session_id: str, *, up_to: int) -> None:
        """Drops the bodies of ended operations that no replay needs."""
        with self._lock:
            self._connection.execute(
                "UPDATE operations SET body = NULL, payload = NULL "
                "WHERE session_id = ? AND seq <= ? AND body IS NOT NULL AND status IN (?, ?)",
                (session_id, up_to, OperationStatus.COMPLETED, OperationStatus.FAILED),
            )

    def forget_outputs(self, *, before: float) -> None:
        """Drops outputs above 4 KiB of operations that ended before a time."""
        with self._lock:
            self._connection.execute(
                "UPDATE operations SET output = NULL "
                "WHERE ended_at < ? AND output IS NOT NULL AND length(output) > 4096",
                (before,),
            )

    def add_payload(self, payload_id: str, session_id: str, created_at: float) -> None:
        """Writes that a session has a payload."""
        with self._lock:
            self._connection.execute(
                "INSERT OR IGNORE INTO payloads VALUES (?, ?, ?)",
                (payload_id, session_id, created_at),
            )

    def has_payload(self, payload_id: str, session_id: str) -> bool:
        """Whether a session has a payload."""
        query = "SELECT 1 FROM payloads WHERE id = ? AND session_id = ?"
        return self._one(query, (payload_id, session_id)) is not None

    def keeps_payload(self, payload_id: str) -> bool:
        """Whether a payload is not forgotten."""
        return self._one("SELECT 1 FROM payloads WHERE id = ?", (payload_id,)) is not None

    def take_payloads(self, *, before: float) -> list[str]:
        """Ids of payloads made before a time, which are forgotten."""
        with self.transaction():
            query = "SELECT id FROM payloads WHERE created_at < ?"
            found = [row[0] for row in self._connection.execute(query, (before,)).fetchall()]
            if found:
                self._connection.execute("DELETE FROM payloads WHERE created_at < ?", (before,))
        return found

    def _operations(self, condition: str, values: Sequence[Any]) -> list[Operation]:
        with self._lock:
            rows = self._connection.execute(
                f"SELECT {COLUMNS} FROM operations WHERE {condition} ORDER BY seq", values
            )
            return [_operation(row) for row in rows.fetchall()]

    def _one(self, query: str, values: Sequence[Any]) -> Any:
        with self._lock:
            return self._connection.execute(query, values).fetchone()


def _operation(row: Sequence[Any]) -> Operation:
    identity, session_id, seq, kind, status, error = row
    return Operation(
        id=identity,
        session_id=session_id,
        seq=seq,
        kind=kind,
        status=OperationStatus(status),
        error=None if error is None else json.loads(error),
    )
