"""AdamW and Muon over named parameters, gradient clipping, and optimizer state as named tensors."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from tunebook.errors import BackendError, CheckpointError, ConfigError
from tunebook.types import AdamParams, MuonParams, OptimizerParams

ADAMW, MUON = "adamw", "muon"
STEP = "step"


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The torch optimizers that together update all parameters of a session."""

    kind: str
    """adamw or muon"""
    adamw: torch.optim.AdamW | None
    muon: torch.optim.Muon | None

    @property
    def members(self) -> list[torch.optim.Optimizer]:
        """Those that have parameters."""
        return [member for member in (self.adamw, self.muon) if member is not None]


def kind_of(params: OptimizerParams) -> str:
    """The optimizer that the settings of a step belong to."""
    return ADAMW if isinstance(params, AdamParams) else MUON


def make_adamw(parameters: Mapping[str, nn.Parameter]) -> Optimizer:
    """AdamW over all parameters; weight decay applies to every one of them."""
    return Optimizer(ADAMW, _torch_adamw(list(parameters.values())), None)


def make_muon(parameters: Mapping[str, nn.Parameter], *, not_matrices: set[int]) -> Optimizer:
    """Muon over the hidden matrices, AdamW over embeddings, head, norms and biases.

    Source: Jordan et al. 2024, and arXiv:2502.16982 for the learning rate that matches AdamW's.

    Args:
        parameters: all parameters.
        not_matrices: `id` of two-dimensional parameters that are look-up tables or the output head.
    """
    matrices, others = [], []
    for parameter in parameters.values():
        hidden = parameter.ndim == 2 and id(parameter) not in not_matrices
        (matrices if hidden else others).append(parameter)
    return Optimizer(
        MUON,
        _torch_adamw(others) if others else None,
        torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw") if matrices else None,
    )


def look_up_tables(model: nn.Module, head: nn.Module) -> set[int]:
    """`id` of every embedding table and of the output head's weight."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return tables | {id(parameter) for parameter in head.parameters()}


def apply_step(optimizer: Optimizer, params: OptimizerParams) -> None:
    """Updates the parameters by their gradients, with exactly the settings of this step."""
    adam = params if isinstance(params, AdamParams) else params.adam
    if optimizer.adamw is not None:
        optimizer.adamw.param_groups[0].update(
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
        )
    if optimizer.muon is not None:
        assert isinstance(params, MuonParams)
        optimizer.muon.param_groups[0].update(
            lr=params.learning_rate,
            momentum=params.momentum,
            ns_steps=params.newton_schulz_steps,
            weight_decay=params.weight_decay,
        )
    for member in optimizer.members:
        member.step()


def check_params(params: OptimizerParams) -> None:
    """Returns if the settings of a step make sense.

    Raises:
        ConfigError: naming the key, the value and what is allowed.
    """
    adam = params if isinstance(params, AdamParams) else params.adam
    rules = {
        "learning_rate": (adam.learning_rate, adam.learning_rate >= 0, "at least 0"),
        "beta1": (adam.beta1, 0 <= adam.beta1 < 1, "at least 0 and below 1"),
        "beta2": (adam.beta2, 0 <= adam.beta2 < 1, "at least 0 and below 1"),
        "eps": (adam.eps, adam.eps >= 0, "at least 0"),
        "weight_decay": (adam.weight_decay, adam.weight_decay >= 0, "at least 0"),
        "max_grad_norm": (params.max_grad_norm, params.max_grad_norm >= 0, "at least 0 (0 = off)"),
    }
    if isinstance(params, MuonParams):
        steps = params.newton_schulz_steps
        rules["newton_schulz_steps"] = (steps, 1 <= steps < 100, "from 1 to 99")
        rules["momentum"] = (params.momentum, 0 <= params.momentum < 1, "at least 0 and below 1")
    for key, (value, good, allowed) in rules.items():
        if not (math.isfinite(value) and good):
            raise ConfigError(f"optimizer.{key}={value}: must be {allowed}")


def gradient_norm(parameters: Mapping[str, nn.Parameter]) -> float:
    """The global 2-norm of all gradients; 0 where there is none."""
    grads = [parameter.grad for parameter in parameters.values() if parameter.grad is not None]
    return float(get_total_norm(grads)) if grads else 0.0


def clip_gradients(parameters: Mapping[str, nn.Parameter], *, norm: float, max_norm: float) -> None:
    """Scales gradients of global norm `norm` down to `max_norm`; 0 leaves them alone."""
    if max_norm > 0:
        clip_grads_with_norm_(list(parameters.values()), max_norm, torch.tensor(norm))


def optimizer_state(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """`<parameter name>.<state name>` -> tensor."""
    state: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        for member in optimizer.members:
            for key, value in member.state.get(parameter, {}).items():
                state[f"{name}.{key}"] = value
    return state


def without_state(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> tuple[str, ...]:
    """Names of the parameters that no step has reached, so that nothing is kept for them."""
    return tuple(
        name
        for name, parameter in parameters.items()
        if not any(member.state.get(parameter) for member in optimizer.members)
    )


def load_optimizer_state(
    optimizer: Optimizer,
    parameters: Mapping[str, nn.Parameter],
    state: Mapping[str, Tensor],
    *,
    untouched: Collection[str],
    path: Path,
) -> None:
    """Puts saved state into a fresh optimizer.

    Args:
        optimizer: fresh.
        parameters: those that it updates.
        state: as `optimizer_state`.
        untouched: as `without_state`.
        path: the file that held it, for error messages.

    Raises:
        CheckpointError: state that is missing, too much, or of another shape.
    """
    owners = {
        parameter: member
        for member in optimizer.members
        for group in member.param_groups
        for parameter in group["params"]
    }
    expected = {
        f"{name}.{key}": (parameter, key)
        for name, parameter in parameters.items()
        if name not in untouched
        for key in state_names(owners[parameter])
    }
    for full_name in sorted(expected.keys() ^ state.keys()):
        what = "is missing" if full_name in expected else "belongs to nothing that is trained here"
        raise CheckpointError(f"{path}: the optimizer state {full_name} {what}")
    for full_name, (parameter, key) in expected.items():
        value = state[full_name]
        shape = () if key == STEP else parameter.shape
        if value.shape != shape:
            raise CheckpointError(
                f"{path}: the optimizer state {full_name} has shape {tuple(value.shape)}, "
                f"this session needs {tuple(shape)}"
            )
        on_cpu = key == STEP and not _fused(parameter.device)
        tensor = value.clone() if on_cpu else value.to(parameter.device, copy=True)
        owners[parameter].state[parameter][key] = tensor


def state_names(member: torch.optim.Optimizer) -> tuple[str, ...]:
    """What an optimizer keeps for each parameter that it has updated."""
    if isinstance(member, torch.optim.AdamW):
        return (STEP, "exp_avg", "exp_avg_sq")
    return ("momentum_buffer",)


def require_kind(optimizer: Optimizer, params: OptimizerParams) -> None:
    """Returns if a step's settings are for this optimizer.

    Raises:
        BackendError: the optimizer was changed in the middle of a session.
    """
    if kind_of(params) != optimizer.kind:
        raise BackendError(
            f"this session trains with {optimizer.kind} and cannot go on with {kind_of(params)}; "
            "start from its weights only to change the optimizer"
        )


def _torch_adamw(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, fused=_fused(parameters[0].device))


def _fused(device: torch.device) -> bool:
    return device.type in ("cpu", "cuda")
