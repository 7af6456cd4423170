"""What a loss must return, and the trial of a loss before anything is spent.

Legend: B rows, T tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

from tunebook.columns import loss_name, required_columns
from tunebook.errors import ConfigError
from tunebook.types import Metrics

if TYPE_CHECKING:
    from torch import Tensor

NAN = math.nan
TRIAL_LOGPROBS = ((0.0, -1.0, -2.0), (0.0, -0.5, -1.5))
"""`[B, T]`; the first token of both rows has weight 0, and backends compute nothing for it."""
TRIAL_COLUMNS: Mapping[str, tuple[Any, ...]] = {
    "token_weights": ((0.0, 0.25, 0.25), (0.0, 0.25, 0.25)),
    "pair_weights": (1.0, 1.0),
    "advantages": ((0.0, 1.0, 1.0), (0.0, -1.0, -1.0)),
    "sampling_logprobs": ((NAN, -1.1, -1.8), (NAN, -0.6, -1.4)),
    "reference_logprobs": ((NAN, -1.2, -1.9), (NAN, -0.7, -1.3)),
}
"""Columns of the rows that a loss is tried on: one pair, or two completions. Log-probs are NaN
where the weight is 0, as `Session.forward` leaves them."""


def check_loss(loss_fn: Callable[..., Any]) -> Metrics:
    """The metrics of the loss on two made-up rows, if it gives there what a loss must give.

    So a hyper-parameter out of range, or a fault of an own loss, is seen before a backend is
    opened. A column that `TRIAL_COLUMNS` does not have is tried as 1 for every token.

    Args:
        loss_fn: the loss, its hyper-parameters bound.

    Raises:
        ConfigError: it refuses its hyper-parameters, returns something else than a loss, is not
            finite, does not depend on the log-probs, or depends on those of weight 0.
        Exception: whatever else the loss raises, with a note of what it was given.
    """
    import torch

    name = loss_name(loss_fn)
    leaf = torch.tensor(TRIAL_LOGPROBS, requires_grad=True)
    columns = {
        column: torch.tensor(TRIAL_COLUMNS[column])
        if column in TRIAL_COLUMNS
        else torch.ones_like(leaf, requires_grad=False)
        for column in required_columns(loss_fn)
    }
    try:
        with torch.enable_grad():
            returned = loss_fn(leaf.clone(), **columns)  # a copy: a loss may write into it
    except (ValueError, TypeError) as error:
        raise ConfigError(_refusal(loss_fn, error)) from error
    except Exception as error:
        error.add_note(f"raised by the loss {name!r} when prepare tried it on two made-up rows")
        raise
    loss, metrics = loss_and_metrics(loss_fn, returned)
    gradient = None
    if loss.requires_grad:
        (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
    if gradient is None:
        raise ConfigError(f"loss {name!r}: its value does not depend on the log-probs it is given")
    if not (torch.isfinite(loss) and torch.isfinite(gradient).all()):
        raise ConfigError(
            f"loss {name!r}: on two made-up rows its value is {loss.item():g} and its gradient "
            f"{gradient.tolist()}. Where a token's weight is 0 the other columns may hold NaN; "
            "select with torch.where(token_weights != 0, ..., 0) before any arithmetic"
        )
    if gradient[:, 0].any():
        raise ConfigError(
            f"loss {name!r}: its gradient at a token whose token_weights are 0 is "
            f"{gradient[:, 0].tolist()}. Such a token (of a prompt, of padding) must not be in the "
            "loss; multiply by token_weights, which hold mask and divisor"
        )
    return metrics


def loss_and_metrics(loss_fn: Callable[..., Any], returned: object) -> tuple[Tensor, Metrics]:
    """What a loss returned, if it is what a loss must return.

    Args:
        loss_fn: the loss, for its name.
        returned: by one call of it.

    Raises:
        ConfigError: it is something else.
    """
    from torch import Tensor

    if not isinstance(returned, tuple) or len(returned) != 2:
        count = f" of {len(returned)}" if isinstance(returned, tuple | list) else ""
        raise _not_a_loss(loss_fn, _described(returned) + count)
    loss, metrics = returned
    if not isinstance(loss, Tensor) or loss.ndim != 0 or not loss.is_floating_point():
        raise _not_a_loss(loss_fn, f"{_described(loss)} as its loss")
    if not isinstance(metrics, Mapping):
        raise _not_a_loss(loss_fn, f"{_described(metrics)} as its metrics")
    values: Metrics = {}
    for name, metric in metrics.items():
        value = metric.detach() if isinstance(metric, Tensor) else metric
        is_scalar = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)
        if not isinstance(name, str) or name == "loss" or not is_scalar:
            raise _not_a_loss(loss_fn, f"{_described(metric)} as its metric {name!r}")
        values[name] = float(value)
    return loss, values


def _refusal(loss_fn: Callable[..., Any], error: Exception) -> str:
    """What a loss said of its hyper-parameters, with the key of the config where it names one."""
    bound = loss_fn.keywords if isinstance(loss_fn, functools.partial) else {}
    if any(str(error).startswith(f"{name}=") for name in bound):
        return f"loss.{error}"
    values = ", ".join(f"loss.{name}={value}" for name, value in bound.items())
    return f"loss {loss_name(loss_fn)!r}{f' with {values}' if values else ''}: {error}"


def _not_a_loss(loss_fn: Callable[..., Any], what: str) -> ConfigError:
    return ConfigError(
        f"loss {loss_name(loss_fn)!r} returned {what}; a loss must return `(loss, metrics)`: a "
        "scalar floating-point tensor, and a mapping of names, other than 'loss', to scalars. Both "
        "are sums over the rows it was given"
    )


def _described(value: object) -> str:
    """A value's kind, and of a tensor dtype and shape, for an error message."""
    from torch import Tensor

    if isinstance(value, Tensor):
        return f"a tensor ({str(value.dtype).removeprefix('torch.')}, shape {list(value.shape)})"
    return "None" if value is None else f"a {type(value).__name__}"
