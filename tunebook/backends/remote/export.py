"""Folders of models that came from a service, complete with the tokenizer."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tunebook.notices import Notes

ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """Where the tokenizer of a model is; see `tunebook.models.load_tokenizer`."""

    name: str
    revision: str | None
    chat_template: str | None
    trust_remote_code: bool

    @contextmanager
    def completing(self, directory: Path) -> Iterator[Path]:
        """A temporary folder to fill; with the tokenizer it then takes the place of `directory`."""
        from tunebook.backends.local.checkpoint import replaced_folder
        from tunebook.models import load_tokenizer

        tokenizer = load_tokenizer(
            self.name,
            revision=self.revision,
            chat_template=self.chat_template,
            trust_remote_code=self.trust_remote_code,
        )
        with replaced_folder(directory, num_bytes=0) as temporary:
            yield temporary
            tokenizer.save_pretrained(temporary)


def note_other_alpha(
    notes: Notes, directory: Path, alpha: float | None, *, expected: float
) -> None:
    """Notes it where a service has trained an adapter with another alpha than was assumed.

    Args:
        notes: of the backend.
        directory: where the adapter is.
        alpha: of the adapter; None = it names none.
        expected: `backend.lora_alpha`.
    """
    if alpha is not None and not math.isclose(alpha, expected):
        notes.add(
            "lora_alpha_differs",
            f"the adapter in {os.path.relpath(directory)} has alpha {alpha:g}, not "
            f"backend.lora_alpha={expected:g}, so that is what the service trained with; correct "
            "the setting",
            alpha=alpha,
        )


def alpha_of(directory: Path) -> float | None:
    """The alpha of a PEFT adapter; None = it names none."""
    config = json.loads((directory / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    return config.get("lora_alpha")
