"""A Loops run that exists inside a `with` block, and nowhere after it.

The run's own ID is known only when its trainer is ready, which may take an hour and may never come.
So its session ID is what the ledger gets first: by that the run is found again, whatever happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tunebook.backends.baseten.service import BasetenService
from tunebook.backends.remote.failures import RemoteError
from tunebook.errors import TunebookError
from tunebook.resources import Ledger, Patience, watch
from tunebook.resources.watchdog import PATIENCE
from tunebook.runs.attempts import shielded


@contextmanager
def owned_run(
    ledger: Ledger,
    service: BasetenService,
    what: Mapping[str, str],
    create: Callable[[], Any],
    *,
    run: str | None,
    say: Callable[[str], None],
    patience: Patience = PATIENCE,
) -> Iterator[Any]:
    """The training client of a run that is made for the block and deactivated on every way out.

    Should this process die, or the deactivation fail, then a watchdog deactivates it.

    Args:
        ledger: gets an entry before anything can exist.
        service: where it is made.
        what: `session_id`, the Loops session that it and nothing else is made in, and `base_model`.
        create: makes it; returns when it is ready.
        run: what it is for.
        say: told what becomes of it.
        patience: of the watchdog.
    """
    session_id = what["session_id"]
    key = ledger.intend(service, what, run=run)
    with watch(ledger, key, patience=patience):
        settled = False
        """No run of the session comes to be any more."""
        try:
            try:
                client = create()
                settled = True
            except RemoteError as error:
                settled = _is_refusal(error)
                raise
            ledger.created(key, client.run_id)
            say(f"run {client.run_id} of Loops session {session_id} is ready")
            yield client
        finally:
            with shielded():  # a second Ctrl-C waits for the deactivation
                _deactivate(ledger, key, service, session_id, say, settled=settled)


def _is_refusal(error: RemoteError) -> bool:
    """Whether the service answered, and will not act on the request later."""
    response = getattr(error.__cause__, "response", None)
    return response is not None and response.status_code < 500


def _deactivate(
    ledger: Ledger,
    key: str,
    service: BasetenService,
    session_id: str,
    say: Callable[[str], None],
    *,
    settled: bool,
) -> None:
    """Deactivates what a session has; a failure is told, and left to the watchdog."""
    try:
        found = service.runs_of(session_id)
        for run_id in found:
            service.stop(run_id, force=True)
            say(f"run {run_id} deactivated")
    except TunebookError as error:
        say(
            f"the run of session {session_id} could not be deactivated and may bill: {error} A "
            "process in the background goes on trying; `tunebook resources list` shows it."
        )
        return
    if found or settled:
        ledger.closed(key, "deactivated" if found else "no run is active")
    else:
        say(
            f"whether a run of session {session_id} still comes to be is not known; a process in "
            "the background looks for it"
        )
