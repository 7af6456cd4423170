"""The ledger file: on the disk in time, whole after a kill, shared between processes."""

import os
import signal
import subprocess
import sys

import pytest

from tunebook.backends.together import service as together
from tunebook.errors import ConfigError, RunError
from tunebook.resources import Ledger, ServiceError, service_of

WHAT = {"base_model": "tiny", "lora_enabled": True}


def intend(ledger, service, **changes):
    return ledger.intend(service, WHAT, **{"run": "runs/a", **changes})


def test_an_intent_is_owned_until_it_is_closed(ledger, service, server):
    there = server.add()
    key = intend(ledger, service, price_per_hour=4.5, currency="USD")
    (entry,) = ledger.open_entries()
    assert (entry.key, entry.resource_id, entry.known) == (key, None, frozenset({there}))
    assert (entry.what, entry.price_per_hour, entry.run) == (WHAT, 4.5, "runs/a")
    assert Ledger(ledger.path).has_owner(key)
    ledger.created(key, "mr-9")
    assert ledger.entry(key).resource_id == "mr-9"
    ledger.closed(key, "stopped")
    ledger.closed(key, "stopped again")
    assert ledger.open_entries() == []
    assert ledger.entry(key).closed == "stopped"
    assert not list(ledger.path.parent.glob(f"{key}*"))


def test_no_intent_without_the_service(ledger, home, monkeypatch):
    monkeypatch.setattr(together, "MAX_RETRIES", 0)
    with pytest.raises(ServiceError, match=r"http://127.0.0.1:9 cannot be reached"):
        intend(ledger, service_of("together", "http://127.0.0.1:9"))
    assert ledger.entries() == []


def test_a_torn_line_is_ignored_and_removed(ledger, service):
    first = intend(ledger, service)
    with ledger.path.open("ab") as file:
        file.write(b'{"type": "created", "key": "' + first.encode())
    second = intend(ledger, service)
    assert [entry.key for entry in ledger.open_entries()] == [first, second]
    assert ledger.entry(first).resource_id is None


def test_a_damaged_line_is_an_error_that_names_it(ledger, service):
    intend(ledger, service)
    with ledger.path.open("ab") as file:
        file.write(b"oops\n")
    with pytest.raises(RunError, match=r"ledger\.jsonl:2"):
        ledger.entries()


def test_processes_append_at_once(ledger, service):
    key = intend(ledger, service)
    script = (
        "import sys; from pathlib import Path; from tunebook.resources import Ledger\n"
        "for i in range(40): Ledger(Path(sys.argv[1])).created(sys.argv[2], f'{sys.argv[3]}-{i}')"
    )
    arguments = [sys.executable, "-c", script, str(ledger.path), key]
    processes = [subprocess.Popen([*arguments, str(number)]) for number in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    ids = {line.split('"id": "')[1].split('"')[0] for line in lines(ledger)[1:]}
    assert ids == {f"{number}-{i}" for number in range(3) for i in range(40)}


def lines(ledger):
    return ledger.path.read_text().splitlines()


def test_a_fork_that_lives_on_owns_nothing(ledger, service):
    """The lock must not be held by what a dead process had forked."""
    key = intend(ledger, service)
    child = os.fork()
    if not child:
        signal.pause()
    try:
        ledger.disown(key)
        assert not ledger.has_owner(key)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize(
    "url", ["api.together.ai", "ftp://host", "https://me:secret@host", "https://secret@host"]
)
def test_an_address_that_is_none(home, url):
    with pytest.raises(ConfigError, match=r"backend\.base_url=") as caught:
        service_of("together", url)
    assert "secret" not in str(caught.value)


def test_only_a_server_on_this_machine_needs_no_key(home, monkeypatch):
    monkeypatch.delenv("TOGETHER_API_KEY")
    service_of("together", "http://localhost:8000")
    with pytest.raises(ConfigError, match="TOGETHER_API_KEY is not set"):
        service_of("together", None)


def test_a_refused_key(ledger, service, server, monkeypatch):
    monkeypatch.setattr(server, "answer", lambda *request: (401, {"error": {"message": "no"}}))
    with pytest.raises(ServiceError, match="refuses the key in TOGETHER_API_KEY"):
        service.list_live()


def test_the_list_holds_the_callers_live_resources_on_every_page(service, server):
    server.page = 2
    ids = [server.add(state=state) for state in ("READY", "PENDING", "READY", "CREATING", "READY")]
    server.add(state="STOPPED")
    server.add(created_by="somebody else")
    assert [resource.id for resource in service.list_live()] == ids
    assert service.list_live()[1].queue_position == 3
