"""A run is there for a block and nowhere after it, however the block or its process ends."""

import json
import signal
import subprocess
import sys

import pytest

from tests.backends.tiny import make_lora
from tests.resources.conftest import heard, kill, watchdogs
from tests.resources.server import until
from tests.resources.test_commands import call
from tunebook.backends.baseten.run import owned_run
from tunebook.backends.baseten.service import BasetenService
from tunebook.resources import Ledger, Patience

PATIENCE = Patience(retry_s=0.05, max_retry_s=0.2, search_s=2.0, give_up_s=60.0)


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


@pytest.fixture
def owner(tmp_path):
    """Starts processes that own a run of a server; see `tests.backends.loops.owner`."""
    processes = []

    def start(server):
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.backends.loops.owner", server.url, str(tmp_path / "o")],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        heard(process, "opening")
        return process

    yield start
    for process in processes:
        with process:
            process.kill()


def listed():
    return [row for row in json.loads(call("list", "--json").stdout) if row["key"]]


def test_the_client_is_killed_while_it_trains(dedicated, owner, home):
    process = owner(dedicated)
    heard(process, "training")
    [run] = dedicated.active_runs()
    [row] = listed()
    assert (row["id"], row["state"], row["service"]) == (run, "ACTIVE", "baseten")
    kill(process)
    until(lambda: not watchdogs(home))
    assert dedicated.active_runs() == []
    [entry] = Ledger.of_user().entries()
    assert entry.closed == "stopped after its process had died"


def test_the_client_is_killed_before_it_knows_its_run(dedicated, owner, home):
    """L12: the ledger has the session alone, and the run is found by it."""
    dedicated.fault("*/health", method="GET", status=503, times=999)
    process = owner(dedicated)
    until(lambda: dedicated.active_runs())
    [run] = dedicated.active_runs()
    [entry] = Ledger.of_user().open_entries()
    session = next(one for one in dedicated.state()["runs"] if one["id"] == run)["session_id"]
    assert entry.resource_id is None and entry.what["session_id"] == session
    [row] = listed()
    assert (row["id"], row["session_id"]) == (run, session)
    kill(process)
    dedicated.clear_faults()
    until(lambda: not watchdogs(home))
    assert dedicated.active_runs() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_client_is_told_to_stop(dedicated, owner, home, number):
    """Case 112."""
    process = owner(dedicated)
    heard(process, "training")
    process.send_signal(number)
    assert process.wait(timeout=60) != 0
    until(lambda: not watchdogs(home))
    assert dedicated.active_runs() == []
    [entry] = Ledger.of_user().entries()
    assert entry.closed == "deactivated"


def test_stopped_by_hand_by_its_session(dedicated, owner, home):
    process = owner(dedicated)
    heard(process, "training")
    [row] = listed()
    done = call("stop", row["session_id"], "--yes")
    assert done.exit_code == 0, done.output
    assert dedicated.active_runs() == []
    kill(process)
    until(lambda: not watchdogs(home))


def test_a_trainer_of_its_own_is_asked_for_and_deactivated(serverless, open_remote, tmp_path):
    backend = open_remote(serverless, scope="deployment")
    session = backend.open_session("first", make_lora(), directory=tmp_path)
    [run] = serverless.active_runs()
    assert serverless.state()["runs"][-1]["deployment_id"] == f"de{run}"
    session.close()
    assert serverless.active_runs() == []


def test_an_unanswered_request_is_looked_after(serverless, home):
    """Whether it took effect is not known at once; a watchdog looks for a while."""
    ledger, service, said = Ledger.of_user(), BasetenService(serverless.url), []
    what = {"session_id": "se-none", "base_model": serverless.model}

    def create():
        raise TimeoutError("no reply")

    with (
        pytest.raises(TimeoutError),
        owned_run(ledger, service, what, create, run="a", say=said.append, patience=PATIENCE),
    ):
        pass
    assert "is not known" in said[-1]
    until(lambda: not watchdogs(home))
    [entry] = ledger.entries()
    assert entry.closed == "nothing was created"


def test_a_failed_deactivation_is_said_and_tried_on(serverless, open_remote, home, tmp_path):
    backend = open_remote(serverless)
    session = backend.open_session("first", make_lora(), directory=tmp_path)
    serverless.fault("*/deactivate", status=400, times=2, body={"error": "not now"})
    session.close()
    until(lambda: not watchdogs(home))
    assert serverless.active_runs() == []
    assert "not now" in Ledger.of_user().log_path.read_text()
