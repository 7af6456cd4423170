"""Processes that die without warning, and what becomes of their resources."""

import os
import signal
from pathlib import Path

import pytest

from tests.resources.conftest import KEY, heard, kill, logged, watchdogs
from tests.resources.owner import PATIENCE, WHAT
from tests.resources.server import until
from tunebook.resources import Ledger, watchdog


def test_killed_during_training(owner, server, ledger, home):
    neighbour = server.add()
    process = owner()
    resource_id = heard(process, "training")
    server.in_use.add(resource_id)
    kill(process)
    until(lambda: not watchdogs(home))
    assert server.stops() == [(resource_id, "force=true")]
    assert server.live() == [neighbour]
    assert ledger.entries()[0].closed == "stopped after its process had died"
    assert f"{resource_id} stopped" in logged(ledger)


def test_killed_before_the_create_call_returned(owner, server, ledger, home):
    neighbour = server.add({"base_model": "tiny", "compute_config": {"num_generator_replicas": 0}})
    server.reply.clear()
    process = owner()
    until(lambda: len(server.live()) == 2)
    kill(process)
    server.reply.set()
    until(lambda: not watchdogs(home))
    assert server.live() == [neighbour]
    assert len(server.stops()) == 1
    assert ledger.open_entries() == []


def test_killed_before_anything_was_created(owner, server, ledger, home):
    neighbour = server.add()
    server.on_create = lambda body: kill(process)
    server.lose_requests = 1
    process = owner()
    process.wait(30)
    until(lambda: not watchdogs(home))
    assert server.live() == [neighbour]
    assert server.stops() == []
    assert ledger.entries()[0].closed == "nothing was created"


def test_two_killed_before_their_create_calls_returned(owner, server, ledger, home):
    """Each watchdog finds one of the two resources, and none takes the other's twice."""
    server.reply.clear()
    processes = [owner(), owner()]
    until(lambda: len(server.live()) == 2)
    for process in processes:
        kill(process)
    server.reply.set()
    until(lambda: not watchdogs(home))
    assert server.live() == []
    assert sorted(id for id, _ in server.stops()) == sorted(server.resources)
    assert ledger.open_entries() == []


def test_a_find_that_is_in_use_is_somebody_elses(owner, server, ledger, home):
    server.on_create = lambda body: (kill(process), server.in_use.add(server.add(body)))
    server.lose_requests = 1
    process = owner()
    until(lambda: server.stops())
    until(lambda: "sessions are active" in logged(ledger))
    (dog,) = watchdogs(home)
    os.kill(dog, signal.SIGKILL)
    assert len(server.live()) == 1
    assert {query for _, query in server.stops()} == {""}
    assert len(ledger.open_entries()) == 1


def test_a_service_that_is_down_for_a_while(owner, server, ledger, home):
    process = owner()
    resource_id = heard(process, "training")
    server.failing_stops = 2
    kill(process)
    until(lambda: not watchdogs(home))
    assert len(server.stops()) == 3
    assert server.state(resource_id) == "STOPPED"
    assert ledger.open_entries() == []


def test_a_watchdog_outlives_the_signals_that_end_others(owner, server, home, ledger):
    process = owner()
    heard(process, "training")
    (dog,) = watchdogs(home)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(dog, number)
    assert watchdogs(home) == [dog]
    kill(process)
    until(lambda: not watchdogs(home))
    assert ledger.open_entries() == []


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_reaches_the_owner_alone_and_waits_for_its_stop(times, owner, server, home, ledger):
    """Case 112. Ctrl-C goes to the whole process group; a second one comes while the stop is under way."""
    process = owner()
    resource_id = heard(process, "training")
    server.reply.clear()
    for _ in range(times):
        os.killpg(process.pid, signal.SIGINT)
        until(server.stops)
    assert len(watchdogs(home)) == 1
    server.reply.set()
    assert process.wait(30) == -signal.SIGINT
    assert server.stops() == [(resource_id, "force=true")]
    assert ledger.entries()[0].closed == "stopped"
    assert watchdogs(home) == []


def test_terminated(owner, server, home, ledger):
    process = owner()
    heard(process, "training")
    process.terminate()
    assert process.wait(30) == 143
    assert len(server.stops()) == 1
    assert ledger.entries()[0].closed == "stopped"


def test_a_fork_that_outlives_the_owner_holds_nothing_back(owner, server, home, ledger):
    process = owner("fork")
    child = int(heard(process, "child"))
    heard(process, "training")
    kill(process)
    try:
        until(lambda: not watchdogs(home))
        assert ledger.open_entries() == []
    finally:
        os.kill(child, signal.SIGKILL)


def test_no_file_holds_the_key(owner, server, home, ledger):
    server.failing_stops = 1
    process = owner()
    heard(process, "training")
    commands = [Path(f"/proc/{dog}/cmdline").read_text() for dog in watchdogs(home)]
    kill(process)
    until(lambda: not watchdogs(home))
    texts = [path.read_text() for path in home.rglob("*") if path.is_file()]
    assert not any(KEY in text for text in [*texts, *commands])
    assert commands


def test_a_killed_watchdog_leaves_the_rest_to_reap(owner, server, home, ledger):
    process = owner()
    heard(process, "training")
    (dog,) = watchdogs(home)
    os.kill(dog, signal.SIGKILL)
    kill(process)
    (entry,) = Ledger.of_user().open_entries()
    assert not ledger.has_owner(entry.key)
    assert server.stops() == []


def test_an_answer_that_nobody_expects_does_not_end_it(ledger, service, server, monkeypatch):
    """It is said, and what may bill is asked for again."""
    resource_id = server.add()
    key = ledger.intend(service, WHAT, run=None)
    ledger.created(key, resource_id)
    ledger.disown(key)

    class Odd:
        def stop(self, resource_id, *, force):
            raise KeyError("status")

    monkeypatch.setattr(watchdog, "service_of", lambda name, base_url: Odd())
    outcome = watchdog._attempt(ledger, ledger.entry(key), PATIENCE)
    assert outcome == ("KeyError: 'status'", False)
    monkeypatch.setattr(watchdog, "service_of", lambda name, base_url: service)
    assert watchdog._attempt(ledger, ledger.entry(key), PATIENCE)[1]
    assert ledger.entry(key).closed is not None
