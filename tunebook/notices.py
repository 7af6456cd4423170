"""What a person should see while something runs, and the run should remember.

It goes to the logger `tunebook` as a warning, so that it shows without any set-up, also in a
notebook; inside `remembering` it becomes an event of the run too.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tunebook.runs import RunDir

LOG = logging.getLogger("tunebook")


def notice(event: str, text: str, *, shown: bool = True, **fields: Any) -> None:
    """Shows a sentence and makes it an event of the runs that remember.

    Args:
        event: type of the event.
        text: the sentence.
        shown: False = only an event.
        fields: of the event. `session` names the session it is about, and so the run.
    """
    level = logging.WARNING if shown else logging.INFO
    LOG.log(level, "%s", text, extra={"notice": (event, fields)})


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
def remembering(run: RunDir) -> Iterator[None]:
    """Makes what is noticed inside the block, but of other runs, events of the run."""
    handlers: list[logging.Handler] = [_Remember(run)]
    if logging.lastResort is not None and not LOG.hasHandlers():
        # Python shows warnings by itself only where there is no handler at all.
        handlers.append(logging.lastResort)
    level = LOG.level
    if LOG.getEffectiveLevel() > logging.INFO:
        LOG.setLevel(logging.INFO)
    for handler in handlers:
        LOG.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            LOG.removeHandler(handler)
        LOG.setLevel(level)


class _Remember(logging.Handler):
    def __init__(self, run: RunDir) -> None:
        super().__init__(logging.INFO)
        self._run = run

    def emit(self, record: logging.LogRecord) -> None:
        event, fields = getattr(record, "notice", (None, {}))
        if event is not None and self._run.record.id in fields.get("session", self._run.record.id):
            self._run.event(event, text=record.getMessage(), **fields)
