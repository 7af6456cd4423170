"""What the service offers for one model, known before anything is made."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunebook.backends.remote.places import check_on_service
from tunebook.backends.together.service import TogetherService, make_client, service_errors
from tunebook.errors import CheckpointError, ConfigError
from tunebook.types import CheckpointRef, LoraConfig

if TYPE_CHECKING:
    from together import Together

PLACE_EXAMPLE = "together://<id of a training checkpoint>"
"""What a training checkpoint is called there."""


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


class Catalogue:
    """Asks the service, each thing once; makes nothing."""

    def __init__(
        self,
        service: TogetherService,
        model: str,
        *,
        gpu_type: str | None,
        borrowed_id: str | None,
        generator_replicas: int,
    ) -> None:
        """
        Args:
            service: that is asked.
            model: as it calls it.
            gpu_type: of a resource that would be made; None = the model's own.
            borrowed_id: a resource to attach to; None = none.
            generator_replicas: of a resource that would be made.
        """
        self.service = service
        self.model = model
        self._gpu_type = gpu_type
        self._borrowed_id = borrowed_id
        self._generator_replicas = generator_replicas
        self._offer: Offer | None = None
        self._borrowed: Any = None
        self._prices: dict[bool, tuple[float, str]] = {}
        """By whether it is for adapters."""

    def offer(self) -> Offer:
        """What the service offers for the model.

        Raises:
            ConfigError: it does not train it.
        """
        if self._offer is None:
            with self.asking() as client:
                self._offer = _read_offer(client, self.model, gpu_type=self._gpu_type)
        return self._offer

    def borrowed(self) -> Any:
        """The resource that is borrowed.

        Raises:
            ConfigError: it is of another model.
        """
        if self._borrowed is None:
            with self.asking() as client:
                found = client.post_training.model_resources.retrieve(str(self._borrowed_id))
            if found.base_model != self.model:
                raise ConfigError(
                    f"backend.model_resources_id={self._borrowed_id}: it trains "
                    f"{found.base_model}, not {self.model}"
                )
            self._borrowed = found
        return self._borrowed

    def price_per_hour(self, lora: bool) -> tuple[float, str]:
        """What an hour of a resource costs, and the currency."""
        if lora not in self._prices:
            replicas, gpu_type = self._generator_replicas, self._gpu_type
            if self._borrowed_id is not None:
                compute = self.borrowed().compute_config
                replicas, gpu_type = compute.num_generator_replicas, compute.gpu_type
            with self.asking() as client:
                found = client.post_training.model_resources.estimate_cost(
                    base_model=self.model,
                    compute_config=compute_config(replicas, gpu_type),
                    lora_enabled=lora,
                )
            self._prices[lora] = (found.price_per_hour, found.currency)
        return self._prices[lora]

    def check_start(self, start: CheckpointRef, lora: LoraConfig | None) -> None:
        """Returns if a session can begin from a checkpoint.

        Raises:
            CheckpointError: it is not there, or does not fit.
        """
        check_on_service(start, PLACE_EXAMPLE)
        from together import NotFoundError

        with self.asking() as client:
            try:
                found = client.post_training.checkpoints.retrieve(start.location)
            except NotFoundError as error:
                raise CheckpointError(
                    f"{start.location}: the service has no such checkpoint, or not for this key"
                ) from error
        rank = None if lora is None else lora.rank
        if found.type != "CHECKPOINT_TYPE_TRAINING":
            raise CheckpointError(
                f"{start.location}: it is for inference; a session begins from a training "
                "checkpoint only"
            )
        if found.base_model != self.model:
            raise CheckpointError(
                f"{start.location}: it is of {found.base_model}, not of {self.model}"
            )
        if found.lora_rank != rank:
            raise CheckpointError(
                f"{start.location}: it has {_rank_text(found.lora_rank)}, the config asks for "
                f"{_rank_text(rank)}"
            )

    @contextmanager
    def asking(self) -> Iterator[Together]:
        """A client of the service, whose errors are ours."""
        with make_client(self.service.base_url) as client, service_errors(self.service.base_url):
            yield client


def compute_config(generator_replicas: int, gpu_type: str | None) -> Any:
    """What a resource is to be made of, as the service takes it.

    Args:
        generator_replicas: of the sampler; 0 = none.
        gpu_type: None = the model's own.
    """
    return {
        "num_generator_replicas": generator_replicas,
        **({"gpu_type": gpu_type} if gpu_type else {}),
    }


def _read_offer(client: Together, model: str, *, gpu_type: str | None) -> Offer:
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


def _rank_text(rank: int | None) -> str:
    return "full weights" if rank is None else f"an adapter of rank {rank}"
