"""A child process that stops a resource when its parent dies without having done so.

It waits on a pipe whose other end only the parent holds, so that the operating system tells it of
the parent's end, however that came. It is in a session of its own: neither Ctrl-C nor a closed
terminal reaches it, and it ignores the signals by which a whole machine is asked to stop, because
the parent is asked as well and closes properly. What the parent has closed in the ledger by then
needs nothing more.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tunebook.errors import TunebookError
from tunebook.resources.ledger import Entry, Ledger
from tunebook.resources.live import ServiceError, service_of
from tunebook.resources.orphans import SEARCH_S, stop_orphan
from tunebook.runs.attempts import utc_now
from tunebook.runs.files import append_text

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from tunebook.resources.watchdog import main; main(*sys.argv[2:])"
)
READY = b"watching\n"
CLOSING_S = 10.0
"""Seconds that a watchdog with nothing to do may take to end."""

_lifelines: set[int] = set()
"""Ends of pipes that tell a watchdog that this process lives."""
_left_behind: list[subprocess.Popen[bytes]] = []
"""Watchdogs that go on without us; kept, since a process object must not go before its process."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a watchdog tries, in seconds."""

    retry_s: float = 1.0
    """Before the second attempt; each further one waits twice as long."""
    max_retry_s: float = 60.0
    search_s: float = SEARCH_S
    """See `stop_orphan`."""
    give_up_s: float = 86_400.0
    """A resource that nobody uses has stopped by itself by then."""


PATIENCE = Patience()


@contextmanager
def watch(ledger: Ledger, key: str, *, patience: Patience = PATIENCE) -> Iterator[None]:
    """Has an entry of this process watched inside the block, in which it should be closed.

    An entry that is still open at the end of the block is left to the watchdog.

    Raises:
        ServiceError: the watchdog did not start, so nothing should be created.
    """
    theirs, ours = os.pipe()
    _lifelines.add(ours)
    try:
        child = _start(ledger, key, patience, theirs)
    except BaseException:
        _let_go(ours)
        ledger.closed(key, "not created: it could not be watched")
        raise
    finally:
        os.close(theirs)
    try:
        yield
    finally:
        ledger.disown(key)
        _let_go(ours)
        if ledger.entry(key).closed is None:
            _left_behind.append(child)
        else:
            child.wait()


def main(path: str, key: str, lifeline: str, patience: str) -> None:
    """The life of a watchdog.

    Args:
        path: file of the ledger.
        key: the entry.
        lifeline: number of the pipe's end that closes with the parent.
        patience: JSON of a `Patience`.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ledger = Ledger(Path(path))
    ledger.entry(key)
    os.write(sys.stdout.fileno(), READY)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    while os.read(int(lifeline), 1):
        pass
    try:
        _stop_with_patience(ledger, key, Patience(**json.loads(patience)))
    except BaseException as error:
        _log(ledger, key, f"the watchdog failed: {type(error).__name__}: {error}")
        raise


def _stop_with_patience(ledger: Ledger, key: str, patience: Patience) -> None:
    """Stops what the entry stands for unless somebody has closed it."""
    give_up_at = time.monotonic() + patience.give_up_s
    wait_s = patience.retry_s
    said = ""
    while (entry := ledger.entry(key)).closed is None:
        outcome, done = _attempt(ledger, entry, patience)
        if outcome != said:
            _log(ledger, key, outcome)
            said = outcome
        if done:
            return
        if time.monotonic() >= give_up_at:
            _log(ledger, key, "given up; `tunebook resources reap` tries again")
            return
        # Not all watchdogs of one moment ask again in the same one.
        time.sleep(wait_s * random.uniform(0.75, 1.0))
        wait_s = min(2 * wait_s, patience.max_retry_s)


def _attempt(ledger: Ledger, entry: Entry, patience: Patience) -> tuple[str, bool]:
    """What came of trying once to stop what is left, and whether that was all."""
    with ledger.owning(entry.key) as mine:
        if not mine:
            return "another process is at it", False
        try:
            service = service_of(entry.service, entry.base_url)
            return stop_orphan(ledger, entry, service, search_s=patience.search_s), True
        except TunebookError as error:
            return str(error), False
        except Exception as error:  # whatever it is, the resource may bill still
            return f"{type(error).__name__}: {error}", False


def _start(ledger: Ledger, key: str, patience: Patience, lifeline: int) -> subprocess.Popen[bytes]:
    """A watchdog that watches by now."""
    child = subprocess.Popen(
        [
            *(sys.executable, "-P", "-c", BOOT, json.dumps(sys.path)),
            *(str(ledger.path), key, str(lifeline), json.dumps(asdict(patience))),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(lifeline,),
        start_new_session=True,
    )
    assert child.stdout is not None and child.stderr is not None
    with child.stdout, child.stderr:
        if child.stdout.readline() != READY:
            reason = child.stderr.read().decode(errors="replace").strip()
            child.wait()
            raise ServiceError(
                "the process that stops the resource if this one is killed did not start, so "
                f"nothing was created: {reason.splitlines()[-1] if reason else child.returncode}"
            )
    return child


def _let_go(lifeline: int) -> None:
    """Closes our end of a pipe, unless a fork has closed it already."""
    if lifeline in _lifelines:
        _lifelines.discard(lifeline)
        os.close(lifeline)


def _let_go_of_all() -> None:
    for lifeline in list(_lifelines):
        _let_go(lifeline)


# A fork that outlives this process would keep the watchdogs waiting.
os.register_at_fork(after_in_child=_let_go_of_all)


def _log(ledger: Ledger, key: str, text: str) -> None:
    append_text(ledger.log_path, f"{utc_now()} {key} {text}\n")
