"""Stops what a process left behind that died, or that could not stop it itself."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from tunebook.errors import BackendError
from tunebook.resources.ledger import Entry, Ledger, is_beside
from tunebook.resources.live import ResourceService

SEARCH_S = 600.0
"""Seconds after an intent in which a create call that was cut short may still take effect."""


class UndecidedError(BackendError):
    """An intent of which it is not known (yet) whether it became a resource, and which."""

    code = "undecided"
    category = "service"


def stop_orphan(
    ledger: Ledger, entry: Entry, service: ResourceService, *, search_s: float = SEARCH_S
) -> str:
    """What was done about an open entry whose owner is dead; it is closed then.

    The caller owns the entry. Where the create call never returned, the resource is the one in the
    service's list that was not there before, fits the description and is of no other entry. Such a
    find is stopped only while no session is active on it, since its maker cannot have opened one.

    Args:
        ledger: holds the entry.
        entry: as it is in the ledger now.
        service: the one of the entry.
        search_s: seconds after the intent from which on no resource means that there is none.

    Raises:
        ServiceError: it could not be stopped, and the entry stays open.
        UndecidedError: it is not known what to stop, and the entry stays open.
    """
    resource_id, found = entry.resource_id, entry.found
    if resource_id is None:
        resource_id, found = find_created(ledger, entry, service), True
        if resource_id is None:
            waited_s = _seconds_since(entry.intended_at)
            if waited_s < search_s:
                raise UndecidedError(
                    f"no resource of this description is there yet; a create call that was cut "
                    f"short {waited_s:.0f} s ago may still take effect. Try again in "
                    f"{search_s - waited_s:.0f} s."
                )
            ledger.closed(entry.key, "nothing was created")
            return "nothing was created"
        ledger.created(entry.key, resource_id, found=True)
    service.stop(resource_id, force=not found)
    ledger.closed(entry.key, "stopped after its process had died")
    return f"{resource_id} stopped"


def find_created(ledger: Ledger, entry: Entry, service: ResourceService) -> str | None:
    """Id of the resource that a create call without a reply made; None = there is none (yet).

    Several that fit are ours only if as many entries of dead processes are looking for theirs.
    """
    fitting = ledger.unclaimed(entry, service.list_live())
    if not fitting:
        return None
    looking = [
        other
        for other in ledger.open_entries()
        if other.resource_id is None and is_beside(other, entry) and _same(other.what, entry.what)
    ]
    if any(ledger.has_owner(other.key) for other in looking if other.key != entry.key):
        raise UndecidedError(
            "another process is creating a resource of the same description, so it is not known "
            "yet whose is there. Try again in a minute."
        )
    if len(fitting) > len(looking):
        ids = ", ".join(resource.id for resource in fitting)
        raise UndecidedError(
            f"{len(fitting)} resources fit the description, and it is not known which was left "
            f"behind: {ids}. Stop what is yours with `tunebook resources stop ID`."
        )
    return fitting[0].id


def _same(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    return dict(left) == dict(right)


def _seconds_since(moment: str) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()
