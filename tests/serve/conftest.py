"""Fixtures of tests that talk to a server."""

from collections.abc import Iterator

import pytest

from tests.serve.server import ServerProcess


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server over the tiny model that all tests of a process share."""
    with ServerProcess(tmp_path_factory.mktemp("server")) as running:
        yield running
        assert running.stop() == 0, running.log
