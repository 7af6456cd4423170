"""The server as a web server: who may ask, what is found, pages, files, large bodies."""

import asyncio
import json
from pathlib import Path

import pytest
from starlette.requests import Request

from tests.serve.requests import CROSS_ENTROPY, SEQUENCES, Wire, sample_of
from tests.serve.server import ServerProcess
from tunebook.errors import ConfigError
from tunebook.serve.answers import read_body
from tunebook.serve.command import bound_socket, is_loopback, named_model, serve
from tunebook.serve.errors import ApiError

SETTINGS = {
    "model": "m",
    "name": None,
    "host": "127.0.0.1",
    "port": 0,
    "home": None,
    "token_env": "TUNEBOOK_SERVE_TOKEN",
    "max_sessions": 5,
    "price_per_hour": 0.0,
    "faults": None,
    "rates": "none",
    "engine": {},
}


def test_health_and_metrics_need_no_token(server, wire, new_session):
    wire.step(new_session())
    nobody = Wire(server.url, token="")
    health = nobody.http.get("/health")
    assert health.json() == {"status": "ok", "model": server.model}
    text = nobody.http.get("/metrics").text
    for line in (
        'tunebook_operations_total{kind="optim-step",status="COMPLETED"}',
        'tunebook_sessions{status="RUNNING"}',
        "tunebook_operations_queued 0",
        'path="/v1/rl/model-resources",status="201"',
        'tunebook_tokens_total{kind="forward-backward"}',
    ):
        assert line in text, line


def test_without_a_token_nothing_is_answered(server):
    nobody = Wire(server.url, token="")
    for answer in (nobody.get("model-resources"), nobody.post("training-sessions", {})):
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "no_token"
    nobody.http.headers["authorization"] = "Basic abc"
    assert nobody.get("supported-models").status_code == 401


def test_the_token_of_the_server_is_needed(tmp_path):
    with ServerProcess(
        tmp_path / "server", env={"TUNEBOOK_SERVE_TOKEN": "sentinel-5f1c"}
    ) as server:
        for token, status in (("x", 401), ("", 401), ("sentinel", 401), ("sentinel-5f1c", 200)):
            assert Wire(server.url, token=token).get("supported-models").status_code == status
        assert Wire(server.url, token="").http.get("/metrics").status_code == 401
        assert Wire(server.url, token="").http.get("/health").status_code == 200
        assert server.stop() == 0
        written = [path for path in server.home.rglob("*") if path.is_file()]
        assert written and all(b"sentinel-" not in path.read_bytes() for path in written)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"host": "0.0.0.0"}, "needs a token"),
        ({"max_sessions": 0}, "--max-sessions"),
        ({"home": Path(__file__)}, "--home .* cannot be written there"),
        ({"rates": "fast"}, "--rates fast"),
    ],
)
def test_settings_are_checked_first(monkeypatch, change, expected):
    monkeypatch.delenv("TUNEBOOK_SERVE_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=expected):
        serve(**{**SETTINGS, **change})


def test_loopback_is_known():
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "192.168.0.1", "example.org", "::")))


def test_a_taken_address_is_said():
    with bound_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}"):
            bound_socket("127.0.0.1", port)
    with pytest.raises(ConfigError, match="--port 70000"):
        bound_socket("127.0.0.1", 70000)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/v1/v1/rl/model-resources"),
        ("GET", "/v1/rl/model-resources/mr-0"),
        ("GET", "/v1/rl/model-resources/..%2F..%2Fetc"),
        ("POST", "/v1/rl/model-resources/mr-0/stop"),
        ("GET", "/v1/rl/training-sessions/ts-0"),
        ("POST", "/v1/rl/training-sessions/ts-0/stop"),
        ("POST", "/v1/rl/training-sessions/ts-0/payloads/upload-url"),
        ("POST", "/v1/rl/training-sessions/ts-0/payloads/x/download-url"),
        ("POST", "/v1/rl/training-sessions/ts-0/operations/teleport"),
        ("POST", "/v1/rl/training-sessions/ts-0/operations/optim-step"),
        ("GET", "/v1/rl/training-sessions/ts-0/operations/optim-step/op-0"),
        ("GET", "/v1/rl/checkpoints/ck-0"),
        ("GET", "/v1/rl/checkpoints/ck-0/download"),
        ("DELETE", "/v1/rl/checkpoints"),
    ],
)
def test_what_is_not_there_is_not_found(wire, method, path):
    answer = wire.http.request(method, path, headers={"idempotency-key": "k"})
    assert answer.status_code == (405 if method == "DELETE" else 404), answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"{", 400), (b"[]", 400), (b"\xff\xfe", 400), (b'{"base_model": NaN}', 400), (b"", 400)],
)
def test_bodies_that_are_no_objects_are_refused(wire, body, status):
    answer = wire.http.post("/v1/rl/model-resources", content=body)
    assert answer.status_code == status and answer.json()["error"]["message"]


def test_a_body_may_not_be_too_large():
    """Declared, or in pieces that say nothing of their sum."""

    def read(pieces, *headers):
        messages = iter(
            [{"type": "http.request", "body": one, "more_body": True} for one in pieces]
            + [{"type": "http.request", "body": b"", "more_body": False}]
        )

        async def receive():
            return next(messages)

        scope = {"type": "http", "method": "POST", "path": "/", "headers": list(headers)}
        return asyncio.run(read_body(Request(scope, receive), max_bytes=10))

    assert read([b"12345", b"67890"]) == b"1234567890"
    for pieces, headers in (
        ([b"12345", b"67890", b"1"], []),
        ([b"1"], [(b"content-length", b"11")]),
        ([b"1"], [(b"content-length", b"9" * 5000)]),
    ):
        with pytest.raises(ApiError, match="larger than 10 bytes") as caught:
            read(pieces, *headers)
        assert caught.value.status == 413


def test_lists_come_in_pages(server, wire):
    made = [wire.resource(server.model)["id"] for _ in range(5)]
    found, after = [], None
    while True:
        params = {"limit": 2, "status": "MODEL_RESOURCES_STATUS_READY", "created_by": "me"}
        page = wire.get("model-resources", **params, **({"after": after} if after else {})).json()
        found += [one["id"] for one in page["data"]]
        assert page["meta"]["limit"] == 2 and len(page["data"]) <= 2
        if not page["meta"]["has_more"]:
            assert page["meta"]["next_cursor"] == ""
            break
        after = page["meta"]["next_cursor"]
        assert after == found[-1]
    assert found[:5] == made[::-1]  # Newest first.
    for params in ({"limit": 0}, {"limit": 101}, {"limit": "x"}, {"after": "mr-0"}):
        assert wire.get("model-resources", **params).status_code == 400
    assert wire.get("model-resources", status="READY").status_code == 400
    both = "MODEL_RESOURCES_STATUS_READY,MODEL_RESOURCES_STATUS_STOPPED"
    assert wire.get("model-resources", status=both, limit=100).status_code == 200
    assert wire.get("model-resources", created_by="somebody").json()["data"] == []
    for identity in made:
        assert wire.post(f"model-resources/{identity}/stop").json()["status"].endswith("STOPPED")
        assert wire.post(f"model-resources/{identity}/stop").status_code == 400


def test_sessions_and_checkpoints_are_listed(wire, new_session):
    session = new_session()
    wire.step(session)
    training = wire.run(session, "training-checkpoint")["checkpoint"]
    inference = wire.run(session, "inference-checkpoint")["checkpoint"]
    assert training["step"] == inference["step"] == "1"
    found = wire.get("checkpoints", session_id=session).json()["data"]
    assert [one["id"] for one in found] == [inference["id"], training["id"]]
    assert found[1] == wire.get(f"checkpoints/{training['id']}").json()
    assert found[1]["type"] == "CHECKPOINT_TYPE_TRAINING" and found[1]["lora_rank"] == 4
    only = wire.get("checkpoints", session_id=session, type="CHECKPOINT_TYPE_INFERENCE").json()
    assert [one["id"] for one in only["data"]] == [inference["id"]]
    assert wire.get("checkpoints", base_model="other").json()["data"] == []
    assert wire.get("checkpoints", type="X").status_code == 400
    record = wire.get(f"training-sessions/{session}").json()
    assert record["training_checkpoints"] == [training]
    assert record["inference_checkpoints"] == [inference]
    resource = record["model_resources_id"]
    listed = wire.get("training-sessions", model_resources_id=resource).json()["data"]
    assert [one["id"] for one in listed] == [session]


def test_addresses_of_files_are_signed(server, wire, new_session):
    session = new_session()
    made = wire.post(f"training-sessions/{session}/payloads/upload-url").json()
    address, nobody = made["upload_url"], Wire(server.url, token="")
    assert made["payload_id"] in address
    forged = address.replace(made["payload_id"], "pl-" + "0" * 32)
    old = address.replace("/files/", "/files/1", 1)
    for bad in (forged, old, address.replace("/up/", "/down/"), "/v1/rl/files/x/up/y"):
        assert nobody.http.put(bad, content=b"{}").status_code in (403, 405), bad
    body = {"loss": CROSS_ENTROPY, "samples": [sample_of(SEQUENCES[0])]}
    early = wire.submit(session, "forward-backward", {**body, "payload_id": made["payload_id"]})
    assert early.status_code == 400 and "has not been uploaded" in early.text
    assert nobody.http.put(address, content=json.dumps(body).encode()).status_code == 200
    neighbour = wire.submit(new_session(), "sample", {"payload_id": made["payload_id"]})
    assert neighbour.status_code == 404
    answer = wire.submit(session, "optim-step", {"payload_id": made["payload_id"]})
    assert answer.status_code == 400


def test_the_payload_is_what_is_trained_on(server, wire, new_session):
    """1.6: the body beside it is cut to eight tokens."""
    session = new_session()
    made = wire.post(f"training-sessions/{session}/payloads/upload-url").json()
    long = list(range(10, 60))
    whole = {"loss": CROSS_ENTROPY, "samples": [sample_of(long)]}
    wire.http.put(made["upload_url"], content=json.dumps(whole).encode())
    short = {"loss": CROSS_ENTROPY, "samples": [sample_of(long[:9])]}
    body = {**short, "payload_id": made["payload_id"], "forward_only": True}
    by_payload = wire.run(session, "forward-backward", body)
    assert by_payload["metrics"]["num_tokens"] == 49
    assert by_payload == wire.forward_backward(session, whole["samples"], forward_only=True)


def test_planned_faults_happen(tmp_path):
    """Also: a failure in the engine leaves a session as it was, with the gradient it had."""
    faults = {
        "faults": [
            {"fault": "out_of_memory", "kind": "forward-backward", "at": 2},
            {"fault": "resource_slow_start", "at": 1, "delay_s": 0.5},
            {"fault": "resource_capacity", "at": 2},
            {"fault": "session_capacity", "at": 1},
            {"fault": "session_slow_start", "at": 2, "delay_s": 0.3},
            {"fault": "non_finite", "kind": "optim-step", "at": 2},
            {"fault": "session_expiry", "at": 8},
            {"fault": "resource_lost", "at": 10},
        ]
    }
    with ServerProcess(tmp_path / "server", faults=faults) as server:
        wire = Wire(server.url)
        resource = wire.resource(server.model)
        assert resource["status"] == "MODEL_RESOURCES_STATUS_CREATING"
        assert wire.get(f"model-resources/{resource['id']}").json()["status"].endswith("READY")
        failed = wire.resource(server.model)
        assert failed["error"]["code"] == "MODEL_RESOURCES_ERROR_CODE_CAPACITY_WAIT_TIMEOUT"
        full = wire.session(resource["id"])
        assert full["error"]["code"] == "TRAINING_SESSION_ERROR_CODE_RESOURCE_AT_CAPACITY"
        session = wire.session(resource["id"])["id"]
        wire.forward_backward(session)
        body = {"loss": CROSS_ENTROPY, "samples": [sample_of(SEQUENCES[0])]}
        error = wire.fail(session, "forward-backward", body)
        assert error["code"] == "TRAINING_OPERATION_ERROR_CODE_RESOURCE_EXHAUSTED"
        wire.run(session, "optim-step", {})
        wire.forward_backward(session)
        for _ in range(2):
            error = wire.fail(session, "optim-step", {})
            assert error["code"] == "TRAINING_OPERATION_ERROR_CODE_NON_FINITE_LOSS"
        wire.forward_backward(session)
        error = wire.fail(session, "optim-step", {})
        assert error["code"] == "TRAINING_OPERATION_ERROR_CODE_SESSION_NOT_ACTIVE"
        ended = wire.get(f"training-sessions/{session}").json()
        assert ended["status"] == "TRAINING_SESSION_STATUS_EXPIRED"
        assert ended["error"]["code"] == "TRAINING_SESSION_ERROR_CODE_TIMED_OUT"
        another = wire.session(resource["id"])["id"]
        wire.forward_backward(another)
        assert wire.fail(another, "optim-step", {})["code"].endswith("SESSION_NOT_ACTIVE")
        lost = wire.get(f"model-resources/{resource['id']}").json()
        assert lost["error"]["code"] == "MODEL_RESOURCES_ERROR_CODE_RESOURCE_UNAVAILABLE"
        error = wire.get(f"training-sessions/{another}").json()["error"]
        assert error["code"] == "TRAINING_SESSION_ERROR_CODE_RESOURCE_UNAVAILABLE"


def test_a_model_is_named_as_in_a_recipe():
    assert named_model("tiny") == "pkg://tunebook/assets/tiny_model"
    assert named_model("smollm2_135m") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    for other in ("gpt2", "base", "Qwen/Qwen3-0.6B", "./tiny", "../tiny", "pkg://a/b"):
        assert named_model(other) == other
