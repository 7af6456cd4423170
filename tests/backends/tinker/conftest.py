"""Fixtures of the tests of `backend=tinker`: one server, and backends on it."""

import gc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.backends.tinker.process import TinkerProcess
from tests.serve.server import TINY
from tunebook.backends.local import LocalBackend
from tunebook.backends.tinker import TinkerBackend


def need_sdk() -> None:
    """Skips what is not run in an environment with the extra `tinker`."""
    pytest.importorskip("tinker", minversion="0.38", reason="needs the extra tinker")


@pytest.fixture(autouse=True)
def _own_settings(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A home of the test's own, no key and no address; and no connections that are left open.

    The SDK leaves the one open that it reads its settings over. Where it is collected later, in
    the midst of something else, the warning about it is an error there.
    """
    need_sdk()
    monkeypatch.setenv("TUNEBOOK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "TINKER_CREDENTIAL_CMD"):
        monkeypatch.delenv(name, raising=False)
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="session")
def tinker_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerProcess]:
    """A server over the built-in model."""
    need_sdk()
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
    """See `_own_settings`."""
    leaks = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(leaks)
