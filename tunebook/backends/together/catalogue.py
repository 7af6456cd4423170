"""What the service offers for one model, known before anything is made."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunebook.errors import ConfigError

if TYPE_CHECKING:
    from together import Together


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to train a model."""

    max_seq_len: int
    """Tokens."""
    max_rank: int | None
    """Of an adapter; None = it has none."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What can be done with a model."""

    lora: Mode | None
    """None = no adapters."""
    full: Mode | None
    """None = no full weights."""
    generator: bool
    """Whether it can be made to sample."""

    @property
    def max_seq_len(self) -> int | None:
        """Tokens that every way to train it takes."""
        return min((mode.max_seq_len for mode in (self.lora, self.full) if mode), default=None)


def read_offer(client: Together, model: str, *, gpu_type: str | None) -> Offer:
    """What the service offers for a model.

    Args:
        client: of the service.
        model: as the service calls it.
        gpu_type: to be asked for; None = the model's own.

    Raises:
        ConfigError: it has no such model, or not on these GPUs.
    """
    models = client.post_training.supported_models.get().data or []
    found = next((each for each in models if each.base_model == model), None)
    if found is None:
        names = [each.base_model for each in models]
        close = difflib.get_close_matches(model, names, n=3, cutoff=0.5) or names[:10]
        raise ConfigError(
            f"backend.model={model}: the service does not train it. It has "
            f"{', '.join(close) or 'none'}{' and others' if len(names) > len(close) else ''}; set "
            "backend.model to the service's name of model.name"
        )
    wanted = gpu_type or found.default_gpu_type
    configs: list[Any] = list(found.compute_configs or [])
    config = next((each for each in configs if each.gpu_type == wanted), None)
    if config is None:
        raise ConfigError(
            f"backend.gpu_type={wanted}: {model} is trained on "
            f"{', '.join(each.gpu_type for each in configs) or 'nothing'}"
        )
    trainer = config.trainer_config
    lora, full = (trainer.lora, trainer.full) if trainer else (None, None)
    return Offer(
        lora=Mode(lora.max_seq_length, lora.max_rank) if lora else None,
        full=Mode(full.max_seq_length, None) if full else None,
        generator=config.generator_config is not None,
    )
