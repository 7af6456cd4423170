"""Policy losses: train sampled tokens by their advantage. Legend: B rows, T tokens.

For one token, p is its log-prob under the trained policy, q under the policy that sampled it, A its
advantage, r = e^(p - q) their ratio. Every loss is `sum_t w_t * L_t` with `w` the `token_weights`,
which hold mask and divisor, so what services do differently (Tinker sums over tokens, Together
divides by a fixed horizon, Baseten reports a mean) is chosen by the weights, not here.

Arguments of all of them:
    logprobs: `[B, T]` p, nats.
    token_weights: `[B, T]`; where it is 0 a token counts for nothing, in value, gradient or
        metrics, whatever the other columns hold there (NaN too).
    sampling_logprobs: `[B, T]` q, nats, as the sampler reported them.
    advantages: `[B, T]` A.

Overflow: p - q is clamped to ±20 before it becomes a ratio. Beyond that a token's ratio is
constant, so a loss that is a function of the ratio has gradient 0 there (`cispo` and `dro` go on,
their gradient does not come from the ratio).

Metrics are sums over the tokens that count; divided by `num_tokens` they are means:
    num_tokens: tokens of weight other than 0.
    logprob_sum: p; its mean, negated, estimates the entropy per token.
    logratio_sum, logratio_abs_sum: p - q and its magnitude, nats, not clamped.
    ratio_sum, ratio_sq_sum: the ratio that the loss uses and its square;
        `ratio_sum^2 / (num_tokens * ratio_sq_sum)` is the effective sample size as a share.
    clipped_low_sum, clipped_high_sum: tokens that the lower or upper bound takes the gradient of,
        or, for `cispo`, changes the weight of. Losses without bounds have neither.
"""

import torch
from torch import Tensor

from loss_fns.checks import (
    MAX_LOG_RATIO,
    check_clip_bounds,
    check_positive,
    check_share,
)

LossAndMetrics = tuple[Tensor, dict[str, Tensor]]


def importance_sampling(
    logprobs: Tensor, *, token_weights: Tensor, sampling_logprobs: Tensor, advantages: Tensor
) -> LossAndMetrics:
    """The policy gradient with its off-policy correction, `-r A`, unclipped.

    Source: the surrogate that PPO clips, arXiv:1707.06347, equation 6. The same on all services but
    for the divisor; xorl and Fireworks cap the log-ratio at 20 as well.

    Args:
        logprobs: see the module, like the columns.
    """
    marked, p, q, advantage = _marked(logprobs, token_weights, sampling_logprobs, advantages)
    ratio = _ratio(p - q)
    loss = _weighted(-ratio * advantage, token_weights, marked)
    return loss, _metrics(marked, p, q, ratio)


def ppo(
    logprobs: Tensor,
    *,
    token_weights: Tensor,
    sampling_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
) -> LossAndMetrics:
    """The clipped surrogate, `-min(r A, clamp(r, clip_low, clip_high) A)`.

    Source: PPO, arXiv:1707.06347, equation 7. Together, Tinker and Baseten take absolute bounds
    like these (0.8 and 1.2); SkyRL and TRL take distances from 1 (0.2 and 0.2).

    Args:
        logprobs: see the module, like the columns.
        clip_low: lower bound of the ratio, from 0 to 1.
        clip_high: upper bound of the ratio, at least 1; 1.28 with 0.8 is the "clip higher" of DAPO,
            arXiv:2503.14476, section 3.1.

    Raises:
        ValueError: the bounds are not those of a ratio.
    """
    check_clip_bounds(clip_low, clip_high)
    marked, p, q, advantage = _marked(logprobs, token_weights, sampling_logprobs, advantages)
    ratio = _ratio(p - q)
    return _clipped(marked, p, q, ratio, advantage, token_weights, clip_low, clip_high)


def grpo(
    logprobs: Tensor,
    *,
    token_weights: Tensor,
    sampling_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
) -> LossAndMetrics:
    """The clipped surrogate on a group's advantages, `max(-r A, -clamp(r, clip_low, clip_high) A)`.

    Source: GRPO, arXiv:2402.03300, equation 3. Per token it is `ppo`; what makes it GRPO are the
    group's advantages (`tunebook.advantages`), the divisor (`normalization`: the paper's is
    `sequence_mean`) and the KL term (`loss_fns.kl.with_kl`). One ratio for a whole sequence, which
    Together calls ratio type SEQUENCE, is `gspo`.

    Args:
        logprobs: see the module, like the columns.
        clip_low: lower bound of the ratio, from 0 to 1.
        clip_high: upper bound of the ratio, at least 1.

    Raises:
        ValueError: the bounds are not those of a ratio.
    """
    return ppo(
        logprobs,
        token_weights=token_weights,
        sampling_logprobs=sampling_logprobs,
        advantages=advantages,
        clip_low=clip_low,
        clip_high=clip_high,
    )


def gspo(
    logprobs: Tensor,
    *,
    token_weights: Tensor,
    sampling_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
) -> LossAndMetrics:
    """The clipped surrogate with one ratio for all tokens of a row.

    s = e^(mean of p - q over the tokens of the row that count); token t has the ratio
    s_t = sg(s) e^(p - sg(p)), whose value is s and whose gradient is that of its own log-prob, so
    advantages may differ within a row: `-min(s_t A, clamp(s_t, clip_low, clip_high) A)`.

    Source: GSPO-token, arXiv:2507.18071, section 4.3; for equal advantages in a row it is GSPO,
    equation 5. Its clips are far narrower than PPO's: 3e-4 below and 4e-4 above 1. Tinker
    marks the tokens by `sequence_ratio_mask`, here they are those of weight other than 0.

    Args:
        logprobs: see the module, like the columns.
        clip_low: lower bound of the ratio, from 0 to 1.
        clip_high: upper bound of the ratio, at least 1.

    Raises:
        ValueError: the bounds are not those of a ratio.
    """
    check_clip_bounds(clip_low, clip_high)
    marked, p, q, advantage = _marked(logprobs, token_weights, sampling_logprobs, advantages)
    num_marked_B1 = marked.sum(dim=1, keepdim=True).clamp(min=1)
    mean_logratio_B1 = (p - q).detach().sum(dim=1, keepdim=True) / num_marked_B1
    # In this order: the difference is exactly 0, and nothing of a small mean is rounded away.
    ratio = _ratio(mean_logratio_B1 + (p - p.detach()))
    return _clipped(marked, p, q, ratio, advantage, token_weights, clip_low, clip_high)


def cispo(
    logprobs: Tensor,
    *,
    token_weights: Tensor,
    sampling_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
) -> LossAndMetrics:
    """REINFORCE with a clamped importance weight, `-sg(clamp(r, clip_low, clip_high)) p A`.

    The weight is a constant, so a token that is clamped keeps its gradient.

    Source: CISPO in MiniMax-M1, arXiv:2506.13585, equations 4 and 5. Services differ in the bounds:
    Together 0 and 4, Baseten 0.8 and 1.2, SkyRL distances of 1 and 4, so 0 and 5; TRL clamps from
    above only, like the paper. Tinker advises a wide, one-sided range.

    Args:
        logprobs: see the module, like the columns.
        clip_low: lower bound of the weight, from 0 to 1; 0 = none.
        clip_high: upper bound of the weight, at least 1.

    Raises:
        ValueError: the bounds are not those of a ratio.
    """
    check_clip_bounds(clip_low, clip_high)
    marked, p, q, advantage = _marked(logprobs, token_weights, sampling_logprobs, advantages)
    ratio = _ratio(p - q).detach()
    weight = ratio.clamp(clip_low, clip_high)
    loss = _weighted(-weight * p * advantage, token_weights, marked)
    return loss, {
        **_metrics(marked, p, q, ratio),
        "clipped_low_sum": _count(marked & (ratio < clip_low), ratio),
        "clipped_high_sum": _count(marked & (ratio > clip_high), ratio),
    }


def dppo(
    logprobs: Tensor,
    *,
    token_weights: Tensor,
    sampling_logprobs: Tensor,
    advantages: Tensor,
    delta_low: float,
    delta_high: float,
) -> LossAndMetrics:
    """Importance sampling that leaves out tokens whose probability has moved too far, `-r A k`.

    k is 0 if A > 0 and e^p - e^q > delta_high, or if A < 0 and e^q - e^p > delta_low, else 1; it
    has no gradient. The trust region is one of probabilities: rare tokens may change by large
    ratios.

    Source: the binary total variation of DPPO, arXiv:2602.04879. Together takes 0.15 and 0.15,
    SkyRL and Baseten 0.2 and 0.2 (Baseten adds terms it does not document, which are not here).

    Args:
        logprobs: see the module, like the columns.
        delta_low: largest loss of probability, from 0 to 1.
        delta_high: largest gain of probability, from 0 to 1.

    Raises:
        ValueError: a bound is no difference of probabilities.
    """
    check_share("delta_low", delta_low)
    check_share("delta_high", delta_high)
    marked, p, q, advantage = _marked(logprobs, token_weights, sampling_logprobs, advantages)
    ratio = _ratio(p - q)
    gain = (p.exp() - q.exp()).detach()
    too_high = marked & (advantage > 0) & (gain > delta_high)
    too_low = marked & (advantage < 0) & (-gain > delta_low)
    kept = torch.where(too_high | too_low, torch.zeros_like(ratio), ratio)
    loss = _weighted(-kept * advantage, token_weights, marked)
    return loss, {
        **_metrics(marked, p, q, ratio),
        "clipped_low_sum": _count(too_low, ratio),
        "clipped_high_sum": _count(too_high, ratio),
    }


def dro(
    logprobs: Tensor,
    *,
    token_weights: Tensor,
    sampling_logprobs: Tensor,
    advantages: Tensor,
    beta: float,
) -> LossAndMetrics:
    """The policy gradient with a quadratic pull to the sampler, `-(p A - beta/2 (p - q)^2)`.

    Source: direct reward optimisation, arXiv:2405.19107, with the advantage in place of reward
    minus value, and per token as on Tinker. Together has no default for beta, Baseten and Fireworks
    take 0.05. Fireworks applies the pull only where A is not 0, unlike its documentation, Tinker
    and us.

    Args:
        logprobs: see the module, like the columns.
        beta: strength of the pull, above 0.

    Raises:
        ValueError: beta is not above 0.
    """
    check_positive("beta", beta)
    marked, p, q, advantage = _marked(logprobs, token_weights, sampling_logprobs, advantages)
    objective = p * advantage - 0.5 * beta * (p - q).square()
    loss = _weighted(-objective, token_weights, marked)
    return loss, _metrics(marked, p, q, _ratio(p - q))


def _marked(
    logprobs: Tensor, token_weights: Tensor, *others: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Which tokens count, and all columns with 0 where they do not."""
    marked = token_weights != 0
    zero = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
    # `where` before any arithmetic: 0 * NaN is NaN, and so is its gradient.
    p, q, advantage = (torch.where(marked, each, zero) for each in (logprobs, *others))
    return marked, p, q, advantage


def _ratio(logratio: Tensor) -> Tensor:
    return logratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _weighted(loss: Tensor, token_weights: Tensor, marked: Tensor) -> Tensor:
    return torch.where(marked, token_weights * loss, torch.zeros_like(loss)).sum()


def _clipped(
    marked: Tensor,
    p: Tensor,
    q: Tensor,
    ratio: Tensor,
    advantage: Tensor,
    token_weights: Tensor,
    clip_low: float,
    clip_high: float,
) -> LossAndMetrics:
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(clip_low, clip_high) * advantage)
    return _weighted(-surrogate, token_weights, marked), {
        **_metrics(marked, p, q, ratio),
        "clipped_low_sum": _count(marked & (ratio < clip_low) & (advantage < 0), ratio),
        "clipped_high_sum": _count(marked & (ratio > clip_high) & (advantage > 0), ratio),
    }


def _metrics(marked: Tensor, p: Tensor, q: Tensor, ratio: Tensor) -> dict[str, Tensor]:
    logratio = (p - q).detach()
    counted_ratio = torch.where(marked, ratio.detach(), torch.zeros_like(ratio))
    return {
        "num_tokens": _count(marked, p),
        "logprob_sum": p.detach().sum(),
        "logratio_sum": logratio.sum(),
        "logratio_abs_sum": logratio.abs().sum(),
        "ratio_sum": counted_ratio.sum(),
        "ratio_sq_sum": counted_ratio.square().sum(),
    }


def _count(which: Tensor, like: Tensor) -> Tensor:
    return which.sum().to(like.dtype)
