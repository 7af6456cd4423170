"""Fixtures of the backend tests."""

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.backends.tiny import Models, write_model
from tunebook.backends.local import LocalBackend


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    return Models(
        untied=write_model(folder / "untied", seed=0, tied=False),
        tied=write_model(folder / "tied", seed=0, tied=True),
        other=write_model(folder / "other", seed=1, tied=False),
    )


@pytest.fixture
def open_backend(tiny: Models) -> Iterator[Callable[..., LocalBackend]]:
    """A function that opens a local backend on the untied model, closed after the test."""
    opened: list[LocalBackend] = []

    def open_one(**settings) -> LocalBackend:
        backend = LocalBackend(**{"model": tiny.untied, "device": "cpu", **settings})
        opened.append(backend)
        return backend

    yield open_one
    for backend in opened:
        backend.close()
