"""Checks that losses share: of hyper-parameters that a person wrote."""

import math

MAX_LOG_RATIO = 20.0
"""Nats, the largest difference of log-probs that losses raise e to: e^20 is 4.9e8."""


def check_positive(name: str, value: float) -> None:
    """Returns if the hyper-parameter is a finite number above 0.

    Raises:
        ValueError: names it and its value.
    """
    _check_number(name, value)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name}={value}: must be above 0")


def check_not_negative(name: str, value: float) -> None:
    """Returns if the hyper-parameter is a finite number of at least 0.

    Raises:
        ValueError: names it and its value.
    """
    _check_number(name, value)
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"{name}={value}: must be at least 0")


def check_share(name: str, value: float) -> None:
    """Returns if the hyper-parameter is between 0 and 1, both included.

    Raises:
        ValueError: names it and its value.
    """
    _check_number(name, value)
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value}: must be between 0 and 1")


def check_label_smoothing(value: float) -> None:
    """Returns if the share of flipped labels is in [0, 0.5).

    Raises:
        ValueError: names the value; from one half on, labels say the opposite of what they mean.
    """
    _check_number("label_smoothing", value)
    if not 0 <= value < 0.5:
        raise ValueError(f"label_smoothing={value}: must be at least 0 and below 0.5")


def check_clip_bounds(clip_low: float, clip_high: float) -> None:
    """Returns if the bounds are those of a ratio.

    Raises:
        ValueError: names both; a distance from 1, such as 0.2, is no bound.
    """
    _check_number("clip_low", clip_low)
    _check_number("clip_high", clip_high)
    if not 0 <= clip_low <= 1 <= clip_high:
        raise ValueError(
            f"clip_low={clip_low}, clip_high={clip_high}: these are bounds of the ratio itself, so "
            "0 <= clip_low <= 1 <= clip_high, for example 0.8 and 1.2 (not the distances from 1)"
        )


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}={value!r}: must be a number")
