"""What the backends of all services share: the book of their sessions, and how they end."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from tunebook.backends.remote.places import check_on_service
from tunebook.backends.remote.session import RemoteSession
from tunebook.errors import BackendError
from tunebook.runs.attempts import shielded
from tunebook.types import CheckpointRef, LoraConfig

Base = tuple[str | None, bool]
"""The place of a checkpoint that a session begins from (None = fresh weights), and whether the
optimizer's state is loaded too."""


class RemoteBackend(ABC):
    """Sessions of a service by name; see `tunebook.backends.base.Backend`."""

    def __init__(self, *, place_example: str) -> None:
        """
        Args:
            place_example: what a checkpoint on the service is called, for error messages.
        """
        self._place_example = place_example
        self._sessions: dict[str, RemoteSession] = {}
        self._opening = threading.RLock()
        """Sweeps open sessions in several threads; what all share is made once."""
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def open_session(
        self,
        name: str,
        lora: LoraConfig | None,
        *,
        directory: Path,
        restore: CheckpointRef | None = None,
        with_optimizer: bool = True,
    ) -> RemoteSession:
        lora = self._adapter(lora)
        if restore is not None:
            check_on_service(restore, self._place_example)
        with self._opening:
            if self._closed:
                raise BackendError("this backend is closed")
            if name in self._sessions:
                raise BackendError(f"a session called {name!r} is open already; give another name")
            base = (restore.location if restore else None, with_optimizer)
            session = self._sessions[name] = self._open(name, lora, directory, base)
            if self._closed:  # meanwhile, by another thread, which need not have seen it
                session.close()
                raise BackendError("this backend is closed")
            return session

    def close(self) -> None:
        """Ends all sessions and what they share; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        with shielded(), ExitStack() as stack:  # a second Ctrl-C waits for it
            stack.callback(self._close_shared)
            for session in list(self._sessions.values()):  # each leaves the book as it ends
                stack.callback(session.close)

    def _opener_at(
        self, name: str, lora: LoraConfig | None, directory: Path
    ) -> Callable[[CheckpointRef], RemoteSession]:
        """What opens a session beside another one, with the weights of a checkpoint of it."""

        def open_at(ref: CheckpointRef) -> RemoteSession:
            return self.open_session(
                f"{name} at {ref.name}",
                lora,
                directory=directory,
                restore=ref,
                with_optimizer=False,
            )

        return open_at

    @abstractmethod
    def _adapter(self, lora: LoraConfig | None) -> LoraConfig | None:
        """An adapter as the service makes it.

        Raises:
            ConfigError: it makes none like this.
        """

    @abstractmethod
    def _open(
        self, name: str, lora: LoraConfig | None, directory: Path, base: Base
    ) -> RemoteSession: ...

    @abstractmethod
    def _close_shared(self) -> None:
        """Ends what sessions share; they are closed."""
