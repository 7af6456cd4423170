"""What the worker does where something breaks, without an engine."""

import pytest

from tests.serve.server import wait_until
from tests.serve.test_states import Clock, create, open_session, submit
from tunebook.serve.endings import end_session
from tunebook.serve.operations import Limits
from tunebook.serve.payloads import Payloads
from tunebook.serve.records import Session, SessionStatus
from tunebook.serve.state import Lane, Settings, State
from tunebook.serve.store import Store
from tunebook.serve.trainee import Trainee
from tunebook.serve.worker import Worker


class NoBackend:
    """Opens nothing."""

    def close(self):
        pass


@pytest.fixture
def state(tmp_path):
    settings = Settings(model="m", home=tmp_path, token=None, now=Clock())
    store = Store(tmp_path / "server.sqlite")
    yield State(settings, store, Limits(vocab_size=100, max_seq_len=16), ("head",))
    store.close()


def worker_of(state, failures):
    payloads = Payloads(state.settings.home, state.store)
    return Worker(state, payloads, NoBackend, lambda: failures.append(True))


def test_a_fault_in_choosing_the_work_ends_the_server(state, capsys):
    failures = []
    worker = worker_of(state, failures)
    worker.start()
    with state.work:
        state.lanes["broken"] = Lane(None)
        state.work.notify_all()
    wait_until(lambda: not worker.alive)
    assert failures == [True] and worker.failed
    assert "the worker failed, so the server ends" in capsys.readouterr().err


def test_an_operation_whose_request_is_lost_fails_alone(state, capsys):
    """Its body is gone, as after a damaged disk; the worker goes on."""
    session = open_session(state, create(state))
    operation = submit(state, session)
    [queued] = state.lanes[session.id].queue
    queued.request = None
    state.store._connection.execute("UPDATE operations SET body = NULL")
    failures = []
    worker = worker_of(state, failures)
    worker._trainees[session.id] = Trainee(session, NoBackend(), state.settings.home, None)
    worker._thread.start()
    wait_until(lambda: operation.ended or not worker.alive)
    worker.stop()
    assert operation.status == "FAILED" and not failures
    assert operation.error["code"].endswith("INTERNAL_ERROR")


@pytest.mark.parametrize("becomes", ["EXPIRED", "ERROR", "STOPPED"])
def test_a_restart_ends_a_session_as_it_was_to_end(state, becomes):
    session = open_session(state, create(state))
    with state.lock:
        end_session(state, state.lanes[session.id], SessionStatus[becomes])
    again = State(state.settings, state.store, state.limits, ())
    worker = worker_of(again, [])
    worker.start()
    wait_until(lambda: not again.lanes)
    worker.stop()
    assert state.store.find(Session, session.id).status == becomes
