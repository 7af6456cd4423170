"""What the service offers for one model and what it has of it, known before anything is made."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from tunebook.backends.baseten.service import BasetenService, NotThere
from tunebook.backends.remote.places import check_on_service
from tunebook.errors import CheckpointError, ConfigError
from tunebook.types import CheckpointRef, LoraConfig

PLACE_EXAMPLE = "bt://loops:<run>/weights/<name>"
"""What a training checkpoint is called there."""
TRAINER = "trainer"
"""Target of the checkpoints that a run can begin from."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on the service."""

    id: str
    base_model: str
    rank: int
    target: str | None


class Catalogue:
    """Asks the service; makes nothing."""

    def __init__(self, service: BasetenService, model: str) -> None:
        """
        Args:
            service: that is asked.
            model: as it calls it.
        """
        self.service = service
        self.model = model
        self._asked = False
        self._max_seq_len: int | None = None

    def max_seq_len(self) -> int | None:
        """Tokens that the model takes there; None = the service does not say. Asked once.

        Raises:
            ConfigError: the service does not train it.
        """
        if not self._asked:
            models = self.service.ask("/v1/loops/capabilities")["supported_models"]
            found = next((each for each in models if each["model_name"] == self.model), None)
            if found is None:
                names = [each["model_name"] for each in models]
                close = difflib.get_close_matches(self.model, names, n=3, cutoff=0.5) or names[:10]
                raise ConfigError(
                    f"backend.model={self.model}: the service does not train it. It has "
                    f"{', '.join(close) or 'none'}; set backend.model to its name of model.name"
                )
            self._max_seq_len = found.get("max_context_length")
            self._asked = True
        return self._max_seq_len

    def checkpoint(self, place: str) -> Checkpoint:
        """The checkpoint of a `bt://` path.

        Raises:
            CheckpointError: there is none, or not for this key.
        """
        try:
            found = self.service.ask("/v1/loops/checkpoints", query={"checkpoint_path": place})
        except NotThere:
            found = {"checkpoints": []}
        if not found["checkpoints"]:
            raise CheckpointError(
                f"{place}: the service has no such checkpoint, or not for this key"
            )
        [one, *_] = found["checkpoints"]
        return Checkpoint(
            id=one["id"],
            base_model=one["base_model"],
            rank=one["lora_adapter_config"]["r"],
            target=one.get("target"),
        )

    def check_start(self, start: CheckpointRef, lora: LoraConfig) -> None:
        """Returns if a session can begin from a checkpoint.

        Raises:
            CheckpointError: it is not there, or does not fit.
        """
        place = start.location
        check_on_service(start, PLACE_EXAMPLE)
        found = self.checkpoint(place)
        if found.target not in (None, TRAINER):
            raise CheckpointError(
                f"{place}: it is for a sampler; a session begins from a training checkpoint only, "
                "bt://loops:<run>/weights/<name>"
            )
        if found.base_model != self.model:
            raise CheckpointError(f"{place}: it is of {found.base_model}, not of {self.model}")
        if found.rank != lora.rank:
            raise CheckpointError(
                f"{place}: it has an adapter of rank {found.rank}, the config asks for {lora.rank}"
            )
