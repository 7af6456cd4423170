"""Token weights: the mask and the divisor of one optimizer step, as one column per datum.

Every function takes the masks of *all* data of one optimizer step, so that micro-batches, request
splitting and a partial last batch cannot change the objective.
Legend: N data of the step, T scored tokens (ragged over N).
"""

from collections.abc import Hashable, Sequence

import numpy as np

from tunebook.types import FloatArray


def token_mean(masks: Sequence[FloatArray]) -> list[FloatArray]:
    """Weights that make the loss the mean over the supervised tokens of the step; they sum to 1.

    Source: DAPO, arXiv:2503.14476, equation 8; the usual SFT loss.

    Args:
        masks: N arrays `[T]`; 0 = no loss, otherwise the relative weight of the token.
    """
    total = _total(masks)
    return [_scaled(mask, total) for mask in masks]


def sequence_mean(masks: Sequence[FloatArray]) -> list[FloatArray]:
    """Weights that make the loss the mean over data of each datum's token mean; they sum to 1.

    Data without a supervised token count in neither mean. Source: GRPO, arXiv:2402.03300, eq. 3.

    Args:
        masks: N arrays `[T]`.
    """
    num_supervised = sum(1 for mask in masks if mask.any())
    return [_scaled(mask, _total([mask]) * num_supervised) for mask in masks]


def prompt_mean(masks: Sequence[FloatArray], *, groups: Sequence[Hashable]) -> list[FloatArray]:
    """Weights that make the loss the mean over prompts of the token mean of all their completions.

    They sum to 1. Prompts without a supervised token count in neither mean.

    Args:
        masks: N arrays `[T]`.
        groups: N keys; data of the same prompt have the same one.
    """
    totals: dict[Hashable, float] = {}
    for mask, group in zip(masks, groups, strict=True):
        totals[group] = totals.get(group, 0.0) + _total([mask])
    num_supervised = len({group for mask, group in zip(masks, groups, strict=True) if mask.any()})
    return [
        _scaled(mask, totals[group] * num_supervised)
        for mask, group in zip(masks, groups, strict=True)
    ]


def fixed_horizon(masks: Sequence[FloatArray], *, horizon: int) -> list[FloatArray]:
    """Weights that divide the summed loss by `N * horizon`, whatever the lengths.

    Source: Dr. GRPO, arXiv:2503.20783, section 3.2. The horizon is stated, never the padded length.

    Args:
        masks: N arrays `[T]`.
        horizon: tokens, for example the longest completion allowed.
    """
    return [_scaled(mask, float(len(masks) * horizon)) for mask in masks]


def token_sum(masks: Sequence[FloatArray]) -> list[FloatArray]:
    """Weights that make the loss the plain sum over supervised tokens.

    Args:
        masks: N arrays `[T]`.
    """
    return [_scaled(mask, 1.0) for mask in masks]


def _total(masks: Sequence[FloatArray]) -> float:
    return float(sum(mask.sum(dtype=np.float64) for mask in masks))


def _scaled(mask: FloatArray, divisor: float) -> FloatArray:
    """The mask over the divisor; a mask of zeros stays zero, even where the divisor is 0."""
    if divisor == 0:
        return np.zeros_like(mask)
    return (mask / divisor).astype(np.float32)
