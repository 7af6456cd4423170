"""Advantages: how much better a completion scored than the others of its prompt.

Pure arithmetic. A reward of None or NaN is *unscored*: its advantage is 0, and it is in no mean, no
deviation and no count. A group whose scored rewards are all equal, or of which only one is scored,
has advantages of exactly 0. Deviations are unbiased (n - 1).

Systems differ: Tinker centres only; TRL, torchtune (1e-4), SkyRL (1e-6) and Fireworks (1e-8) divide
by the deviation of the group plus that.
Legend: P prompts, G completions of a prompt, N data, T scored tokens (ragged over N).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tunebook.errors import ConfigError
from tunebook.types import FloatArray

Rewards = Sequence[float | None] | npt.NDArray[np.floating]
"""`[G]` of one prompt; None or NaN = unscored."""

DEVIATION_EPS = 1e-4
"""Added to a standard deviation, in units of the reward."""
MEAN_EPS = 1e-6
"""Added to the mean that `maxrl` divides by, in units of the reward."""

_Float64 = npt.NDArray[np.float64]


def group_advantages(rewards_G: Rewards, *, scale_by_std: bool) -> FloatArray:
    """Rewards minus their group's mean, over its deviation where asked, `[G]`.

    Source: GRPO, arXiv:2402.03300, section 4.1.2; without the deviation, which weighs easy and hard
    prompts more than others, Dr. GRPO, arXiv:2503.20783, section 3.1.

    Args:
        rewards_G: of one prompt.
        scale_by_std: divide by the unbiased standard deviation plus 1e-4.

    Raises:
        ConfigError: a reward is infinite.
    """
    rewards = _checked(rewards_G)
    centred = _centred(rewards)
    if scale_by_std and np.any(centred):
        centred = centred / (np.nanstd(rewards, ddof=1) + DEVIATION_EPS)
    return centred.astype(np.float32)


def group_mean(rewards_P_G: Sequence[Rewards]) -> list[FloatArray]:
    """Rewards minus the mean of their group, P arrays `[G]`.

    Args:
        rewards_P_G: of the step, one sequence a prompt.

    Raises:
        ConfigError: a reward is infinite.
    """
    return [group_advantages(rewards_G, scale_by_std=False) for rewards_G in rewards_P_G]


def group_std(rewards_P_G: Sequence[Rewards]) -> list[FloatArray]:
    """Rewards minus the mean of their group, over its deviation, P arrays `[G]`.

    Args:
        rewards_P_G: of the step, one sequence a prompt.

    Raises:
        ConfigError: a reward is infinite.
    """
    return [group_advantages(rewards_G, scale_by_std=True) for rewards_G in rewards_P_G]


def batch_std(rewards_P_G: Sequence[Rewards]) -> list[FloatArray]:
    """Rewards minus the mean of their group, over the deviation of all rewards, P arrays `[G]`.

    Source: arXiv:2508.08221, section 4.1: the mean of the group with the deviation of the batch.
    The deviation is that of the rewards as they are, as in TRL, so what prompts differ in is in it.

    Args:
        rewards_P_G: of the step, one sequence a prompt.

    Raises:
        ConfigError: a reward is infinite.
    """
    every = [_checked(rewards_G) for rewards_G in rewards_P_G]
    scored = np.concatenate([rewards[~np.isnan(rewards)] for rewards in [*every, np.empty(0)]])
    deviation = np.std(scored, ddof=1) if len(scored) > 1 else 0.0
    return [
        (_centred(rewards) / (deviation + DEVIATION_EPS)).astype(np.float32) for rewards in every
    ]


def rloo(rewards_P_G: Sequence[Rewards]) -> list[FloatArray]:
    """Rewards minus the mean of the others of their group, P arrays `[G]`.

    Source: RLOO, arXiv:2402.14740, section 3.3. It is `group_mean` times n / (n - 1), n the scored
    completions of the group.

    Args:
        rewards_P_G: of the step, one sequence a prompt.

    Raises:
        ConfigError: a reward is infinite.
    """
    advantages: list[FloatArray] = []
    for rewards in map(_checked, rewards_P_G):
        num_scored = np.count_nonzero(~np.isnan(rewards))
        scale = num_scored / max(num_scored - 1, 1)
        advantages.append((_centred(rewards) * scale).astype(np.float32))
    return advantages


def maxrl(rewards_P_G: Sequence[Rewards]) -> list[FloatArray]:
    """Rewards minus the mean of their group, over that mean plus 1e-6, P arrays `[G]`.

    Prompts that are rarely solved weigh more, as in the likelihood of a solution.
    Source: MaxRL, arXiv:2602.02710; with the 1e-6 of SkyRL.

    Args:
        rewards_P_G: of the step, one sequence a prompt, none of them negative.

    Raises:
        ConfigError: a reward is negative, where the mean is no share of solutions, or infinite.
    """
    advantages: list[FloatArray] = []
    for rewards in map(_checked, rewards_P_G):
        centred = _centred(rewards)
        if np.any(rewards < 0):
            raise ConfigError(
                "advantage.estimator=maxrl divides by a prompt's mean reward, so no reward may "
                f"be negative, but one is {np.nanmin(rewards):g}. Use group_mean, group_std or rloo"
            )
        if np.any(centred):
            centred = centred / (np.nanmean(rewards) + MEAN_EPS)
        advantages.append(centred.astype(np.float32))
    return advantages


def kl_shaped_advantages(
    advantages: Sequence[FloatArray],
    *,
    masks: Sequence[FloatArray],
    sampling_logprobs: Sequence[FloatArray],
    reference_logprobs: Sequence[FloatArray],
    beta: float,
) -> list[FloatArray]:
    """Advantages with the divergence from the reference taken off, N arrays `[T]`.

    `A_t + beta * (mean of (q - f) - (q_t - f_t))` where the mask is not 0, and A_t elsewhere; q is
    the log-prob of the sampler, f of the reference, the mean is over all tokens of the step whose
    mask is not 0. It is centred, so the mean advantage of the step stays what it was.

    Source: the KL in the reward of Tinker's cookbook, without a discounted sum over later tokens.

    Args:
        advantages: N arrays `[T]`, of all data of one optimizer step.
        masks: N arrays `[T]`; 0 = the token is no part of it, whatever the log-probs there.
        sampling_logprobs: N arrays `[T]`, nats.
        reference_logprobs: N arrays `[T]`, nats.
        beta: weight of the divergence, above 0.

    Raises:
        ConfigError: beta is not above 0.
    """
    if not 0 < beta < np.inf:
        raise ConfigError(f"kl.beta={beta}: must be above 0")
    marked = [mask != 0 for mask in masks]
    logratios: list[_Float64] = [
        np.where(where, np.asarray(q, np.float64) - np.asarray(f, np.float64), 0.0)
        for where, q, f in zip(marked, sampling_logprobs, reference_logprobs, strict=True)
    ]
    num_marked = sum(int(where.sum()) for where in marked)
    mean = sum(float(each.sum()) for each in logratios) / max(num_marked, 1)
    return [
        np.where(where, each + beta * (mean - logratio), each).astype(np.float32)
        for where, each, logratio in zip(marked, advantages, logratios, strict=True)
    ]


def _checked(rewards_G: Rewards) -> _Float64:
    rewards = np.array(rewards_G, dtype=np.float64)
    if np.isinf(rewards).any():
        raise ConfigError(
            "a reward is infinite, so every advantage of its group would be NaN. A reward function "
            "must return a finite number, or None where it cannot score a completion"
        )
    return rewards


def _centred(rewards: _Float64) -> _Float64:
    """Rewards minus the mean of the scored ones; 0 where unscored, or where all are equal."""
    scored = ~np.isnan(rewards)
    # The mean of equal numbers can be off by a rounding, which a small deviation would blow up.
    if not scored.any() or rewards[scored].min() == rewards[scored].max():
        return np.zeros_like(rewards)
    return np.where(scored, rewards - rewards[scored].mean(), 0.0)
