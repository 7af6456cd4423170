"""Fixtures of the tests of backends that are services: one server, and backends on it."""

from collections.abc import Callable, Iterator

import pytest

from tests.serve.server import TINY, ServerProcess
from tunebook.backends.local import LocalBackend
from tunebook.backends.together import TogetherBackend
from tunebook.backends.together.service import TogetherService
from tunebook.resources import Ledger


@pytest.fixture(autouse=True)
def _own_ledger(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A home of the test's own, no key, and nothing that bills in the end."""
    monkeypatch.setenv("TUNEBOOK_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TOGETHER_API_KEY", raising=False)
    monkeypatch.delenv("TOGETHER_BASE_URL", raising=False)
    yield
    assert Ledger.of_user().open_entries() == []


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server over the built-in model."""
    with ServerProcess(
        tmp_path_factory.mktemp("server"), extra=["--price-per-hour", "3"]
    ) as running:
        yield running
        assert running.stop() == 0, running.log


@pytest.fixture(scope="session")
def resource_id(server: ServerProcess) -> str:
    """A resource on the server to attach to."""
    service = TogetherService(server.url)
    what = {
        "base_model": TINY,
        "lora_enabled": True,
        "compute_config": {"num_generator_replicas": 1},
    }
    return service.create(what).id


@pytest.fixture
def open_remote(server: ServerProcess) -> Iterator[Callable[..., TogetherBackend]]:
    """A function that makes a backend of the server, closed after the test."""
    opened: list[TogetherBackend] = []

    def open_one(**settings) -> TogetherBackend:
        backend = remote_backend(server, **settings)
        opened.append(backend)
        return backend

    yield open_one
    for backend in opened:
        backend.close()


@pytest.fixture
def attach(open_remote, resource_id: str) -> Callable[..., TogetherBackend]:
    """The same on the resource that tests share: there is nothing to make and to stop."""

    def attach_one(**settings) -> TogetherBackend:
        return open_remote(model_resources_id=resource_id, **settings)

    return attach_one


@pytest.fixture
def open_local() -> Iterator[Callable[..., LocalBackend]]:
    """The same on the backend that the server computes with."""
    opened: list[LocalBackend] = []

    def open_one(**settings) -> LocalBackend:
        backend = LocalBackend(model=TINY, device="cpu", **settings)
        opened.append(backend)
        return backend

    yield open_one
    for backend in opened:
        backend.close()


def remote_backend(server: ServerProcess, **settings) -> TogetherBackend:
    """A backend of a server."""
    values = {
        "model": server.model,
        "service_model": server.model,
        "base_url": server.url,
        "generator_replicas": 1,
    }
    return TogetherBackend(**{**values, **settings})
