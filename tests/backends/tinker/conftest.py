"""Fixtures of the tests of `backend=tinker`: one server, and backends on it."""

from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("tinker", minversion="0.38", reason="needs the extra tinker")

from tests.backends.tinker.process import TinkerProcess
from tests.serve.server import TINY
from tunebook.backends.local import LocalBackend
from tunebook.backends.tinker import TinkerBackend


@pytest.fixture(autouse=True)
def _own_settings(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home of the test's own, no key and no address."""
    monkeypatch.setenv("TUNEBOOK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "TINKER_CREDENTIAL_CMD"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def tinker_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerProcess]:
    """A server over the built-in model."""
    running = TinkerProcess(tmp_path_factory.mktemp("tinker"))
    yield running
    running.stop()


@pytest.fixture
def open_tinker(tinker_server: TinkerProcess) -> Iterator[Callable[..., TinkerBackend]]:
    """A function that makes a backend of the server, closed after the test."""
    opened: list[TinkerBackend] = []

    def open_one(**settings) -> TinkerBackend:
        values = {"model": TINY, "service_model": TINY, "base_url": tinker_server.url}
        backend = TinkerBackend(**{**values, **settings})
        opened.append(backend)
        return backend

    yield open_one
    for backend in opened:
        backend.close()


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The SDK leaves the connection open that it reads its settings over."""
    leak = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    for item in items:
        if "/tinker/" in item.path.as_posix():
            item.add_marker(leak)
