"""A server that is killed goes on, when started again, from its last completed operation."""

import sqlite3
import uuid
from contextlib import closing

import pytest
from safetensors.numpy import load_file

from tests.serve.requests import ADAM, CROSS_ENTROPY, LORA, SEQUENCES, Wire, model_input, sample_of
from tests.serve.server import TINY, ServerProcess, wait_until
from tunebook.errors import ConfigError
from tunebook.serve.app import Engine, Server
from tunebook.serve.state import Settings

pytestmark = pytest.mark.xdist_group("crash")

FB = {"loss": CROSS_ENTROPY, "samples": [sample_of(s) for s in SEQUENCES]}
STEP = {"adam_params": ADAM}
SYNC = {"weight_sync_type": "WEIGHT_SYNC_TYPE_SYNCHRONOUS"}
SAMPLE = {
    "model_inputs": [model_input([5, 60, 7])],
    "num_samples": 2,
    "sampling_params": {"max_tokens": 8, "seed": 3},
}


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A server of these tests alone, which they may kill."""
    server = ServerProcess(tmp_path_factory.mktemp("own")).start()
    yield server
    server.kill()


def killed_and_started(server: ServerProcess) -> Wire:
    server.kill()
    return Wire(server.start().url)


def stopped_and_started(server: ServerProcess) -> Wire:
    assert server.stop() == 0
    return Wire(server.start().url)


def open_session(server, wire, **settings):
    resource = wire.resource(server.model)["id"]
    return wire.session(resource, **settings)["id"]


def weights(server, wire, session):
    """The tensors of a training checkpoint of a session: adapter and optimizer."""
    output = wire.run(session, "training-checkpoint")
    folder = server.home / "sessions" / session / output["checkpoint"]["id"]
    return {
        f"{file.stem}/{name}": value.tobytes()
        for file in folder.glob("*.safetensors")
        for name, value in load_file(file).items()
    }


def test_a_killed_server_has_lost_nothing(own):
    """Bit for bit: weights, optimizer, gradient in the making, random numbers, what is sampled."""
    wire = Wire(own.url)
    random = {**LORA, "dropout": 0.3, "seed": "5"}
    pairs = [
        [open_session(own, wire, lora_config=each) for _ in range(2)] for each in (LORA, random)
    ]
    script = [("forward-backward", FB), ("optim-step", STEP), ("weights-sync", SYNC)]
    script += [("forward-backward", FB), ("optim-step", STEP), ("forward-backward", FB)]
    script += [("sample", SAMPLE), ("forward-backward", FB), ("optim-step", STEP)]
    expected = [[wire.run(unbroken, kind, body) for kind, body in script] for _, unbroken in pairs]
    found: list[list] = [[] for _ in pairs]
    for number, (kind, body) in enumerate(script):
        for outputs, (killed, _) in zip(found, pairs, strict=True):
            outputs.append(wire.run(killed, kind, body))
        if number in (1, 5):
            wire = killed_and_started(own)
    assert found == expected
    for killed, unbroken in pairs:
        assert weights(own, wire, killed) == weights(own, wire, unbroken)
        state = wire.get(f"training-sessions/{killed}").json()
        assert state["step"] == state["policy_state"]["trainer_step"] == "3"
        assert state["policy_state"]["applied_weights_version"] == "1"
        assert wire.run(killed, "sample", SAMPLE) == wire.run(unbroken, "sample", SAMPLE)


def test_what_a_server_saves_comes_back(own):
    """Sessions of every kind over one stop: published before, at, and after what was saved."""
    wire = Wire(own.url)
    synced, ahead, between = (open_session(own, wire) for _ in range(3))
    for session in (synced, ahead, between):
        wire.step(session)
    wire.forward_backward(between)
    for session in (synced, ahead, between):
        wire.run(session, "weights-sync", SYNC)
    for _ in range(2):
        wire.step(ahead)
    wire.run(between, "optim-step", STEP)
    sampled = [wire.run(session, "sample", SAMPLE) for session in (synced, ahead, between)]
    logprobs = [wire.logprobs(session) for session in (synced, ahead, between)]
    wire = stopped_and_started(own)
    snapshots = {
        session: len(list((own.home / "sessions" / session).glob("snapshot-*")))
        for session in (synced, ahead, between)
    }
    # Of `between` nothing could be saved: a gradient was outstanding at its weights-sync. How many
    # there are of the others depends on what their work took and on what has been discarded yet.
    assert snapshots[synced] and snapshots[ahead] and not snapshots[between]
    assert [wire.run(session, "sample", SAMPLE) for session in snapshots] == sampled
    assert [wire.logprobs(session) for session in snapshots] == logprobs
    steps = [wire.get(f"training-sessions/{session}").json()["step"] for session in snapshots]
    assert steps == ["1", "3", "2"]
    with closing(sqlite3.connect(own.home / "server.sqlite")) as database:
        query = "SELECT session_id FROM operations WHERE kind = 'optim-step' AND body IS NOT NULL"
        assert {row[0] for row in database.execute(query)} & set(snapshots) == {between}
    wire.run(ahead, "weights-sync", SYNC)
    assert wire.run(ahead, "sample", SAMPLE) != sampled[1]
    wait_until(lambda: len(list((own.home / "sessions" / ahead).glob("snapshot-*"))) == 1)


def test_keys_and_results_outlive_a_kill(own):
    """Most of the operations have not run when the server dies."""
    wire = Wire(own.url)
    session = open_session(own, wire)
    script = [("forward-backward", FB), ("optim-step", STEP)] * 3
    keys = [str(uuid.uuid4()) for _ in script]

    def submitted():
        return [
            wire.submit(session, kind, body, key=key).json()["id"]
            for key, (kind, body) in zip(keys, script, strict=True)
        ]

    first = submitted()
    output = wire.wait(session, "forward-backward", first[0])["output"]
    wire = killed_and_started(own)
    assert submitted() == first
    assert wire.wait(session, "optim-step", first[-1])["output"]["step"] == "3"
    assert wire.get(f"training-sessions/{session}").json()["step"] == "3"
    assert wire.wait(session, "forward-backward", first[0])["output"] == output


def test_ended_sessions_leave_checkpoints_only(server, wire, new_session):
    session = new_session()
    wire.step(session)
    wire.run(session, "weights-sync", SYNC)
    kept = wire.run(session, "training-checkpoint")["checkpoint"]["id"]
    assert wire.post(f"training-sessions/{session}/stop").json()["status"].endswith("STOPPED")
    assert [one.name for one in (server.home / "sessions" / session).iterdir()] == [kept]
    with closing(sqlite3.connect(server.home / "server.sqlite")) as database:
        query = "SELECT count(*) FROM operations WHERE session_id = ? AND body IS NOT NULL"
        assert database.execute(query, (session,)).fetchone() == (0,)


def test_a_home_is_one_servers_and_one_models(tmp_path):
    engine = Engine(model=TINY, device="cpu")
    settings = Settings(model=TINY, home=tmp_path / "home", token=None)
    first = Server(engine, settings)
    with pytest.raises(ConfigError, match="another server uses it"):
        Server(engine, settings)
    first.close()
    with closing(sqlite3.connect(settings.home / "server.sqlite")) as database, database:
        database.execute("UPDATE meta SET value = 'other' WHERE name = 'model'")
    with pytest.raises(ConfigError, match="another model"):
        Server(engine, settings)
