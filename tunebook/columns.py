"""Which columns a loss reads, told from its signature."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any

from tunebook.errors import ConfigError


def loss_name(loss_fn: Callable[..., Any]) -> str:
    """The name of a loss for messages and records."""
    while isinstance(loss_fn, functools.partial):
        loss_fn = loss_fn.func
    return getattr(loss_fn, "__name__", type(loss_fn).__name__)


def required_columns(loss_fn: Callable[..., Any]) -> tuple[str, ...]:
    """The columns a loss reads: its parameters after the first that nothing is bound to."""
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(
        parameter.name
        for parameter in list(inspect.signature(loss_fn).parameters.values())[1:]
        if parameter.kind in named and parameter.default is inspect.Parameter.empty
    )


def check_columns(
    loss_fn: Callable[..., Any],
    available: Collection[str],
    *,
    recipe: str,
    essential: Collection[str] = (),
) -> None:
    """Returns if the recipe has every column that the loss needs, and the loss reads what it must.

    Args:
        loss_fn: the loss, its hyper-parameters bound.
        available: columns that the recipe gives a loss.
        recipe: its name, for messages.
        essential: columns without which a loss has no use for what the recipe makes.

    Raises:
        ConfigError: names the loss, the column and what the recipe has.
    """
    parameters = list(inspect.signature(loss_fn).parameters.values())
    takes_logprobs = parameters and parameters[0].kind in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    if not takes_logprobs:
        raise ConfigError(
            f"loss {loss_name(loss_fn)!r}: its first parameter must be the log-probs, as in "
            "`def loss(logprobs, *, token_weights)`"
        )
    bound = set(loss_fn.keywords) if isinstance(loss_fn, functools.partial) else set()
    for name in sorted(bound & set(available)):
        raise ConfigError(
            f"loss.{name} is set, but {name!r} is a column that the {recipe} recipe gives the loss"
        )
    for name in required_columns(loss_fn):
        if name not in available:
            raise ConfigError(
                f"loss {loss_name(loss_fn)!r} needs {name!r}, which is neither a column of the "
                f"{recipe} recipe ({', '.join(sorted(available))}) nor set as loss.{name}"
            )
    for name in essential:
        if name not in required_columns(loss_fn):
            raise ConfigError(
                f"loss {loss_name(loss_fn)!r} does not read {name!r}, so it is no loss for the "
                f"{recipe} recipe. `tunebook losses` lists those that are"
            )
