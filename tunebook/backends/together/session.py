"""One adapter (or the full weights) being trained on the service."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunebook.backends.base import Future
from tunebook.backends.remote.link import Finish
from tunebook.backends.remote.queue import Operation
from tunebook.backends.remote.session import RemoteSession
from tunebook.backends.together.link import TogetherLink
from tunebook.errors import BackendError
from tunebook.types import CheckpointRef


class TogetherSession(RemoteSession):
    """One session on the service; see `tunebook.backends.base.Session`."""

    def __init__(
        self,
        *arguments: Any,
        download: Callable[[str, Path], Path],
        open_at: Callable[[CheckpointRef], TogetherSession],
        **settings: Any,
    ) -> None:
        """
        Args:
            arguments: of `RemoteSession`.
            download: writes an inference checkpoint into a folder; returns it.
            open_at: opens another session at a checkpoint.
            settings: of `RemoteSession`.
        """
        super().__init__(*arguments, **settings)
        self._download = download
        self._open_at = open_at

    def export(self, ref: CheckpointRef, directory: Path) -> Path:
        """Downloads the weights of a checkpoint; see `Session.export`.

        Only what a session holds can be made a download, so where this one has gone on since,
        another one is opened at the checkpoint.
        """
        if (ref.location, self._num_changes) != self._at:
            if self._lora is None:
                raise BackendError(
                    f"{ref.name}: the weights of a full-weight checkpoint can be downloaded only "
                    "from a session that was opened at it; open one with restore="
                )
            other = self._open_at(ref)
            try:
                return other.export(ref, directory)
            finally:
                other.close()

        async def start(link: TogetherLink) -> Finish:
            return await link.inference_checkpoint()

        made: Future[str] = self._queue.call(Operation("export", start, changes=False))
        return self._download(made.result(), directory)

    def discard(self, ref: CheckpointRef) -> None:
        """Does nothing: the service has no call that deletes a checkpoint."""
        del ref
