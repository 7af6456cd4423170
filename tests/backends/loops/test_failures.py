"""What the service refuses, loses and breaks, and what a session makes of it."""

import asyncio
import threading
import time
import traceback
from contextlib import ExitStack
from types import SimpleNamespace

import httpx
import pytest

from loss_fns.cross_entropy import cross_entropy
from tests.backends.tiny import make_adam, make_data, make_lora
from tunebook.backends.baseten import backend as baseten
from tunebook.backends.baseten import capacity
from tunebook.backends.baseten.backend import Held, OpenRun
from tunebook.backends.baseten.failures import RUN_LOST, translated
from tunebook.backends.remote.failures import RemoteError
from tunebook.backends.remote.loop import LoopThread
from tunebook.errors import BackendError, NonFiniteError

TRAINERS = "/v1/loops/trainers"
POOL_FULL = {"error": "the pool is full", "details": {"reason": "loops_capacity"}}


@pytest.fixture(autouse=True)
def _no_faults_left(serverless):
    yield
    serverless.clear_faults()


@pytest.fixture
def open_session(serverless, open_remote, tmp_path):
    """A session on the server, which refuses for a short time only."""

    def open_one(**settings):
        backend = open_remote(serverless, **{"submit_timeout": 2, **settings})
        return backend.open_session("first", make_lora(), directory=tmp_path / "first")

    return open_one


def step(session):
    metrics = session.forward_backward(make_data(), cross_entropy)
    session.optim_step(make_adam()).result()
    return metrics.result()["loss"]


def made(server):
    return server.requests(TRAINERS)


def test_a_full_pool_is_waited_for(serverless, open_session, monkeypatch, caplog):
    """L3, and case 109."""
    monkeypatch.setattr(capacity, "FIRST_WAIT_S", 0.01)
    before = len(made(serverless))
    serverless.fault(TRAINERS, status=429, times=2, headers={"Retry-After": "0.05"}, body=POOL_FULL)
    step(open_session())
    assert made(serverless)[before:] == [429, 429, 200]
    assert "the pool is full; attempt 2" in caplog.text


def test_a_pool_that_stays_full_ends_it(serverless, open_session, monkeypatch):
    monkeypatch.setattr(capacity, "FIRST_WAIT_S", 0.01)
    before = len(made(serverless))
    serverless.fault(
        TRAINERS, status=429, times=99, headers={"Retry-After": "0.01"}, body=POOL_FULL
    )
    with pytest.raises(BackendError, match="no place in 10 attempts") as caught:
        open_session()
    assert caught.value.code == "capacity"
    assert caught.value.response.status_code == 429
    assert made(serverless)[before:] == [429] * 10


@pytest.mark.parametrize(
    ("status", "headers", "body", "says"),
    [
        (
            429,
            {"Retry-After": "1"},
            {"details": {"reason": "loops_capacity", "limit": "org_cap"}},
            "deactivate a run of your organization",
        ),
        (429, {}, POOL_FULL, "Try again later"),
        (429, {"Retry-After": "1"}, {"error": "Could not schedule trainer"}, "Try again later"),
        (403, {}, {"error": "trainer quota"}, "quota of trainers"),
        (401, {}, {"error": "unknown key"}, "BASETEN_API_KEY"),
        (400, {}, {"error": "no GPU for this length"}, "no GPU for this length"),
    ],
)
def test_other_refusals_come_at_once(serverless, open_session, status, headers, body, says):
    """L2, L4."""
    before = len(made(serverless))
    serverless.fault(TRAINERS, status=status, headers=headers, body=body)
    with pytest.raises(BackendError, match=says):
        open_session()
    assert made(serverless)[before:] == [status]


def test_a_run_whose_reply_was_lost_is_found_and_deactivated(serverless, open_session):
    """L12."""
    before = len(made(serverless))
    serverless.fault(TRAINERS, drop="after")
    with pytest.raises(BackendError, match="did not answer"):
        open_session()
    assert len(made(serverless)[before:]) == 1
    assert serverless.state()["runs"][-1]["status"]["name"] == "INACTIVE"


def test_a_wrong_request_is_not_sent_again_for_an_hour(serverless, open_session):
    session = open_session()
    serverless.fault("*/forward_backward", status=400, times=99, body={"error": "row 0 is no good"})
    failed = session.forward_backward(make_data(), cross_entropy)
    with pytest.raises(BackendError, match="row 0 is no good") as caught:
        failed.result()
    assert caught.value.code == "invalid_input"
    with pytest.raises(BackendError, match="failed before"):
        session.optim_step(make_adam()).result()


@pytest.mark.parametrize(
    ("operation", "fault"),
    [
        ("forward_backward", {"status": 408}),
        ("forward_backward", {"drop": "after"}),
        ("optim_step", {"status": 502}),
        ("optim_step", {"drop": "before"}),
        ("optim_step", {"drop": "after"}),
    ],
    ids=str,
)
def test_a_lost_request_takes_effect_once(serverless, open_session, operation, fault):
    """Case 108: it is sent again under the same key."""
    session = open_session(submit_timeout=60)
    expected = [step(session), step(session)]
    session.close()
    session = open_session(submit_timeout=60)
    serverless.fault(f"*/{operation}", **fault)
    assert [step(session), step(session)] == pytest.approx(expected, abs=1e-5)
    run = serverless.state()["runs"][-1]["id"]
    took = [one["operation"] for one in serverless.operations(run)]
    assert took == ["init_trainer_server", *["forward_backward", "optim_step"] * 2]


@pytest.mark.parametrize("fault", [{"status": 502}, {"drop": "before"}], ids=str)
def test_a_lost_answer_is_asked_for_again(serverless, open_session, fault):
    session = open_session()
    serverless.fault("*/operations/*", method="GET", **fault)
    step(session)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("ValueError", "invalid_input"),
        ("OutOfMemoryError", "resource_exhausted"),
        ("DispatcherError", "internal_error"),
        ("NonFiniteError", "non_finite"),
    ],
)
def test_a_failed_operation_says_why(serverless, open_session, kind, code):
    session = open_session()
    serverless.fault("*/optim_step", error="it went wrong", error_class=kind)
    session.forward_backward(make_data(), cross_entropy)
    with pytest.raises(BackendError if code != "non_finite" else NonFiniteError) as caught:
        session.optim_step(make_adam()).result()
    assert caught.value.code == code and "it went wrong" in str(caught.value)
    with pytest.raises((BackendError, NonFiniteError), match="failed before"):
        session.forward(make_data()).result()


def test_a_lost_run_is_replaced_from_its_checkpoint(serverless, open_session):
    """Case 110: the one that was lost is deactivated as well."""
    session = open_session()
    expected = [step(session) for _ in range(3)]
    session.close()
    session = open_session(recover=1)
    losses = [step(session)]
    session.save("one").result()
    losses.append(step(session))
    serverless.fault("*/forward_backward", status=503)
    losses.append(step(session))
    assert losses == pytest.approx(expected, abs=1e-5)
    assert len(serverless.active_runs()) == 1
    session.close()
    assert serverless.active_runs() == []


def test_a_trainer_that_divides_by_tokens_is_no_good(serverless, open_session, monkeypatch):
    """One that knows nothing of the flag would train something else without a word."""
    from tunebook.backends.baseten.dialect import LoopsDialect

    monkeypatch.setattr(LoopsDialect, "sum_config", None)
    with pytest.raises(BackendError, match="divides by tokens"):
        step(open_session())


def test_a_replacement_that_does_not_come_up_is_tried_again(
    serverless, open_remote, tmp_path, monkeypatch
):
    backend = open_remote(serverless, recover=2, submit_timeout=2)
    session = backend.open_session("first", make_lora(), directory=tmp_path / "first")
    open_run, tried = backend._open_run, []

    def open_second(*arguments):
        tried.append(arguments)
        if len(tried) == 1:
            raise RemoteError("it was preempted", code="RUN_LOST", duty=RUN_LOST)
        return open_run(*arguments)

    monkeypatch.setattr(backend, "_open_run", open_second)
    serverless.fault("*/forward_backward", status=503)
    step(session)
    assert len(tried) == 2 and len(serverless.active_runs()) == 1
    session.close()
    assert serverless.active_runs() == []


def test_a_run_that_comes_up_after_the_session_has_closed_is_deactivated():
    ended = []
    held = Held()
    stack = ExitStack()
    stack.callback(ended.append, "ended")
    held.close()
    with pytest.raises(BackendError, match="closed"):
        held.put(OpenRun(stack, None))
    assert ended == ["ended"]


def test_closing_ends_the_wait_for_a_full_pool(serverless, open_remote):
    backend = open_remote(serverless)
    closed = threading.Event()

    def refused():
        closed.set()
        response = httpx.Response(
            429, headers={"Retry-After": "30"}, json=POOL_FULL, request=httpx.Request("POST", "x:")
        )
        raise httpx.HTTPStatusError("full", request=response.request, response=response)

    started = time.monotonic()
    with pytest.raises(BackendError, match="the session is closed"):
        backend._patiently("a trainer", refused, closed)
    assert time.monotonic() - started < 10


def test_an_error_after_the_run_is_made_deactivates_it(
    serverless, open_remote, tmp_path, monkeypatch
):
    def fail(*_, **__):
        raise KeyboardInterrupt

    backend = open_remote(serverless)
    before = len(made(serverless))
    with monkeypatch.context() as patch:
        patch.setattr(baseten, "RemoteQueue", fail)
        with pytest.raises(KeyboardInterrupt):
            backend.open_session("first", make_lora(), directory=tmp_path / "first")
    assert len(made(serverless)) == before + 1 and serverless.active_runs() == []
    monkeypatch.setattr(backend._catalogue, "max_seq_len", fail)
    with pytest.raises(KeyboardInterrupt):
        backend.open_session("first", make_lora(), directory=tmp_path / "first")
    assert len(made(serverless)) == before + 1


def test_notes_that_cannot_be_said_do_not_keep_the_loop(serverless, open_remote, monkeypatch):
    backend = open_remote(serverless)
    loop = backend._loop = LoopThread()

    def fail():
        raise OSError("the disk is full")

    monkeypatch.setattr(backend._notes, "say", fail)
    with pytest.raises(OSError, match="full"):
        backend.close()
    with pytest.raises(BackendError, match="closed"):
        loop.run(asyncio.sleep(0))


def test_the_address_of_a_download_is_in_no_error(serverless, open_remote, tmp_path, monkeypatch):
    """Whoever has it can read the file, without a key."""
    address = "https://bucket.example/run/adapter.safetensors?X-Amz-Signature=0a1b2c&other=me"

    def download_checkpoint(checkpoint_id, *, dest_dir):
        request = httpx.Request("GET", address)
        raise httpx.HTTPStatusError(
            f"HTTP 403 for GET {address}: <Error/>",
            request=request,
            response=httpx.Response(403, request=request),
        )

    backend = open_remote(serverless)
    monkeypatch.setattr(backend._catalogue, "checkpoint", lambda place: SimpleNamespace(id="c-1"))
    with pytest.raises(BackendError, match=r"HTTP 403 for adapter\.safetensors") as caught:
        client = SimpleNamespace(download_checkpoint=download_checkpoint)
        backend._download(client, "bt://loops:r/weights/a", tmp_path / "a")
    told = "".join(traceback.format_exception(caught.value))
    assert "0a1b2c" not in told and "other=me" not in told
    with pytest.raises(BackendError) as caught, translated("sample"):
        raise ValueError(f"cannot read {address}")
    assert str(caught.value).startswith(
        "sample: cannot read https://bucket.example/run/adapter.safetensors. "
    )
