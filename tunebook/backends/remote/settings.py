"""Checks of the settings under `backend`."""

import math
from collections.abc import Sequence

from tunebook.errors import ConfigError

AUTO, TWO_PASSES = "auto", "two_passes"
LOSSES = (AUTO, TWO_PASSES)
"""`backend.losses`: those of a service where they mean the same, or none of them."""


def check_choice(key: str, value: str, allowed: Sequence[str]) -> None:
    """
    Raises:
        ConfigError: the value is none of the allowed ones.
    """
    if value not in allowed:
        raise ConfigError(f"backend.{key}={value}: must be one of {', '.join(allowed)}")


def check_above_0(**values: float | None) -> None:
    """
    Raises:
        ConfigError: a value is neither None nor a finite number above 0.
    """
    for key, value in values.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"backend.{key}={value}: must be above 0")


def check_at_least_0(**values: float) -> None:
    """
    Raises:
        ConfigError: a value is not a finite number of at least 0.
    """
    for key, value in values.items():
        if not (value >= 0 and math.isfinite(value)):
            raise ConfigError(f"backend.{key}={value}: must be at least 0")


def check_cost(cost: float, max_cost: float | None, currency: str, basis: str) -> None:
    """
    Raises:
        ConfigError: a run is expected to cost more than `backend.max_cost`.
    """
    if max_cost is not None and cost > max_cost:
        raise ConfigError(
            f"backend.max_cost={max_cost:g}: the run is expected to cost {cost:.2f} {currency} "
            f"({basis}). Raise it, or plan fewer steps"
        )
