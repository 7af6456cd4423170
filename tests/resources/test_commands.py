"""`tunebook resources`: what it lists, stops, and leaves alone."""

import json
import os
import signal
import sys

import pytest
from typer.testing import CliRunner

from tests.resources.conftest import KEY, heard, kill, watchdogs
from tests.resources.owner import WHAT
from tunebook.backends.remote import address
from tunebook.cli import app
from tunebook.errors import ConfigError


def call(*arguments, stdin=None):
    done = CliRunner().invoke(app, ["resources", *arguments], input=stdin)
    if isinstance(done.exception, ConfigError):
        raise done.exception
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert KEY not in done.output
    return done


def listed():
    done = call("list", "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture
def left(ledger, service, server):
    """Makes entries as a process does that dies with its watchdog."""

    def leave(*, created=True, state="READY", **body):
        key = ledger.intend(
            service, {**WHAT, **body}, run="runs/a", price_per_hour=4.5, currency="USD"
        )
        resource_id = server.add({**WHAT, **body}, state=state)
        if created:
            ledger.created(key, resource_id)
        ledger.disown(key)
        return resource_id

    return leave


def test_nothing_bills(service):
    assert call("list").output == "Nothing bills.\n"
    assert call("reap").output == "Nothing in the ledger may bill.\n"
    assert call("stop", "--all").output == "Nothing in the ledger may bill.\n"


def test_the_list_joins_the_ledger_with_the_service(left, server):
    mine, queued, gone = left(), left(state="PENDING"), left(state="STOPPED")
    foreign = server.add()
    server.add(created_by="somebody else")
    rows = {row["id"]: row for row in listed()}
    assert {id: row["state"] for id, row in rows.items()} == {
        mine: "READY",
        queued: "PENDING",
        gone: "not live",
        foreign: "READY",
    }
    assert rows[queued]["queue_position"] == 3
    assert rows[mine]["owner"] == "its process is dead"
    assert (rows[mine]["price_per_hour"], rows[mine]["currency"]) == (4.5, "USD")
    assert (rows[foreign]["owner"], rows[foreign]["key"]) == ("not in the ledger", None)
    table = call("list").output
    assert "4.50 USD" in table and foreign in table and "runs/a" in table


def test_a_service_that_cannot_be_asked_is_said(left, server, monkeypatch):
    resource_id = left()
    monkeypatch.setattr(server, "answer", lambda *request: (500, {}))
    done = call("list")
    assert done.exit_code == 1
    assert f"{resource_id}      unknown" in done.stdout
    assert "Error code: 500" in done.stderr


def test_a_missing_key_is_said(left, monkeypatch):
    left()
    monkeypatch.delenv("TOGETHER_API_KEY")
    monkeypatch.setattr(address, "LOOPBACK", ())
    done = call("list")
    assert done.exit_code == 1
    assert "TOGETHER_API_KEY is not set" in done.stderr


def test_a_missing_package_is_said(left, monkeypatch):
    left()
    monkeypatch.setitem(sys.modules, "together", None)
    for done in (call("list"), call("reap")):
        assert done.exit_code == 1
        assert "pip install 'tunebook[together]'" in done.stderr


def test_reap_stops_each_once_and_nothing_else(left, server, ledger, owner, service):
    dead, unknown = left(), left(created=False, base_model="other")
    attached = server.add()
    alive = heard(owner(), "training")
    done = call("reap")
    assert done.exit_code == 0
    assert f"{alive}: left alone: process " in done.output
    assert server.stops() == [(dead, "force=true"), (unknown, "")]
    assert set(server.live()) == {attached, alive}
    assert [entry.resource_id for entry in ledger.open_entries()] == [alive]
    call("reap")
    assert len(server.stops()) == 2


def test_reap_after_a_kill_of_owner_and_watchdog(owner, server, ledger, home):
    process = owner()
    resource_id = heard(process, "training")
    for dog in watchdogs(home):
        os.kill(dog, signal.SIGKILL)
    kill(process)
    assert f"{resource_id} stopped" in call("reap").output
    assert ledger.open_entries() == []


def test_a_failing_reap_says_so_and_leaves_the_entry(left, server, ledger):
    first, second = left(), left()
    server.failing_stops = 1
    done = call("reap")
    assert done.exit_code == 1
    assert f"{first}: may bill still: " in done.stderr
    assert f"{second}: {second} stopped" in done.stdout
    assert [entry.resource_id for entry in ledger.open_entries()] == [first]
    assert call("reap").exit_code == 0
    assert server.live() == []


def test_reap_waits_for_a_create_call_that_was_cut_short(left, server, ledger):
    server.resources.pop(left(created=False))
    done = call("reap")
    assert done.exit_code == 1
    assert "may still take effect" in done.stderr
    assert len(ledger.open_entries()) == 1


def test_reap_leaves_other_hosts_alone(left, server, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: "elsewhere")
        resource_id = left()
    done = call("reap")
    assert f"{resource_id}: left alone: made on elsewhere; reap there" in done.output
    assert server.stops() == []
    assert call("stop", resource_id, "--yes").exit_code == 0
    assert server.live() == []


def test_stop_asks_first(left, server, ledger):
    resource_id = left()
    assert call("stop", resource_id, stdin="n\n").exit_code == 1
    assert server.stops() == []
    assert call("stop", resource_id, stdin="y\n").exit_code == 0
    assert ledger.entries()[0].closed == "stopped by hand"
    assert server.live() == []


def test_stop_with_active_sessions_wants_force(left, server, ledger):
    resource_id = left()
    server.in_use.add(resource_id)
    done = call("stop", resource_id, "--yes")
    assert done.exit_code == 1
    assert "sessions are active" in done.stderr and "--force" in done.stderr
    assert len(ledger.open_entries()) == 1
    assert call("stop", resource_id, "--yes", "--force").exit_code == 0
    assert server.live() == []


def test_stop_all_is_all_of_the_ledger(left, server, ledger):
    left(), left()
    foreign = server.add()
    assert call("stop", "--all", "--yes").exit_code == 0
    assert server.live() == [foreign]
    assert ledger.open_entries() == []
    assert call("stop", foreign, "--yes").exit_code == 0
    assert server.live() == []


def test_a_running_owner_whose_resource_is_stopped_by_hand_ends_well(owner, server, ledger, home):
    process = owner()
    resource_id = heard(process, "training")
    assert call("stop", "--all", "--yes").exit_code == 0
    process.terminate()
    assert process.wait(30) == 143
    assert ledger.entries()[0].closed == "stopped by hand"
    assert server.state(resource_id) == "STOPPED"


def test_forget_asks_no_service(left, server, ledger, monkeypatch):
    resource_id = left()
    monkeypatch.setattr(server, "answer", lambda *request: (500, {}))
    assert call("stop", resource_id, "--forget", "--yes").exit_code == 0
    assert ledger.entries()[0].closed == "forgotten by hand"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name resources, or --all"),
        (("mr-1", "--all"), "name resources, or --all"),
        (("mr-7", "--yes"), "mr-7 is not among the resources that may bill: none"),
    ],
)
def test_what_is_not_there(service, arguments, message):
    with pytest.raises(ConfigError, match=message):
        call("stop", *arguments)
