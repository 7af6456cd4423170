"""A resource of a block: there at most once, and gone on every way out."""

import json

import pytest

from tests.resources.conftest import logged, watchdogs
from tests.resources.owner import PATIENCE, WHAT
from tests.resources.server import until
from tunebook.resources import ReplyLost, ServiceError, owned_resource, owning, watchdog
from tunebook.resources.orphans import UndecidedError


@pytest.fixture
def own(ledger, service, monkeypatch):
    """Owns a resource, with little patience."""
    monkeypatch.setattr(owning, "LOST_REPLY_WAITS_S", (0.01, 0.02))
    said = []

    def start(what=WHAT):
        return owned_resource(
            ledger, service, what, run="runs/a", say=said.append, patience=PATIENCE
        )

    start.said = said
    return start


def test_it_is_stopped_once_and_nobody_watches_any_more(own, ledger, server, home):
    """Case 111."""

    def intended(body):
        event = json.loads(ledger.path.read_text().splitlines()[-1])
        assert (event["type"], event["what"]) == ("intended", WHAT)
        assert len(watchdogs(home)) == 1

    server.on_create = intended
    with own() as resource_id:
        assert server.live() == [resource_id]
        assert ledger.open_entries()[0].resource_id == resource_id
    assert server.stops() == [(resource_id, "force=true")]
    assert ledger.open_entries() == []
    assert watchdogs(home) == []
    assert own.said == [f"resource {resource_id} created", f"resource {resource_id} stopped"]


def test_an_error_in_the_block_is_what_comes_out(own, server, ledger):
    with pytest.raises(ZeroDivisionError), own():
        raise ZeroDivisionError
    assert len(server.stops()) == 1
    assert ledger.open_entries() == []


def test_what_was_stopped_already_is_no_error(own, server, service, ledger):
    with own() as resource_id:
        service.stop(resource_id, force=True)
    assert ledger.open_entries() == []
    with own() as resource_id:
        del server.resources[resource_id]
    assert ledger.open_entries() == []


def test_a_stop_that_fails_is_said_hides_nothing_and_is_tried_on(own, server, ledger, home):
    server.failing_stops = 2
    with pytest.raises(ZeroDivisionError), own() as resource_id:
        raise ZeroDivisionError
    assert "could not be stopped and may bill" in own.said[-1]
    until(lambda: not watchdogs(home))
    assert server.stops() == [(resource_id, "force=true")] * 3
    assert ledger.open_entries() == []
    assert "down for maintenance" in logged(ledger)


def test_a_ledger_that_cannot_be_written_any_more_hides_nothing(own, server, ledger):
    with pytest.raises(ZeroDivisionError), own():
        lock = ledger.path.with_name("ledger.jsonl.lock")
        lock.unlink()
        lock.mkdir()
        raise ZeroDivisionError
    assert server.live() == []
    assert "could not be stopped" in own.said[-1]
    lock.rmdir()
    until(lambda: not ledger.open_entries())  # by the watchdog


def test_a_refused_create_call_leaves_no_entry(own, server, ledger):
    server.refusal = (402, "no credit")
    with pytest.raises(ServiceError, match="no credit"), own():
        pass
    (entry,) = ledger.entries()
    assert entry.closed.startswith("not created: ")
    assert server.creates() == 1


def test_a_lost_reply_does_not_make_a_second_resource(own, server, ledger):
    server.lose_replies = 1
    with own() as resource_id:
        assert server.live() == [resource_id]
    assert server.creates() == 1
    assert server.live() == []


def test_a_lost_request_is_sent_again(own, server):
    server.lose_requests = 1
    with own() as resource_id:
        assert server.live() == [resource_id]
    assert server.creates() == 2


def test_a_lost_request_that_takes_effect_late_is_said(own, server, ledger):
    """It may be somebody else's as well, so it is not stopped."""
    server.lose_requests = 1
    with own() as resource_id:
        late = server.add(WHAT)
    assert f"resource {late} may be of a create call" in own.said[-1]
    assert server.live() == [late] and server.stops() == [(resource_id, "force=true")]
    assert ledger.open_entries() == []


def test_replies_that_stay_lost_end_it(own, server, ledger):
    server.lose_requests = 99
    with pytest.raises(ReplyLost), own():
        pass
    assert server.creates() == 3
    until(lambda: not ledger.open_entries())  # the watchdog looks for a while
    assert ledger.entries()[0].closed == "nothing was created"


def test_somebody_elses_resource_of_the_same_kind_is_not_taken(own, server, ledger):
    """One that another machine creates in the very moment a reply is lost fits as well."""
    server.on_create = lambda body: server.add(body)
    server.lose_replies = 1
    with pytest.raises(UndecidedError, match="2 resources fit"), own():
        pass
    assert server.stops() == []
    assert server.creates() == 1
    ledger.closed(ledger.open_entries()[0].key, "by the test")


def test_nothing_is_created_without_a_watchdog(own, server, ledger, monkeypatch):
    monkeypatch.setattr(watchdog, "BOOT", "raise SystemExit('no module of that name')")
    with pytest.raises(ServiceError, match=r"nothing was created: no module of that name"), own():
        pass
    assert server.creates() == 0
    assert ledger.open_entries() == []


def test_rate_limits_are_waited_for(own, server, monkeypatch):
    slept = []
    monkeypatch.setattr("tunebook.backends.together.service.time.sleep", slept.append)
    server.rate_limits = [{"retry-after": "20"}, {"retry-after-ms": "250"}, {"retry-after": "soon"}]
    with own():
        pass
    assert 20 <= slept[0] <= 22
    assert 0.25 <= slept[1] <= 0.275
    assert 1 <= slept[2] <= 10
    assert server.creates() == 4
    assert len(server.resources) == 1


def test_a_rate_limit_that_lasts_ends_it(own, server, ledger):
    server.rate_limits = [{"retry-after": "3600"}]
    with pytest.raises(ServiceError, match="429"), own():
        pass
    assert ledger.open_entries() == []
