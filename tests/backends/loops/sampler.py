"""What a Loops sampler does, computed by the local engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.backends.loops.trainer import Trainer
from tunebook.backends.base import Generator
from tunebook.backends.local import LocalBackend
from tunebook.backends.local.session import LocalSession
from tunebook.types import CheckpointRef, SamplingParams

KEPT = 3
"""Checkpoints that stay open."""


class Sampler:
    """Samples from checkpoints, and from the base model."""

    def __init__(self, backend: LocalBackend, home: Path) -> None:
        self._backend = backend
        self._home = home
        self._open: dict[str | None, tuple[LocalSession, Generator]] = {}
        self.live: dict[str, tuple[int, str]] = {}
        """Run -> version and path of what it published last."""

    def sample(self, trainer: Trainer, path: str | None, body: Mapping[str, Any]) -> dict[str, Any]:
        """Completions of one prompt, as the sampler answers.

        Args:
            trainer: of the run.
            path: of the checkpoint; None = the base model.
            body: of the request.
        """
        params = SamplingParams(
            max_tokens=body["max_tokens"],
            temperature=body["temperature"],
            top_p=body["top_p"],
            top_k=body.get("top_k", 0),
            stop=tuple(body.get("stop") or body.get("stop_token_ids") or ()),
            seed=body.get("seed"),
        )
        generator = self._generator(trainer, path)
        [completions] = generator.sample([body["prompt"]], params, body["n"]).result()
        return {
            "choices": [
                {
                    "finish_reason": completion.stop_reason.value,
                    "logprobs": {
                        "tokens": [f"token_id:{token}" for token in completion.tokens.tolist()],
                        "token_logprobs": completion.logprobs.tolist(),
                    },
                }
                for completion in completions
            ]
        }

    def forget(self, path: str) -> None:
        """Drops what was saved under a path before."""
        if path in self._open:
            self._open.pop(path)[0].close()

    def _generator(self, trainer: Trainer, path: str | None) -> Generator:
        if path not in self._open:
            while len(self._open) >= KEPT:
                oldest = next(iter(self._open))
                self._open.pop(oldest)[0].close()
            restore = None
            if path is not None:
                folder = trainer.folder(path)
                restore = CheckpointRef(folder.name, str(folder), True)
            session = self._backend.open_session(
                f"sampler of {path}",
                trainer.lora(),
                directory=self._home / "sampler",
                restore=restore,
                with_optimizer=False,
            )
            self._open[path] = (session, session.publish_weights().result())
        return self._open[path][1]
