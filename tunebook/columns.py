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
    """The columns a loss cannot do without: keyword-only parameters that nothing is bound to."""
    return tuple(
        name
        for name, parameter in inspect.signature(loss_fn).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        and parameter.default is inspect.Parameter.empty
    )


def check_columns(loss_fn: Callable[..., Any], available: Collection[str], *, recipe: str) -> None:
    """Returns if the recipe has every column that the loss needs.

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
