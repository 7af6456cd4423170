"""Errors of the service as ours, waiting that ends, and resources that do not come up."""

import asyncio
import logging
import os
import re
import signal
import time
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import pytest
import together

from loss_fns.cross_entropy import cross_entropy
from tests.backends.remote.conftest import remote_backend
from tests.backends.tiny import make_adam, make_data, make_lora
from tests.serve.server import ServerProcess
from tunebook.backends.remote import queue as queue_module
from tunebook.backends.remote.failures import RemoteError, StalledError
from tunebook.backends.remote.loop import LoopThread
from tunebook.backends.remote.queue import Operation, RemoteQueue
from tunebook.backends.together.connection import retries_within
from tunebook.backends.together.failures import failed_operation, translated
from tunebook.backends.together.resource import ModelResource
from tunebook.errors import BackendError, NonFiniteError
from tunebook.notices import LOG, Notes


@pytest.mark.parametrize(
    ("code", "ours", "category", "recoverable", "action"),
    [
        ("INVALID_INPUT", "invalid_input", "input", False, "Correct"),
        ("RESOURCE_EXHAUSTED", "resource_exhausted", "capacity", False, "max_seq_len"),
        ("TIMEOUT", "timeout", "service", True, "backend.recover=1"),
        ("SESSION_NOT_ACTIVE", "session_not_active", "service", True, "new session"),
        ("INTERNAL_ERROR", "internal_error", "service", True, "report"),
        ("SOMETHING_NEW", "something_new", "service", True, "report"),
    ],
)
def test_every_code_has_a_duty(code, ours, category, recoverable, action) -> None:
    """T31; the text holds the ids that support asks for (T48)."""
    said = SimpleNamespace(code=f"TRAINING_OPERATION_ERROR_CODE_{code}", message="row 3 is bad")
    error = failed_operation("forward_backward", said, where="operation op-1, session s-1")
    assert isinstance(error, RemoteError)
    assert (error.code, error.category, error.recoverable) == (ours, category, recoverable)
    assert action in str(error) and "row 3 is bad" in str(error) and "op-1" in str(error)


def test_a_loss_that_is_not_finite_is_numeric() -> None:
    said = SimpleNamespace(code="TRAINING_OPERATION_ERROR_CODE_NON_FINITE_LOSS", message="NaN")
    error = failed_operation("optim_step", said, where="operation op-1")
    assert isinstance(error, NonFiniteError) and error.category == "numeric"


@pytest.mark.parametrize(
    ("status", "message", "code", "category", "recoverable"),
    [
        (400, "training session is not running (current status: STOPPED)", "session_not_active", "service", True),
        (400, "samples[2]: too long", "invalid_input", "input", False),
        (401, "bad key", "http_401", "input", False),
        (402, "insufficient_balance", "http_402", "capacity", False),
        (403, "GPU quota", "http_403", "capacity", False),
        (404, "no such training session", "session_not_active", "service", True),
        (422, "unknown field", "invalid_input", "input", False),
        (429, "slow down", "http_429", "capacity", False),
        (503, "restarting", "unreachable", "service", False),
    ],
)  # fmt: skip
def test_every_answer_has_a_duty(status, message, code, category, recoverable) -> None:
    request = httpx.Request("POST", "http://localhost/v1/rl")
    response = httpx.Response(status, request=request)
    body = {"error": {"message": message}}
    with pytest.raises(RemoteError, match="HTTP") as caught, translated("optim_step"):
        raise together.APIStatusError("Error", response=response, body=body)
    error = caught.value
    assert (error.code, error.category, error.recoverable) == (code, category, recoverable)
    assert message in str(error)


def test_a_key_is_in_no_message(monkeypatch) -> None:
    monkeypatch.setenv("TOGETHER_API_KEY", "tgp_v1_abcdefghijklmnopqrstuvwxyz")
    request = httpx.Request("POST", "http://localhost/v1/rl")
    with pytest.raises(RemoteError) as caught, translated("sample"):
        raise together.AuthenticationError(
            "the key tgp_v1_abcdefghijklmnopqrstuvwxyz is unknown",
            response=httpx.Response(401, request=request),
            body=None,
        )
    assert "abcdefgh" not in str(caught.value) and "[redacted]" in str(caught.value)


@pytest.mark.parametrize("budget", [0, 1, 120, 180, 600])
def test_retries_last_as_long_as_they_should(budget) -> None:
    """Case 109. The SDK waits min(2^n, 10) seconds less up to a quarter before the retry n, from 0."""
    count = retries_within(budget)
    shortest = [0.75 * min(2**number, 10) for number in range(count)]
    assert sum(shortest) >= budget > sum(shortest[:-1]) - (budget == 0)


@pytest.fixture
def stuck(monkeypatch):
    """A queue whose operations never end."""
    loop = LoopThread()

    async def reopen(checkpoint_id, with_optimizer):
        raise AssertionError("nothing was lost")

    monkeypatch.setattr(queue_module, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(queue_module, "STATUS_EVERY_S", 0.05)
    link = SimpleNamespace(seen="optim_step op-1 is RUNNING", session_id="s-1")
    queue = RemoteQueue(
        "stuck",
        link,  # pyright: ignore[reportArgumentType]
        loop,
        Notes(),
        reopen=reopen,
        base=(None, True),
        recover=3,
        stall_timeout=0.2,
    )
    yield queue
    queue.close()
    loop.close()


def test_no_progress_is_said_and_ends_without_sending_again(stuck, caplog) -> None:
    """Case 113."""
    sent = []

    async def start(link):
        sent.append(link)
        return asyncio.Event().wait

    first = stuck.call(Operation("optim_step", start, changes=True))
    later = stuck.call(Operation("save", start, changes=False))
    with pytest.raises(StalledError, match="nothing was sent again") as caught:
        first.result()
    assert caught.value.exit_code == 75 and "op-1 is RUNNING" in str(caught.value)
    assert "waiting for optim_step" in caplog.text and "op-1 is RUNNING" in caplog.text
    assert len(sent) == 2
    with pytest.raises(BackendError):
        later.result()


def test_a_resource_in_use_is_kept_alive(monkeypatch) -> None:
    """While rewards are computed nothing is asked of it; after `keep_alive` it may go."""
    asked: list[float] = []

    async def extend_expiry(resource_id, *, seconds):
        asked.append(seconds)

    client = SimpleNamespace(
        post_training=SimpleNamespace(model_resources=SimpleNamespace(extend_expiry=extend_expiry))
    )
    settings = SimpleNamespace(inactive_timeout=0.15, keep_alive=0.4)
    loop = LoopThread()
    resource = ModelResource(settings, client, loop, Notes())  # pyright: ignore
    with resource._kept_alive("mr-1"):
        time.sleep(1.0)
    loop.close()
    assert 3 <= len(asked) <= 8 and set(asked) == {60}


@contextmanager
def interrupted_at(pattern):
    """Ctrl-C at the moment when the first notice of this pattern is shown."""

    class Interrupting(logging.Handler):
        def emit(self, record):
            if re.search(pattern, record.getMessage()):
                LOG.removeHandler(self)
                os.kill(os.getpid(), signal.SIGINT)

    handler = Interrupting()
    LOG.addHandler(handler)
    try:
        yield
    finally:
        LOG.removeHandler(handler)


def test_what_does_not_come_up_does_not_bill(tmp_path, caplog) -> None:
    """T14 and case 110: too slow, interrupted, failed, no place for the session; then errors of
    operations. That the ledger is empty is checked after every test."""
    plan = {
        "faults": [
            {"fault": "resource_slow_start", "at": [1, 2], "delay_s": 60.0},
            {"fault": "resource_failed_start", "at": [3]},
            {"fault": "session_capacity", "at": [1]},
            {"fault": "out_of_memory", "kind": "forward-backward", "at": [1]},
            {"fault": "non_finite", "kind": "forward-backward", "at": [2]},
            {"fault": "internal_error", "kind": "forward-backward", "at": [3]},
        ]
    }
    with ServerProcess(tmp_path / "server", faults=plan) as server:

        def opened(**settings):
            backend = remote_backend(server, **settings)
            try:
                return backend, backend.open_session("x", make_lora(), directory=tmp_path)
            except BaseException:
                backend.close()
                raise

        with pytest.raises(RemoteError, match=r"backend\.ready_timeout") as caught:
            opened(ready_timeout=0.3)
        assert (caught.value.code, caught.value.category) == ("not_ready", "capacity")
        caplog.clear()
        with interrupted_at("is (PENDING|CREATING)"), pytest.raises(KeyboardInterrupt):
            opened()
        with pytest.raises(RemoteError, match="PROVISIONING_FAILED"):
            opened()
        with pytest.raises(RemoteError, match="takes no more sessions"):
            opened()
        assert caplog.text.count("created") == caplog.text.count("stopped") == 3
        for expected in ("resource_exhausted", "non_finite"):
            backend, session = opened()
            with pytest.raises(BackendError if expected != "non_finite" else NonFiniteError) as bad:
                session.forward_backward(make_data(), cross_entropy).result()
            assert bad.value.code == expected
            backend.close()
        backend, session = opened(recover=1)
        assert session.forward_backward(make_data(), cross_entropy).result()["loss"] > 0
        session.optim_step(make_adam()).result()
        backend.close()
