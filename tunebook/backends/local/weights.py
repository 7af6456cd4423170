"""What a session trains: the weights of an adapter, or all weights of the model."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from tunebook.backends.local.base_model import BaseModel
from tunebook.backends.local.engine.adapters import (
    AppliedAdapter,
    applied_adapter,
    gradients_of,
)
from tunebook.backends.local.engine.decoder import Decoder
from tunebook.backends.local.logprobs import replayed
from tunebook.backends.local.lora import LoraLayer, adapter_targets, check_lora, check_reached
from tunebook.errors import NonFiniteError
from tunebook.types import LoraConfig

LORA_A, LORA_B = ".lora_A", ".lora_B"


class TrainedWeights(Protocol):
    """The parameters of one session and how they take part in a forward pass."""

    @property
    def lora(self) -> LoraConfig | None:
        """The adapter's config; None for full weights."""
        ...

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Name -> parameter, float32."""
        ...

    @property
    def generator(self) -> torch.Generator | None:
        """Draws dropout; None where nothing is random."""
        ...

    def applied(
        self, *, dropout: bool, values: Mapping[str, Tensor] | None = None
    ) -> AbstractContextManager[None]:
        """The context in which the base model computes with these weights.

        Args:
            dropout: draw dropout (training), or none.
            values: name -> tensor to compute with instead of the parameters themselves.
        """
        ...

    def replay(self) -> AbstractContextManager[None]:
        """A context for a later moment that draws the dropout that would be drawn now."""
        ...

    def collect_gradients(self) -> None:
        """Makes what has been summed since the last `drop_gradients` the parameters' gradient."""
        ...

    def drop_gradients(self) -> None:
        """Forgets all gradients."""
        ...


class AdapterWeights:
    """The float32 master weights of one LoRA adapter over a frozen base."""

    def __init__(self, base: BaseModel, config: LoraConfig) -> None:
        check_lora(config)
        targets = adapter_targets(base.model, base.head, config.target_modules)
        self.lora: LoraConfig | None = config
        self.layers = {name: LoraLayer(name, module, config) for name, module in targets.items()}
        self.parameters: dict[str, nn.Parameter] = {}
        for name, layer in self.layers.items():
            self.parameters[name + LORA_A] = layer.lora_a
            self.parameters[name + LORA_B] = layer.lora_b
        self.generator: torch.Generator | None = None
        if config.dropout > 0:
            self.generator = torch.Generator(base.device).manual_seed(config.seed)
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=base.device)
        with torch.no_grad(), base.computing():
            check_reached(
                self.layers,
                lambda: base.model(input_ids=tokens, use_cache=False),
                model_name=base.name,
            )

    @contextmanager
    def applied(
        self, *, dropout: bool, values: Mapping[str, Tensor] | None = None
    ) -> Iterator[None]:
        source = self.parameters if values is None else values
        handles = [
            layer.module.register_forward_hook(
                layer.hook(
                    lora_a=source[name + LORA_A],
                    lora_b=source[name + LORA_B],
                    generator=self.generator if dropout else None,
                )
            )
            for name, layer in self.layers.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _nothing_random(self) -> Iterator[None]:
        yield

    def replay(self) -> AbstractContextManager[None]:
        if self.generator is None:
            return self._nothing_random()
        return replayed(self.generator, self.generator.get_state())

    def applied_to(
        self, decoder: Decoder, values: Mapping[str, Tensor] | None = None
    ) -> AppliedAdapter:
        """The adapter as the fast path computes with it.

        Args:
            decoder: of the base.
            values: name -> tensor to compute with instead of the parameters themselves.
        """
        source = self.parameters if values is None else values
        return applied_adapter(
            decoder,
            {name: (source[name + LORA_A], source[name + LORA_B]) for name in self.layers},
            {name: layer.scale for name, layer in self.layers.items()},
        )

    def add_gradients(self, adapter: AppliedAdapter) -> None:
        """Adds what the fast path has summed, and makes the sums the parameters' gradient.

        A gradient of 0 is one, too: an optimizer moves by its momentum and decays the weights.
        """
        found = gradients_of(adapter)
        for name, layer in self.layers.items():
            zeros = (torch.zeros_like(layer.lora_a), torch.zeros_like(layer.lora_b))
            layer.add_gradient(*found.get(name, zeros))
        self.collect_gradients()

    def collect_gradients(self) -> None:
        for layer in self.layers.values():
            layer.collect_gradient()

    def drop_gradients(self) -> None:
        for layer in self.layers.values():
            layer.drop_gradient()
        for parameter in self.parameters.values():
            parameter.grad = None


class FullWeights:
    """All parameters of the base model; tied ones once."""

    def __init__(self, base: BaseModel) -> None:
        self.lora: LoraConfig | None = None
        self.generator: torch.Generator | None = None
        self.parameters: dict[str, nn.Parameter] = dict(base.model.named_parameters())
        for parameter in self.parameters.values():
            assert parameter.dtype == torch.float32
            parameter.requires_grad_(True)

    @contextmanager
    def applied(
        self, *, dropout: bool, values: Mapping[str, Tensor] | None = None
    ) -> Iterator[None]:
        del dropout  # The base model's own dropout stays off: it is in evaluation mode.
        if values is None:
            yield
            return
        current = {name: parameter.data for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            parameter.data = values[name]
        try:
            yield
        finally:
            for name, parameter in self.parameters.items():
                parameter.data = current[name]

    @contextmanager
    def replay(self) -> Iterator[None]:
        yield

    def collect_gradients(self) -> None:
        """Nothing to do: autograd has summed them."""

    def drop_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None


def snapshot(weights: TrainedWeights) -> dict[str, Tensor]:
    """Copies of all parameters as they are now."""
    return {name: value.detach().clone() for name, value in weights.parameters.items()}


def layer_names(weights: TrainedWeights) -> tuple[str, ...]:
    """Names of the layers that carry an adapter; none for full weights."""
    return tuple(weights.layers) if isinstance(weights, AdapterWeights) else ()


def check_finite(weights: TrainedWeights, *, action: str) -> None:
    """Returns if no parameter holds NaN or infinity.

    Raises:
        NonFiniteError: naming the first such parameter.
    """
    for name, parameter in weights.parameters.items():
        if not torch.isfinite(parameter.detach()).all():
            raise NonFiniteError(
                f"refusing to {action}: the weight {name} holds NaN or infinite values"
            )
