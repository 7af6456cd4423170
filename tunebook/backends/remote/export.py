"""Folders of models that came from a service, complete with the tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


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
