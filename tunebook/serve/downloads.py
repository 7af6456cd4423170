"""Files of inference checkpoints that clients download."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from tunebook.serve.errors import ApiError, invalid, not_found
from tunebook.serve.execution import ADAPTER, MERGED
from tunebook.serve.payloads import Payloads
from tunebook.serve.records import Checkpoint
from tunebook.serve.state import State

VARIANTS = {"CHECKPOINT_VARIANT_MERGED": MERGED, "CHECKPOINT_VARIANT_ADAPTER": ADAPTER}


class Downloads:
    """The files of a checkpoint: its adapter, or the base with the adapter merged into it."""

    def __init__(self, state: State, payloads: Payloads, model: dict[str, Any]) -> None:
        """Takes the server's parts.

        Args:
            state: of the server.
            payloads: signs addresses.
            model: what `merge_adapter` is told of the base.
        """
        self._state = state
        self._payloads = payloads
        self._model = model
        self._merging = threading.Lock()

    def files(self, checkpoint: Checkpoint, variant: str | None) -> list[dict[str, Any]]:
        """Name, size and address of every file; a merged model is made when first asked for.

        Raises:
            ApiError: the checkpoint has no such variant.
        """
        if variant is None:
            variant = "CHECKPOINT_VARIANT_MERGED"
        if variant not in VARIANTS:
            raise invalid("variant", f"is {variant[:60]!r}, must be one of {', '.join(VARIANTS)}")
        if checkpoint.for_training:
            raise invalid(
                "id", "is of a training checkpoint; only inference checkpoints have files"
            )
        name = VARIANTS[variant]
        folder = self._folder(checkpoint, name)
        if name == MERGED:
            self._merge(checkpoint, folder)
        if not folder.is_dir():
            raise invalid("variant", "full-weight training has no adapter; ask for MERGED")
        now = self._state.settings.now()
        return [
            {
                "filename": path.name,
                "size": str(path.stat().st_size),
                "url": self._payloads.address(f"file/{checkpoint.id}/{name}/{path.name}", now),
            }
            for path in sorted(folder.iterdir())
            if path.is_file()
        ]

    def path(self, checkpoint: Checkpoint | None, variant: str, file: str) -> Path:
        """A file that `files` has listed.

        Raises:
            ApiError: it is gone.
        """
        if checkpoint is not None and variant in VARIANTS.values():
            for path in self._folder(checkpoint, variant).iterdir():
                if path.name == file and path.is_file():
                    return path
        raise not_found("file", file)

    def _folder(self, checkpoint: Checkpoint, variant: str) -> Path:
        return (self._state.settings.home / checkpoint.folder).parent / variant

    def _merge(self, checkpoint: Checkpoint, folder: Path) -> None:
        from tunebook.backends.local.export import merge_adapter

        with self._merging:
            if folder.is_dir():
                return
            adapter = self._folder(checkpoint, ADAPTER)
            if not adapter.is_dir():
                raise ApiError(404, "the files of this checkpoint are gone", code="not_found")
            merge_adapter(adapter=adapter, directory=folder, **self._model)
