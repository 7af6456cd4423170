"""Uploads and how long they are kept, without an engine."""

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from tests.serve.test_states import Clock, create, open_session
from tunebook.serve.errors import ApiError
from tunebook.serve.operations import Limits
from tunebook.serve.payloads import Payloads
from tunebook.serve.routes import Routes
from tunebook.serve.state import Settings, State
from tunebook.serve.store import Store


@pytest.fixture
def state(tmp_path):
    settings = Settings(model="m", home=tmp_path, token=None, keep_s=100, now=Clock())
    store = Store(tmp_path / "server.sqlite")
    yield State(settings, store, Limits(vocab_size=100, max_seq_len=16), ("head",))
    store.close()


@pytest.fixture
def payloads(state):
    return Payloads(state.settings.home, state.store)


def files(state):
    return sorted(path.name for path in (state.settings.home / "payloads").iterdir())


def test_an_upload_after_its_time_is_refused_and_leaves_nothing(state, payloads):
    session, clock = open_session(state, create(state)), state.settings.now
    app = Starlette(routes=Routes(state, payloads, None, lambda: True).all())
    client = TestClient(app, raise_server_exceptions=False)
    headers = {"authorization": "Bearer any"}
    made = client.post(
        f"/v1/rl/training-sessions/{session.id}/payloads/upload-url", json={}, headers=headers
    ).json()
    assert client.put(made["upload_url"], content=b"{}").status_code == 200
    assert files(state) == [made["payload_id"]]
    clock.time += 99
    payloads.forget(before=clock.time)
    gone = client.put(made["upload_url"], content=b"{}")
    assert (gone.status_code, gone.json()["error"]["code"]) == (410, "payload_gone")
    assert files(state) == []
    clock.time += 2
    assert client.put(made["upload_url"], content=b"{}").json()["error"]["code"] == "old_address"


def test_what_is_forgotten_while_it_is_uploaded_is_not_kept(state, payloads):
    identity = payloads.new("ts-1", 10.0)
    partial = payloads.partial_path(identity)
    partial.write_bytes(b"{}")
    payloads.forget(before=11.0)
    with pytest.raises(ApiError) as caught:
        payloads.keep(identity, partial)
    assert caught.value.status == 410
    assert files(state) == [partial.name]


def test_a_start_deletes_files_that_belong_to_no_payload(state, payloads):
    kept = payloads.write("ts-1", b"{}", 10.0)
    folder = state.settings.home / "payloads"
    for name in ("pl-leaked", f"{kept}.1234.part"):
        (folder / name).write_bytes(b"{}")
    payloads.clean_up()
    assert files(state) == [kept]
