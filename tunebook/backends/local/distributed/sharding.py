"""A base model and what is trained of it, every weight split over the processes by FSDP2.

Adapters become parameters of the layers they adapt before these are sharded, so they are gathered
for a layer's forward and backward, and freed, together with its frozen weights.
Legend: R rank, I input features, O output features.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from tunebook.backends.local.base_model import BaseModel, load_base_model
from tunebook.backends.local.logprobs import replayed
from tunebook.backends.local.lora import (
    adapter_targets,
    check_lora,
    dropped_out,
    features_of,
    initial_lora_a,
)
from tunebook.backends.local.weights import LORA_A, LORA_B
from tunebook.errors import ConfigError
from tunebook.types import LoraConfig

A_ATTRIBUTE, B_ATTRIBUTE = "tunebook_lora_a", "tunebook_lora_b"


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """What every process needs to load the same base."""

    name: str
    device: str
    """A kind of device: cpu or cuda."""
    weight_dtype: torch.dtype
    compute_dtype: torch.dtype
    revision: str | None
    trust_remote_code: bool
    allow_pickle: bool
    micro_batch_tokens: int


class Root(nn.Module):
    """The outermost module: whatever runs inside its forward finds the weights gathered.

    The output head and the body of a model are computed by separate calls, so the model's own
    forward could not be the outermost one.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()


@dataclass(slots=True)
class ShardedModel:
    """One process's part of a base model and of what is trained."""

    settings: ModelSettings
    base: BaseModel
    lora: LoraConfig | None
    targets: dict[str, nn.Module]
    """Name -> layer that carries an adapter; none for full weights."""
    root: FSDPModule
    mesh: DeviceMesh
    sharded: dict[str, DTensor]
    """Name -> trained parameter as FSDP keeps it, float32."""
    local: dict[str, nn.Parameter]
    """Name -> this process's part of it, sharing its memory; what an optimizer updates."""
    generator: torch.Generator | None
    """Draws a seed for the dropout of each operation, the same on all processes."""
    dropout: list[torch.Generator] = field(default_factory=list)
    """Draws the dropout of the operation that runs; empty = none is drawn."""

    def run(self, function: Callable[[], Any]) -> Any:
        """What `function` returns, called where the weights are gathered."""
        assert isinstance(self.root, nn.Module)
        return self.root(function)

    def settle(self) -> None:
        """Frees what a forward pass without a backward pass has left gathered."""
        self.root.reshard()

    @contextmanager
    def drawing_dropout(self, rank: int) -> Iterator[None]:
        """A context in which adapters draw dropout, each process its own."""
        if self.generator is None:
            yield
            return
        device = self.base.device
        seed = int(torch.randint(2**48, (), generator=self.generator, device=device))
        self.dropout.append(torch.Generator(device).manual_seed(seed + rank))
        try:
            yield
        finally:
            self.dropout.clear()

    def replay(self) -> AbstractContextManager[None]:
        """A context for a later moment that draws the dropout that would be drawn now."""
        generator = self.dropout[0]
        return replayed(generator, generator.get_state())

    def collect_gradients(self) -> None:
        """Shows the optimizer the gradients that FSDP has summed over the processes."""
        for name, parameter in self.sharded.items():
            gradient = parameter.grad
            self.local[name].grad = None if gradient is None else local_part(gradient)

    def drop_gradients(self) -> None:
        """Forgets all gradients."""
        for name, parameter in self.sharded.items():
            parameter.grad = self.local[name].grad = None

    def begin_adapter(self) -> None:
        """Gives the adapter the values that a new one begins with."""
        assert self.lora is not None
        self.generator = master_generator(self.lora, self.base.device)
        with torch.no_grad():
            for name, module in self.targets.items():
                shape = (self.lora.rank, features_of(module)[1])
                initial = initial_lora_a(name, shape, seed=self.lora.seed)
                self.load(name + LORA_A, initial)
                self.local[name + LORA_B].zero_()

    def load(self, name: str, value: Tensor) -> None:
        """Copies this process's part of a whole tensor into a parameter."""
        with torch.no_grad():
            self.local[name].copy_(self.part_of(value))

    def part_of(self, value: Tensor) -> Tensor:
        """This process's part of a whole tensor, split as FSDP splits; numbers stay whole."""
        if value.ndim == 0:
            return value
        parts = value.chunk(self.mesh.size())
        rank = self.mesh.get_local_rank()
        return parts[rank] if rank < len(parts) else value[:0]

    def whole(self, name: str, part: Tensor) -> Tensor:
        """A tensor that is split like the parameter `name`, whole; all processes take part."""
        if part.ndim == 0:
            return part
        like = self.sharded[name]
        tensor = DTensor.from_local(
            part, self.mesh, [Shard(0)], run_check=False, shape=like.shape, stride=like.stride()
        )
        return tensor.full_tensor()


def load_sharded_model(
    settings: ModelSettings, lora: LoraConfig | None, *, device: torch.device
) -> ShardedModel:
    """This process's part of a model; needs no other process.

    Raises:
        ConfigError: the model cannot be loaded, or cannot be trained in several processes.
    """
    # Loaded beside the device, which never has to hold the whole of it.
    base = load_base_model(
        settings.name,
        device=torch.device("cpu"),
        weight_dtype=settings.weight_dtype,
        compute_dtype=settings.compute_dtype,
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
        allow_pickle=settings.allow_pickle,
    )
    calls = calls_of_a_pass(base)
    targets: dict[str, nn.Module] = {}
    generator = None
    if lora is None:
        base.model.requires_grad_(True)
        check_called(modules_with_parameters(base.model), calls.all, base.name, key="lora=null")
    else:
        check_lora(lora)
        targets = adapter_targets(base.model, base.head, lora.target_modules)
        check_called(targets, calls.plain, base.name, key="lora.target_modules")
        attach_adapter(targets, lora)
        generator = master_generator(lora, device)

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in repeated_blocks(base.model, calls.all):
        fully_shard(block, mesh=mesh)
    root = fully_shard(Root(base.model), mesh=mesh)
    assert isinstance(root, nn.Module)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # Losses are sums whose divisor is in the token weights: so are gradients.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    # FSDP has put each part where it belongs.
    base = replace(base, device=device)
    model = ShardedModel(settings, base, lora, targets, root, mesh, {}, {}, generator)
    if lora is not None:
        add_hooks(model, lora)
    return model


def start(model: ShardedModel) -> None:
    """Makes a first pass, in which FSDP sets up its memory; all processes take part."""
    base = model.base
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=base.device)
    with torch.no_grad(), base.computing():
        model.run(lambda: base.model(input_ids=tokens, use_cache=False).logits)
    model.settle()
    for name, parameter in trained_parameters(model).items():
        assert isinstance(parameter, DTensor) and parameter.dtype == torch.float32
        model.sharded[name] = parameter
        model.local[name] = nn.Parameter(local_part(parameter))


def trained_parameters(model: ShardedModel) -> dict[str, nn.Parameter]:
    """Name, as in a checkpoint -> parameter."""
    if model.lora is None:
        return dict(model.base.model.named_parameters())
    parameters: dict[str, nn.Parameter] = {}
    for name, module in model.targets.items():
        own = dict(module.named_parameters(recurse=False))
        parameters[name + LORA_A] = own[A_ATTRIBUTE]
        parameters[name + LORA_B] = own[B_ATTRIBUTE]
    return parameters


def local_part(tensor: Tensor) -> Tensor:
    """The memory of this process's part of a sharded tensor."""
    detached = tensor.detach()
    assert isinstance(detached, DTensor)
    return detached.to_local()


def master_generator(lora: LoraConfig, device: torch.device) -> torch.Generator | None:
    """The random state of a session; None where nothing is random."""
    return torch.Generator(device).manual_seed(lora.seed) if lora.dropout > 0 else None


def attach_adapter(targets: Mapping[str, nn.Module], lora: LoraConfig) -> None:
    """Gives each layer the float32 parameters of its adapter."""
    for name, module in targets.items():
        num_out, num_in = features_of(module)
        initial_a = initial_lora_a(name, (lora.rank, num_in), seed=lora.seed)
        module.register_parameter(A_ATTRIBUTE, nn.Parameter(initial_a))
        module.register_parameter(B_ATTRIBUTE, nn.Parameter(torch.zeros(num_out, lora.rank)))


def add_hooks(model: ShardedModel, lora: LoraConfig) -> None:
    """Adds the update of the adapter to the output of each layer that carries it."""

    def add_update(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        inputs = args[0]
        # Read here: they are whole only while the layer runs.
        lora_a: Any = getattr(module, A_ATTRIBUTE)
        lora_b: Any = getattr(module, B_ATTRIBUTE)
        for generator in model.dropout:
            inputs = dropped_out(inputs, share=lora.dropout, generator=generator)
        low_rank = F.linear(inputs, lora_a.to(inputs.dtype))
        return torch.addmm(
            output.flatten(0, -2),
            low_rank.flatten(0, -2),
            lora_b.to(inputs.dtype).t(),
            alpha=lora.scale,
        ).view_as(output)

    for module in model.targets.values():
        module.register_forward_hook(add_update)


@dataclass(frozen=True, slots=True)
class Calls:
    """How often a forward pass calls each module."""

    all: Counter[nn.Module] = field(default_factory=Counter)
    plain: Counter[nn.Module] = field(default_factory=Counter)
    """Calls that give one tensor, to which an adapter can be added."""


@torch.no_grad()
def calls_of_a_pass(base: BaseModel) -> Calls:
    """The calls of a short forward pass."""
    calls = Calls()

    def count(module: nn.Module, _args: object, output: object) -> None:
        calls.all[module] += 1
        calls.plain[module] += isinstance(output, Tensor)

    handles = [module.register_forward_hook(count) for module in base.model.modules()]
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=base.device)
    try:
        with base.computing():
            base.model(input_ids=tokens, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def check_called(
    modules: Mapping[str, nn.Module], calls: Mapping[nn.Module, int], model_name: str, *, key: str
) -> None:
    """Returns if a forward pass calls every module.

    Gradients are summed layer by layer, so no process may leave out a layer that another computes,
    as routers to experts that are separate layers do.

    Raises:
        ConfigError: naming those that are left out.
    """
    uncalled = [name for name, module in modules.items() if not calls.get(module)]
    if uncalled:
        raise ConfigError(
            f"{key}: {model_name} does not compute these layers in every forward pass, or they "
            "give more than one tensor, so several processes cannot train them: "
            f"{', '.join(uncalled[:8])}"
            f"{' ...' if len(uncalled) > 8 else ''}. Use one process, or list other layers in "
            "lora.target_modules"
        )


def modules_with_parameters(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> innermost module that holds parameters."""
    return {
        name: module
        for name, module in model.named_modules()
        if not list(module.children()) and list(module.parameters(recurse=False))
    }


def repeated_blocks(model: nn.Module, calls: Mapping[nn.Module, int]) -> list[nn.Module]:
    """The layers of a model: what its outermost lists of modules hold, if each is called once."""
    blocks: list[nn.Module] = []
    for child in model.children():
        members = list(child) if isinstance(child, nn.ModuleList) else []
        if members and all(
            calls.get(member) == 1 and list(member.parameters()) for member in members
        ):
            blocks.extend(members)
        else:
            blocks.extend(repeated_blocks(child, calls))
    return blocks
