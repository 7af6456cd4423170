"""What a person should see while something runs, and the run should remember.

It goes to the logger `tunebook` as a warning, so that it shows without any set-up, also in a
notebook; inside `remembering` it becomes an event of the run too.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

LOG = logging.getLogger("tunebook")


class Record(Protocol):
    """The run that remembers."""

    def event(self, type: str, **fields: Any) -> None:
        """Appends an event."""
        ...


def notice(event: str, text: str, **fields: Any) -> None:
    """Shows a sentence and makes it an event of the runs that remember.

    Args:
        event: type of the event.
        text: the sentence.
        fields: of the event.
    """
    LOG.warning("%s", text, extra={"notice": (event, fields)})


class Notes:
    """Notices of other threads, said by the one that waits: a run is written by one thread."""

    def __init__(self) -> None:
        self._notes: deque[tuple[str, str, dict[str, Any]]] = deque()

    def add(self, event: str, text: str, **fields: Any) -> None:
        """As `notice`, later; from any thread."""
        self._notes.append((event, text, fields))

    def say(self) -> None:
        """Says what was added since."""
        while self._notes:
            event, text, fields = self._notes.popleft()
            notice(event, text, **fields)


@contextmanager
def remembering(run: Record) -> Iterator[None]:
    """Makes what is noticed inside the block events of the run."""
    handler = _Remember(run)
    LOG.addHandler(handler)
    # Python shows warnings by itself only where there is no handler at all.
    shown = None if _has_other_handlers(handler) else logging.lastResort
    if shown is not None:
        LOG.addHandler(shown)
    try:
        yield
    finally:
        LOG.removeHandler(handler)
        if shown is not None:
            LOG.removeHandler(shown)


def _has_other_handlers(ours: logging.Handler) -> bool:
    return logging.getLogger().hasHandlers() or any(each is not ours for each in LOG.handlers)


class _Remember(logging.Handler):
    def __init__(self, run: Record) -> None:
        super().__init__()
        self._run = run

    def emit(self, record: logging.LogRecord) -> None:
        found = getattr(record, "notice", None)
        if found is not None:
            event, fields = found
            self._run.event(event, text=record.getMessage(), **fields)
