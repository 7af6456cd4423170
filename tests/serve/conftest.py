"""Fixtures of tests that talk to a server."""

from collections.abc import Callable, Iterator

import pytest

from tests.serve.requests import Wire
from tests.serve.server import ServerProcess


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server over the tiny model that all tests of a process share."""
    with ServerProcess(tmp_path_factory.mktemp("server")) as running:
        yield running
        assert running.stop() == 0, running.log


@pytest.fixture
def wire(server: ServerProcess) -> Iterator[Wire]:
    client = Wire(server.url)
    yield client
    client.http.close()


@pytest.fixture
def new_session(server: ServerProcess, wire: Wire) -> Iterator[Callable[..., str]]:
    """A function that opens a session on a resource of its own; all stopped after the test."""
    made: list[str] = []

    def open_one(*, resource: str | None = None, **settings) -> str:
        if resource is None:
            resource = wire.resource(server.model)["id"]
            made.append(resource)
        session = wire.session(resource, **settings)
        assert session["status"].endswith("RUNNING"), session
        return session["id"]

    yield open_one
    for resource in made:
        wire.post(f"model-resources/{resource}/stop", force=True)
