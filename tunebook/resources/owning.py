"""A resource that exists inside a `with` block, and nowhere after it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tunebook.errors import BackendError, TunebookError
from tunebook.resources.ledger import Ledger
from tunebook.resources.live import CreatingService, ReplyLost, ResourceService, ServiceError
from tunebook.resources.orphans import UndecidedError, find_created
from tunebook.resources.watchdog import PATIENCE, Patience, watch
from tunebook.runs.attempts import shielded

LOST_REPLY_WAITS_S = (1.0, 2.0, 4.0, 8.0)
"""Seconds after a create call without a reply until the service's list is asked what it did."""


@contextmanager
def owned_resource(
    ledger: Ledger,
    service: CreatingService,
    what: Mapping[str, Any],
    *,
    run: str | None,
    say: Callable[[str], None],
    price_per_hour: float | None = None,
    currency: str | None = None,
    patience: Patience = PATIENCE,
) -> Iterator[str]:
    """Id of a resource that is created for the block and stopped on every way out of it.

    It need not be ready yet. Should this process die, or the stop fail, then a watchdog stops it.

    Args:
        ledger: gets an entry before anything can exist.
        service: where it is created.
        what: its description.
        run: what it is for.
        say: told the id at once, and how it ended.
        price_per_hour: in `currency`, where known.
        currency: ISO 4217 code.
        patience: of the watchdog.

    Raises:
        ServiceError: it could not be created.
    """
    key = ledger.intend(service, what, run=run, price_per_hour=price_per_hour, currency=currency)
    with watch(ledger, key, patience=patience):
        resource_id, sent_again = _create(ledger, key, service, what)
        try:
            say(f"resource {resource_id} created")
            yield resource_id
        finally:
            with shielded():  # a second Ctrl-C waits for the stop
                _stop(ledger, key, service, resource_id, say)
                if sent_again:
                    _say_late(ledger, key, service, say)


def _create(
    ledger: Ledger, key: str, service: CreatingService, what: Mapping[str, Any]
) -> tuple[str, bool]:
    """Id of the created resource, recorded, and whether it took more than one create call.

    Where there can be none, the entry is closed.
    """
    sent_again = False
    try:
        resource_id = service.create(what).id
    except ReplyLost as error:
        resource_id, sent_again = _find_or_create(ledger, key, service, what, error)
    except ServiceError as error:
        ledger.closed(key, f"not created: {error}")
        raise
    ledger.created(key, resource_id)
    return resource_id, sent_again


def _find_or_create(
    ledger: Ledger,
    key: str,
    service: CreatingService,
    what: Mapping[str, Any],
    lost: BackendError,
) -> tuple[str, bool]:
    """Id of what a create call made whose reply was lost, else of what another one makes.

    And whether there was another one.

    A create call has no idempotency key: to send it again at once could make a second resource.
    """
    sent_again = False
    for wait_s in LOST_REPLY_WAITS_S:
        time.sleep(wait_s)
        try:
            found = find_created(ledger, ledger.entry(key), service)
            if found:
                return found, sent_again
            sent_again = True
            return service.create(what).id, sent_again
        except (ReplyLost, UndecidedError) as error:
            lost = error
    raise lost


def _say_late(
    ledger: Ledger, key: str, service: ResourceService, say: Callable[[str], None]
) -> None:
    """Says what may be of the first create call, which can take effect after it was looked for.

    It is not stopped: it may as well be of somebody else.
    """
    try:
        late = ledger.unclaimed(ledger.entry(key), service.list_live())
    except TunebookError as error:
        say(
            f"whether a create call without a reply has made another resource is not known: {error}"
        )
        return
    for resource in late:
        say(
            f"resource {resource.id} may be of a create call whose reply was lost, and bill; "
            f"`tunebook resources stop {resource.id}` stops it"
        )


def _stop(
    ledger: Ledger,
    key: str,
    service: ResourceService,
    resource_id: str,
    say: Callable[[str], None],
) -> None:
    """Stops the resource; a failure is told, and left to the watchdog, so as to hide no other."""
    try:
        service.stop(resource_id, force=True)
        ledger.closed(key, "stopped")
    except TunebookError as error:
        say(
            f"resource {resource_id} could not be stopped and may bill: {error} A process in the "
            "background goes on trying; `tunebook resources list` shows whether it is stopped."
        )
    else:
        say(f"resource {resource_id} stopped")
