"""What was created on a service and may bill: written down before it can exist.

One file a user, one JSON line an event: `intended` before a create call, `created` with the id,
`closed` when nothing bills any more. Whoever intends holds a lock that the operating system frees
when the process dies, so that an entry without an owner is known for one that was left behind.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tunebook.errors import RunError
from tunebook.models import tunebook_home
from tunebook.resources.live import LiveResource, ResourceService
from tunebook.runs.attempts import utc_now
from tunebook.runs.files import append_line, read_lines, sync_folder, writing


@dataclass(frozen=True, slots=True)
class Entry:
    """One resource, or the intent to create it."""

    key: str
    service: str
    base_url: str
    what: Mapping[str, Any]
    """The description that the create call sends."""
    known: frozenset[str]
    """Ids of the resources that were there before the create call."""
    run: str | None
    """The run that it is for, or another word for what creates it."""
    price_per_hour: float | None
    currency: str | None
    host: str
    pid: int
    intended_at: str
    resource_id: str | None = None
    """None = the create call has not returned, or never will."""
    found: bool = False
    """The id was found in the service's list, not returned by the create call."""
    closed: str | None = None
    """What became of it; None = it may bill."""

    @property
    def is_elsewhere(self) -> bool:
        """Whether another host made it, on which its owner may live."""
        return self.host != socket.gethostname()


class Ledger:
    """A ledger file; several processes and threads may use it at once."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._owned: dict[str, FileLock] = {}

    @classmethod
    def of_user(cls) -> Ledger:
        """The ledger in the user's `TUNEBOOK_HOME`."""
        return cls(tunebook_home() / "resources" / "ledger.jsonl")

    @property
    def log_path(self) -> Path:
        """Where watchdogs say what they did."""
        return self.path.with_name("watchdog.log")

    def intend(
        self,
        service: ResourceService,
        what: Mapping[str, Any],
        *,
        run: str | None,
        price_per_hour: float | None = None,
        currency: str | None = None,
    ) -> str:
        """Key of a new entry that is on the disk, and that this process owns until it is closed.

        Args:
            service: asked what is there already.
            what: the description that the create call is going to send.
            run: what the resource is for.
            price_per_hour: in `currency`, where known.
            currency: ISO 4217 code.

        Raises:
            ServiceError: the service cannot be asked.
            StorageError: the entry cannot be written.
        """
        known = sorted(resource.id for resource in service.list_live())
        key = secrets.token_hex(6)
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            assert self._own(key)
        self._append(
            {
                "type": "intended",
                "key": key,
                "service": service.name,
                "base_url": service.base_url,
                "what": what,
                "known": known,
                "run": run,
                "price_per_hour": price_per_hour,
                "currency": currency,
                "host": socket.gethostname(),
                "pid": os.getpid(),
            }
        )
        with writing(self.path):
            sync_folder(self.path.parent)
        return key

    def created(self, key: str, resource_id: str, *, found: bool = False) -> None:
        """Records the id of an entry, on the disk when this returns."""
        self._append({"type": "created", "key": key, "id": resource_id, "found": found})

    def closed(self, key: str, how: str) -> None:
        """Records that nothing of an entry bills any more; a closed entry stays as it is."""
        if self.entry(key).closed is None:
            self._append({"type": "closed", "key": key, "how": how})
        self.disown(key)
        self._lock_path(key).unlink(missing_ok=True)

    def disown(self, key: str) -> None:
        """Leaves an entry to its watchdog, or to `tunebook resources reap`."""
        lock = self._owned.pop(key, None)
        if lock is not None:
            lock.release()

    def entry(self, key: str) -> Entry:
        """The entry of a key.

        Raises:
            RunError: the file is damaged, or the entry is no longer in it.
        """
        try:
            return self._by_key()[key]
        except KeyError:
            raise RunError(
                f"{self.path}: there is no entry {key}; was the file deleted? What it was about "
                "may bill: look with `tunebook resources list`."
            ) from None

    def entries(self) -> list[Entry]:
        """All entries, oldest first.

        Raises:
            RunError: the file is damaged.
        """
        return list(self._by_key().values())

    def open_entries(self) -> list[Entry]:
        """The entries that may bill, oldest first."""
        return [entry for entry in self.entries() if entry.closed is None]

    def has_owner(self, key: str) -> bool:
        """Whether a process lives that owns an entry, or that is stopping what it left."""
        with self.owning(key) as free:
            return not free

    @contextmanager
    def owning(self, key: str) -> Iterator[bool]:
        """Owns an entry inside the block; gives False, and does not, where another process does."""
        mine = self._own(key)
        try:
            yield mine
        finally:
            if mine:
                self.disown(key)

    def unclaimed(self, entry: Entry, live: Sequence[LiveResource]) -> list[LiveResource]:
        """The live resources that the create call of an entry without an id can have made."""
        claimed = {other.resource_id for other in self.entries() if is_beside(other, entry)}
        return [
            resource
            for resource in live
            if resource.id not in entry.known | claimed and resource.agrees_with(entry.what)
        ]

    def _own(self, key: str) -> bool:
        if key in self._owned:
            return False
        lock = FileLock(self._lock_path(key), thread_local=False)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return False
        self._owned[key] = lock
        return True

    def _lock_path(self, key: str) -> Path:
        return self.path.with_name(f"{key}.lock")

    def _append(self, event: dict[str, Any]) -> None:
        with writing(self.path), FileLock(f"{self.path}.lock", thread_local=False):
            append_line(self.path, {**event, "at": utc_now()}, sync=True)

    def _by_key(self) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        for event in read_lines(self.path):
            key = event["key"]
            if event["type"] == "intended":
                entries[key] = _intended(event)
            elif event["type"] == "created":
                entries[key] = replace(
                    entries[key], resource_id=event["id"], found=bool(event["found"])
                )
            else:
                how = entries[key].closed or event["how"]
                entries[key] = replace(entries[key], closed=how)
        return entries


def is_beside(entry: Entry, other: Entry) -> bool:
    """Whether two entries are of the same service at the same address."""
    return (entry.service, entry.base_url) == (other.service, other.base_url)


def _intended(event: Mapping[str, Any]) -> Entry:
    return Entry(
        key=event["key"],
        service=event["service"],
        base_url=event["base_url"],
        what=event["what"],
        known=frozenset(event["known"]),
        run=event["run"],
        price_per_hour=event["price_per_hour"],
        currency=event["currency"],
        host=event["host"],
        pid=event["pid"],
        intended_at=event["at"],
    )
