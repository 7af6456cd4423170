"""Our own LoRA layer: a low-rank update added to the output of a linear layer by a forward hook.

The modules of the base model are never replaced or changed, so any number of adapters can share one
base, and a tied output head can carry an adapter that the embedding does not see.
Source: arXiv:2106.09685, equation 3.
Legend: R rank, I input features, O output features.
"""

import difflib
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tunebook.backends.local.engine.adapters import sum_dtype
from tunebook.backends.local.stream import ROW_LENGTHS
from tunebook.errors import ConfigError
from tunebook.types import LoraConfig

ALL_LINEAR = "all-linear"


class LoraLayer:
    """The update `scale * B A` of one linear layer."""

    def __init__(self, name: str, module: nn.Module, config: LoraConfig) -> None:
        weight = module.weight
        assert isinstance(weight, Tensor)
        num_out, num_in = features_of(module)
        self.name = name
        self.module = module
        self.scale = config.scale
        self.dropout = config.dropout
        # Masters are float32 whatever the base is; the product runs in the base's dtype.
        initial_a = initial_lora_a(name, (config.rank, num_in), seed=config.seed)
        self.lora_a = nn.Parameter(initial_a.to(weight.device))
        self.lora_b = nn.Parameter(torch.zeros(num_out, config.rank, device=weight.device))
        self.gradient_a: Tensor | None = None
        """`[R, I]` float64, the gradient summed over the streams since it was last dropped."""
        self.gradient_b: Tensor | None = None
        """`[O, R]` float64"""

    def hook(
        self, *, lora_a: Tensor, lora_b: Tensor, generator: torch.Generator | None
    ) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]:
        """A forward hook that adds the update.

        Args:
            lora_a: `[R, I]`
            lora_b: `[O, R]`
            generator: draws the dropout mask; None = no dropout.
        """

        def add_update(_module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            inputs = args[0]
            a, b = lora_a.to(inputs.dtype), lora_b.to(inputs.dtype)
            if generator is not None:
                inputs = dropped_out(inputs, share=self.dropout, generator=generator)
            lengths = row_lengths(inputs)
            if lengths is not None and torch.is_grad_enabled() and lora_a.requires_grad:
                updated = StreamUpdate.apply(output, inputs, a, b, self, lengths)
                assert isinstance(updated, Tensor)
                return updated
            low_rank = F.linear(inputs, a)
            return torch.addmm(
                output.flatten(0, -2), low_rank.flatten(0, -2), b.t(), alpha=self.scale
            ).view_as(output)

        return add_update

    def add_gradient(self, gradient_a: Tensor, gradient_b: Tensor) -> None:
        """Adds the gradient of one row."""
        if self.gradient_a is None or self.gradient_b is None:
            dtype = sum_dtype(self.lora_a.device)
            self.gradient_a = torch.zeros_like(self.lora_a, dtype=dtype)
            self.gradient_b = torch.zeros_like(self.lora_b, dtype=dtype)
        self.gradient_a += gradient_a
        self.gradient_b += gradient_b

    def collect_gradient(self) -> None:
        """Makes the summed gradient that of the parameters."""
        if self.gradient_a is not None and self.gradient_b is not None:
            self.lora_a.grad = self.gradient_a.float()
            self.lora_b.grad = self.gradient_b.float()

    def drop_gradient(self) -> None:
        """Forgets the gradient."""
        self.gradient_a = self.gradient_b = None


class StreamUpdate(torch.autograd.Function):
    """`output + scale * inputs A^T B^T` over a stream, with a gradient that rows cannot disturb.

    The gradient of A and B is computed row by row and summed in float64, so it is the same to the
    last bit whichever rows shared a stream: float32 sums in another order differ in the last bits,
    and where a gradient is near Adam's epsilon, Adam turns these into a visible difference.
    """

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        inputs: Tensor,
        lora_a: Tensor,
        lora_b: Tensor,
        layer: LoraLayer,
        lengths: Sequence[int],
    ) -> Tensor:
        low_rank = F.linear(inputs.flatten(0, -2), lora_a)
        ctx.save_for_backward(inputs, low_rank, lora_a, lora_b)
        ctx.layer, ctx.lengths = layer, list(lengths)
        updated = torch.addmm(output.flatten(0, -2), low_rank, lora_b.t(), alpha=layer.scale)
        return updated.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        inputs, low_rank, lora_a, lora_b = ctx.saved_tensors
        scaled = gradient.flatten(0, -2) * ctx.layer.scale
        gradient_low = scaled @ lora_b
        rows = zip(
            inputs.flatten(0, -2).split(ctx.lengths),
            low_rank.split(ctx.lengths),
            scaled.split(ctx.lengths),
            gradient_low.split(ctx.lengths),
            strict=True,
        )
        for inputs_row, low_row, scaled_row, gradient_low_row in rows:
            ctx.layer.add_gradient(gradient_low_row.t() @ inputs_row, scaled_row.t() @ low_row)
        gradient_inputs = None
        if ctx.needs_input_grad[1]:
            gradient_inputs = (gradient_low @ lora_a).view_as(inputs)
        return gradient, gradient_inputs, None, None, None, None


def row_lengths(inputs: Tensor) -> tuple[int, ...] | None:
    """Tokens of each row if `inputs` are a whole stream, else None.

    On an accelerator a stream counts as one row: there, products of other sizes are computed
    otherwise anyway, and many small ones are slow.
    """
    lengths = ROW_LENGTHS.get(None)
    if lengths is None or sum(lengths) != inputs.numel() // inputs.shape[-1]:
        return None
    return lengths if inputs.device.type == "cpu" else (sum(lengths),)


def initial_lora_a(name: str, shape: tuple[int, int], *, seed: int) -> Tensor:
    """The initial A: Kaiming-uniform with a = sqrt(5), that is uniform in +-1/sqrt(I).

    Drawn from a generator of its own for each layer, so neither the global random state nor the
    order of the modules matters.

    Args:
        name: of the layer.
        shape: `(R, I)`.
        seed: `lora.seed`.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    bound = 1 / math.sqrt(shape[1])
    return (2 * torch.rand(shape, generator=generator) - 1) * bound


def dropped_out(inputs: Tensor, *, share: float, generator: torch.Generator) -> Tensor:
    """`inputs` with a random share of values zeroed and the others scaled up to make up for it."""
    keep = torch.empty_like(inputs).bernoulli_(1 - share, generator=generator)
    return inputs * keep / (1 - share)


def features_of(module: nn.Module) -> tuple[int, int]:
    """Output and input features of a linear layer, whose weight may be quantised and packed."""
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    # GPT-2's Conv1D stores the transpose.
    weight = module.weight
    assert isinstance(weight, Tensor)
    num_in, num_out = weight.shape
    return num_out, num_in


def stores_transpose(module: nn.Module) -> bool:
    """Whether a layer of the model as it was published stores `[I, O]`, as GPT-2's Conv1D does."""
    # Quantising replaces a layer by one that notes what it was.
    return issubclass(getattr(module, "source_cls", type(module)), Conv1D)


def linear_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> every layer that can carry an adapter."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    }


def text_linears(model: PreTrainedModel, head: nn.Module) -> dict[str, nn.Module]:
    """Name -> every layer that can carry an adapter and takes part where all tokens are text.

    Models of images or sound hold encoders beside the decoder of their text, whose layers have the
    same names.
    """
    linears = linear_modules(model)
    if model.config.get_text_config() is model.config:
        return linears
    reached = {*model.get_decoder().modules(), head}
    return {name: module for name, module in linears.items() if module in reached}


def matches(name: str, suffix: str) -> bool:
    """Whether a module name is `suffix` or ends in it at a dot."""
    return name == suffix or name.endswith(f".{suffix}")


def adapter_targets(
    model: PreTrainedModel, head: nn.Module, target_modules: str | tuple[str, ...]
) -> dict[str, nn.Module]:
    """Name -> layer for every layer of the text decoder and the head that is asked for.

    Args:
        model: the base model.
        head: its output head, which `all-linear` leaves out.
        target_modules: `all-linear`, or suffixes of module names.

    Raises:
        ConfigError: a suffix matches no linear layer, or there is nothing to train.
    """
    linears = text_linears(model, head)
    if target_modules == ALL_LINEAR:
        targets = {name: module for name, module in linears.items() if module is not head}
    else:
        suffixes = (target_modules,) if isinstance(target_modules, str) else target_modules
        unmatched = [
            suffix for suffix in suffixes if not any(matches(name, suffix) for name in linears)
        ]
        if unmatched:
            raise ConfigError(_unmatched_message(unmatched, linears))
        targets = {
            name: module
            for name, module in linears.items()
            if any(matches(name, suffix) for suffix in suffixes)
        }
    if not targets:
        raise ConfigError(
            f"lora.target_modules={target_modules}: no layer is selected, so nothing would be "
            f"trained; give {ALL_LINEAR} or some of {', '.join(_leaf_names(linears))}"
        )
    return targets


def check_lora(config: LoraConfig) -> None:
    """Returns if the values of an adapter config make sense.

    Raises:
        ConfigError: naming the key, the value and what is allowed.
    """
    if config.rank < 1:
        raise ConfigError(f"lora.rank={config.rank}: must be at least 1")
    if not (config.alpha > 0 and math.isfinite(config.alpha)):
        raise ConfigError(f"lora.alpha={config.alpha}: must be a positive number")
    if not 0 <= config.dropout < 1:
        raise ConfigError(f"lora.dropout={config.dropout}: must be at least 0 and below 1")


def check_reached(
    layers: Mapping[str, LoraLayer], run: Callable[[], object], *, model_name: str
) -> None:
    """Returns if `run` calls every layer, so that no adapter sits beside code that goes around it.

    Experts are exempt: a router may leave some of them out.

    Raises:
        ConfigError: a layer's weight is used without calling the layer, or a layer gives more than
            its output, as some routers do.
    """
    called: set[str] = set()
    odd: list[str] = []

    def note(name: str, output: object) -> None:
        called.add(name)
        if not isinstance(output, Tensor):
            odd.append(name)

    handles = [
        layer.module.register_forward_hook(lambda *given, name=name: note(name, given[-1]))
        for name, layer in layers.items()
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    if odd:
        raise ConfigError(
            f"lora.target_modules: an adapter cannot be added to {', '.join(odd[:8])} of "
            f"{model_name}, which give more than one tensor (a router?). List the layers to train"
        )
    unreached = [name for name in layers if name not in called and ".experts." not in name]
    if unreached:
        raise ConfigError(
            f"lora.target_modules: {model_name} does not call these layers in a forward pass, so "
            f"an adapter on them would have no effect: {', '.join(unreached[:8])}"
            f"{' ...' if len(unreached) > 8 else ''}. List the layers to train instead."
        )


def _leaf_names(linears: Mapping[str, nn.Module]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in linears})


def _unmatched_message(unmatched: list[str], linears: Mapping[str, nn.Module]) -> str:
    leaves = _leaf_names(linears)
    close = {
        suffix: difflib.get_close_matches(suffix.rpartition(".")[2], leaves, n=1)
        for suffix in unmatched
    }
    named = ", ".join(
        f"{suffix} (did you mean {found[0]}?)" if found else suffix
        for suffix, found in close.items()
    )
    return (
        f"lora.target_modules: no linear layer is called {named}; "
        f"this model has {', '.join(leaves)}, or give {ALL_LINEAR}"
    )
