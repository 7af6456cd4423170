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


_LISTENING: list[RunDir] = []
"""Runs that remember. Those of a sweep come and go in any order, each in a thread of its own."""


def notice(event: str, text: str, *, shown: bool = True, **fields: Any) -> None:
    """Shows a sentence and makes it an event of the runs that remember.

    Args:
        event: type of the event.
        text: the sentence.
        shown: False = only an event.
        fields: of the event. `session` names the session it is about, and so the run.
    """
    for run in tuple(_LISTENING):
        if run.record.id in fields.get("session", run.record.id):
            run.event(event, text=text, **fields)
    if shown:
        LOG.warning("%s", text)


class Notes:
    """Notices of other threads, said by the one that waits: a run is written by one thread."""

    def __init__(self) -> None:
        self._notes: deque[tuple[str, str, dict[str, Any]]] = deque()

    def add(self, event: str, text: str, **fields: Any) -> None:
        """As `notice`, later; from any thread."""
        self._notes.append((event, text, fields))

    def say(self) -> None:
        """Says what was added since."""
        while True:
            try:
                event, text, fields = self._notes.popleft()
            except IndexError:  # all are said; another thread may have said the last one
                return
            notice(event, text, **fields)


@contextmanager
def remembering(run: RunDir) -> Iterator[None]:
    """Makes what is noticed inside the block, but of other runs, events of the run."""
    _LISTENING.append(run)
    try:
        yield
    finally:
        _LISTENING.remove(run)
