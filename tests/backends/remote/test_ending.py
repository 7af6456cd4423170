"""What is made is ended, whenever an interrupt or a close comes; by fakes, without a service."""

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from tests.backends.tiny import make_lora
from tunebook.backends.remote import loop as loop_module
from tunebook.backends.remote.backend import RemoteBackend
from tunebook.backends.remote.failures import RemoteError
from tunebook.backends.remote.lease import Leases
from tunebook.backends.remote.loop import LoopThread
from tunebook.backends.remote.session import RemoteSession
from tunebook.backends.together.failures import DUTIES
from tunebook.backends.together.resource import ModelResource
from tunebook.errors import BackendError
from tunebook.notices import Notes


@pytest.fixture
def loop():
    one = LoopThread()
    yield one
    one.close()


def make_session(queue, on_close):
    return RemoteSession(
        "one",
        make_lora(),
        queue,
        at=None,
        losses={},
        stop_ids=True,
        max_seq_len=None,
        download=lambda place, directory: directory,
        open_at=lambda ref: None,  # pyright: ignore
        delete=lambda place: None,
        leases=Leases(None, lambda place: None),
        on_close=on_close,
    )


def test_an_interrupt_does_not_keep_a_session_from_ending() -> None:
    ended = []
    queue = SimpleNamespace(close=lambda: os.kill(os.getpid(), signal.SIGINT))
    session = make_session(queue, lambda: ended.append("ended"))
    with pytest.raises(KeyboardInterrupt):
        session.close()
    session.close()
    assert ended == ["ended"]


def test_a_queue_that_fails_does_not_keep_a_session_from_ending() -> None:
    ended = []

    def fail():
        raise RuntimeError("the loop is gone")

    with pytest.raises(RuntimeError, match="the loop is gone"):
        make_session(SimpleNamespace(close=fail), lambda: ended.append("ended")).close()
    assert ended == ["ended"]


class Slow(RemoteBackend):
    """Is closed by another thread while it opens a session."""

    def __init__(self) -> None:
        super().__init__(place_example="x://<name>")
        self.ended: list[str] = []

    def _adapter(self, lora):
        return lora

    def _open(self, name, lora, directory, base):
        self.close()
        return make_session(SimpleNamespace(close=lambda: None), lambda: self.ended.append(name))

    def _close_shared(self) -> None:
        self.ended.append("shared")


def test_a_session_that_is_opened_as_the_backend_closes_is_ended(tmp_path) -> None:
    backend = Slow()
    with pytest.raises(BackendError, match="closed"):
        backend.open_session("late", make_lora(), directory=tmp_path)
    assert backend.ended == ["shared", "late"]


def test_a_wait_for_the_service_does_not_hold_back_the_end(monkeypatch) -> None:
    """A thread that waits for an hour can be neither cancelled nor waited for."""
    monkeypatch.setattr(loop_module, "CLEAN_UP_S", 0.05)
    begun, released, left = threading.Event(), threading.Event(), threading.Event()
    loop = LoopThread()

    def wait():
        begun.set()
        released.wait(30)
        left.set()

    waiting = loop.start(loop.wait_for_thread(wait))
    assert begun.wait(10)
    started = time.monotonic()
    loop.close()
    assert time.monotonic() - started < 10
    assert waiting.cancelled() and not left.is_set()
    released.set()
    assert left.wait(10)
    with pytest.raises(BackendError, match="closed"):
        loop.run(loop.wait_for_thread(wait))


def test_what_waits_for_the_service_says_what_came_of_it(loop) -> None:
    assert loop.run(loop.wait_for_thread(lambda: 3)) == 3
    with pytest.raises(ZeroDivisionError):
        loop.run(loop.wait_for_thread(lambda: 1 // 0))


def make_resource(loop, *, state="READY"):
    """A resource that is borrowed, so that nothing is made; it is in this state for good."""

    async def retrieve(resource_id):
        return SimpleNamespace(
            status=f"MODEL_RESOURCES_STATUS_{state}",
            status_details=None,
            error=None,
            lora_enabled=True,
            compute_config=SimpleNamespace(num_generator_replicas=1),
        )

    client = SimpleNamespace(
        post_training=SimpleNamespace(model_resources=SimpleNamespace(retrieve=retrieve))
    )
    settings = SimpleNamespace(borrowed_id="mr-1", ready_timeout=None, keep_alive=0.0)
    return ModelResource(settings, client, loop, Notes())  # pyright: ignore


def test_a_resource_whose_replacement_failed_is_replaced_again(loop, monkeypatch) -> None:
    """And not once more by a session that lost the same one."""
    resource = make_resource(loop, state="STOPPED")
    resource._settings.borrowed_id = None  # pyright: ignore
    resource.id = "mr-1"
    opened = []

    def open_one():
        opened.append(resource.id)
        if len(opened) == 1:
            raise RemoteError("mr-2 is FAILED", code="lost", duty=DUTIES["RESOURCE_LOST"])
        resource.id = "mr-3"

    monkeypatch.setattr(resource, "_open", open_one)
    with pytest.raises(RemoteError, match="mr-2 is FAILED"):
        loop.run(resource.replace("mr-1"))
    assert resource.id is None
    loop.run(resource.replace("mr-1"))
    loop.run(resource.replace("mr-1"))
    assert resource.id == "mr-3" and opened == [None, None]


def test_closing_ends_the_wait_for_a_resource(loop) -> None:
    resource = make_resource(loop, state="PENDING")
    waiting = loop.start(loop.wait_for_thread(resource._open))
    time.sleep(0.1)
    resource.close()
    with pytest.raises(BackendError, match="closed"):
        waiting.result(10)
    with pytest.raises(BackendError, match="closed"):
        resource._open()
    assert resource.id is None
