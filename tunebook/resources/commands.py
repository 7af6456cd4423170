"""What `tunebook resources` does: lists, stops, and stops what dead processes left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tunebook.errors import ConfigError, TunebookError
from tunebook.resources.ledger import Entry, Ledger
from tunebook.resources.live import (
    LiveResource,
    ResourceService,
    service_of,
    services_of_environment,
)
from tunebook.resources.orphans import stop_orphan

UNKNOWN = "unknown"
NOT_LIVE = "not live"
NOT_OURS = "not in the ledger"


@dataclass(frozen=True, slots=True)
class Shown:
    """A resource that may bill: of the ledger, of the service's list, or of both."""

    key: str | None
    """Its entry in the ledger; None = made by something else, or on another machine."""
    id: str | None
    service: str
    base_url: str
    state: str
    """The service's word for it; `unknown` where the service cannot be asked, `not live` where it
    does not list it, so that it does not bill."""
    queue_position: int | None
    expires_at: str | None
    price_per_hour: float | None
    currency: str | None
    run: str | None
    since: str | None
    owner: str
    session_id: str | None = None
    """The service's own session that it is made in, which is known before its id; None = none."""

    @property
    def name(self) -> str:
        """What `tunebook resources stop` takes."""
        name = self.id or self.key
        assert name is not None
        return name


@dataclass(frozen=True, slots=True)
class Listing:
    """All that may bill, and the services that could not be asked."""

    shown: list[Shown]
    problems: list[str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one resource."""

    name: str
    text: str
    failed: bool = False


def list_resources(ledger: Ledger) -> Listing:
    """The open entries of the ledger, joined with what the services say is there."""
    entries = ledger.open_entries()
    live: dict[tuple[str, str], list[LiveResource]] = {}
    problems: list[str] = []
    for name, base_url in _places(entries):
        try:
            live[name, base_url] = service_of(name, base_url).list_live()
        except TunebookError as error:
            problems.append(str(error))
    shown = [
        _of_entry(entry, live.get((entry.service, entry.base_url)), _owner_text(ledger, entry))
        for entry in entries
    ]
    known = {(one.service, one.base_url, one.id) for one in shown}
    for (name, base_url), resources in live.items():
        shown += [
            _of_service(name, base_url, resource)
            for resource in resources
            if (name, base_url, resource.id) not in known
        ]
    return Listing(shown, problems)


def price_text(one: Shown) -> str:
    """The price of an hour with its currency, where known."""
    if one.price_per_hour is None:
        return ""
    return f"{one.price_per_hour:.2f} {one.currency or ''}".strip()


def choose(listing: Listing, names: Sequence[str]) -> list[Shown]:
    """The listed resources of these ids, keys or sessions.

    Raises:
        ConfigError: one of them is not listed.
    """
    by_name = {
        name: one for one in listing.shown for name in (one.id, one.key, one.session_id) if name
    }
    unknown = [name for name in names if name not in by_name]
    if unknown:
        known = ", ".join(one.name for one in listing.shown) or "none"
        problems = "".join(f"\n{problem}" for problem in listing.problems)
        raise ConfigError(
            f"resources stop: {', '.join(unknown)} is not among the resources that may bill: "
            f"{known}{problems}"
        )
    return list({by_name[name].name: by_name[name] for name in names}.values())


def stop_resources(ledger: Ledger, chosen: Sequence[Shown], *, force: bool) -> Iterator[Outcome]:
    """Stops resources one after the other and closes their entries.

    Args:
        ledger: holds the entries.
        chosen: of a listing.
        force: stop them with whatever sessions are active on them.
    """
    for one in chosen:
        try:
            yield Outcome(one.name, _stop(ledger, one, force=force))
        except TunebookError as error:
            yield Outcome(one.name, f"may bill still: {error}", failed=True)


def forget_resources(ledger: Ledger, chosen: Sequence[Shown]) -> Iterator[Outcome]:
    """Closes entries without asking a service, for one that is gone for good."""
    for one in chosen:
        if one.key is None:
            yield Outcome(one.name, "is not in the ledger", failed=True)
        else:
            ledger.closed(one.key, "forgotten by hand")
            yield Outcome(one.name, "forgotten")


def reap_resources(ledger: Ledger) -> Iterator[Outcome]:
    """Stops what is in the ledger, was made on this host, and has no living owner.

    What a person attached a run to is in no ledger, and is never touched.
    """
    for entry in ledger.open_entries():
        name = entry.resource_id or entry.key
        if entry.is_elsewhere:
            yield Outcome(
                name,
                f"left alone: {_owner_text(ledger, entry)}; reap there, or "
                f"`tunebook resources stop {name}`",
            )
            continue
        with ledger.owning(entry.key) as mine:
            if not mine:
                yield Outcome(name, f"left alone: {_owner_text(ledger, entry)}")
                continue
            entry = ledger.entry(entry.key)
            if entry.closed is not None:
                continue
            try:
                yield Outcome(name, stop_orphan(ledger, entry, _service(entry)))
            except TunebookError as error:
                yield Outcome(name, f"may bill still: {error}", failed=True)


def _stop(ledger: Ledger, one: Shown, *, force: bool) -> str:
    if one.id is not None:
        service_of(one.service, one.base_url).stop(one.id, force=force)
        if one.key is not None:
            ledger.closed(one.key, "stopped by hand")
        return "stopped"
    assert one.key is not None
    with ledger.owning(one.key) as mine:
        if not mine:
            raise ConfigError("its process is creating it right now; stop that")
        entry = ledger.entry(one.key)
        return stop_orphan(ledger, entry, _service(entry))


def _places(entries: Sequence[Entry]) -> list[tuple[str, str]]:
    """Names and addresses of the services to ask: of the entries, and of the environment."""
    places = {(entry.service, entry.base_url): None for entry in entries}
    return list(places | dict.fromkeys(services_of_environment()))


def _service(entry: Entry) -> ResourceService:
    return service_of(entry.service, entry.base_url)


def _owner_text(ledger: Ledger, entry: Entry) -> str:
    if entry.is_elsewhere:
        return f"made on {entry.host}"
    if ledger.has_owner(entry.key):
        return f"process {entry.pid}, or its watchdog, is alive"
    return "its process is dead"


def _of_entry(entry: Entry, live: Sequence[LiveResource] | None, owner: str) -> Shown:
    resource = next((one for one in live or () if _is_of(entry, one)), None)
    state = UNKNOWN if live is None or entry.resource_id is None else NOT_LIVE
    return Shown(
        key=entry.key,
        id=resource.id if resource else entry.resource_id,
        service=entry.service,
        base_url=entry.base_url,
        state=resource.state if resource else state,
        queue_position=resource.queue_position if resource else None,
        expires_at=resource.expires_at if resource else None,
        price_per_hour=entry.price_per_hour,
        currency=entry.currency,
        run=entry.run,
        since=entry.intended_at,
        owner=owner,
        session_id=entry.what.get("session_id"),
    )


def _is_of(entry: Entry, resource: LiveResource) -> bool:
    """Whether a resource is an entry's, by its id or by a session that nothing else is made in."""
    session_id = entry.what.get("session_id")
    in_session = session_id is not None and resource.what.get("session_id") == session_id
    return resource.id == entry.resource_id or in_session


def _of_service(name: str, base_url: str, resource: LiveResource) -> Shown:
    return Shown(
        key=None,
        id=resource.id,
        service=name,
        base_url=base_url,
        state=resource.state,
        queue_position=resource.queue_position,
        expires_at=resource.expires_at,
        price_per_hour=None,
        currency=None,
        run=None,
        since=resource.created_at,
        owner=NOT_OURS,
        session_id=resource.what.get("session_id"),
    )
