"""Fixtures of tests of backend=baseten: servers, and backends on them."""

import signal
from collections.abc import Callable, Iterator

import pytest

from tests.backends.loops.server import LoopsServer
from tunebook.resources import Ledger

ALPHA = 8.0
"""What the server scales adapters by: that of the adapter of the contract."""
KEY = "bt_" + "Ab3" * 12


@pytest.fixture(scope="session", autouse=True)
def _sdk() -> None:
    pytest.importorskip("baseten.loops", reason="needs Python 3.12 with baseten: make test-loops")


@pytest.fixture(autouse=True)
def _own_ledger(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A home of the test's own, a key, and nothing that bills in the end."""
    monkeypatch.setenv("TUNEBOOK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("BASETEN_API_KEY", KEY)
    monkeypatch.delenv("LOOPS_BASE_URL", raising=False)
    yield
    assert Ledger.of_user().open_entries() == []


@pytest.fixture(scope="session")
def serverless(_sdk, tmp_path_factory) -> Iterator[LoopsServer]:
    """A server whose trainers are shared."""
    yield from _running(tmp_path_factory.mktemp("serverless"), "serverless")


@pytest.fixture(scope="session")
def dedicated(_sdk, tmp_path_factory) -> Iterator[LoopsServer]:
    """A server that gives each run a trainer and a sampler of its own."""
    yield from _running(tmp_path_factory.mktemp("dedicated"), "dedicated")


@pytest.fixture
def open_remote() -> Iterator[Callable]:
    """A function that makes a backend of a server, closed after the test."""
    from tunebook.backends.baseten import BasetenBackend

    opened: list[BasetenBackend] = []

    def open_one(server: LoopsServer, **settings) -> BasetenBackend:
        values = {
            "model": server.model,
            "service_model": server.model,
            "base_url": server.url,
            "lora_alpha": ALPHA,
        }
        opened.append(BasetenBackend(**{**values, **settings}))
        return opened[-1]

    yield open_one
    for backend in opened:
        backend.close()


def _running(home, capacity: str) -> Iterator[LoopsServer]:
    arguments = ["--capacity", capacity, "--alpha", str(ALPHA), "--key", KEY]
    with LoopsServer(home, extra=arguments) as server:
        yield server
        assert server.active_runs() == []
        # uvicorn ends in order, then lets the signal take its course.
        assert server.stop() == -signal.SIGTERM, server.log
