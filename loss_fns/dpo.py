"""Preference losses: train pairs of a chosen and a rejected completion. Legend: B rows, P pairs.

Rows 0, 2, 4.. are the chosen, rows 1, 3, 5.. the rejected completions of the same pairs. For one
pair, D_c and D_r are the summed log-probs of its completions, policy minus reference;
d = D_c - D_r. Where a loss takes averages over a completion's tokens instead, that is D_c/len and
d/len below. Every loss is `sum_P w_P * L_P`, with `w` the `pair_weights` of the chosen rows: 1 over
the pairs of the optimizer step, so it is a mean over pairs however micro-batches split them.

Arguments of all of them:
    logprobs: `[B, T]`, nats.
    token_weights: `[B, T]`, 1 on completion tokens; log-probs are summed with these weights. Where
        it is 0 a token counts for nothing, in value, gradient or metrics, whatever the other
        columns hold there (NaN too).
    pair_weights: `[B]`, the same for both rows of a pair.
    reference_logprobs: `[B, T]`, nats, of the policy at the start of the run. Losses without this
        parameter need no reference.
    beta: above 0; how strongly the policy is held to the reference, or how steep the loss is.

Metrics are weighted by `pair_weights`, so that summed over a step they are means over pairs. A
*score* is what the loss compares: the log-ratio to the reference (the log-prob, where there is no
reference), averaged over tokens where the loss averages.
    accuracy: share of pairs whose chosen score is higher; a tie, as at the reference, is 1/2.
    chosen_reward, rejected_reward, margin: beta times the scores, and their difference.
    chosen_logprob, rejected_logprob: of the whole completion, nats. A falling chosen log-prob
        beside a growing margin is the usual way in which these losses fail.
    chosen_length, rejected_length: tokens.
    kl: policy to reference, nats per completion: the log-ratio summed over a completion, mean over
        both. It estimates the divergence only as far as the completions are the policy's own.
    num_tokens: completion tokens; not weighted.

Not here: `bco_pair` shifts rewards by a running mean, state that a pure function of one batch
cannot have; `aot` sorts the pairs of a batch, so its value would depend on how a step is split into
micro-batches.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from loss_fns.checks import (
    MAX_LOG_RATIO,
    check_label_smoothing,
    check_not_negative,
    check_positive,
)

LossAndMetrics = tuple[Tensor, dict[str, Tensor]]

ORPO_LOGPROB_RANGE = (-50.0, -1e-6)
"""Nats per token between which `orpo` clamps averages: the odds of 0 and 1 are not finite."""


def dpo_sigmoid(
    logprobs: Tensor,
    *,
    token_weights: Tensor,
    pair_weights: Tensor,
    reference_logprobs: Tensor,
    beta: float,
) -> LossAndMetrics:
    """The logistic loss of DPO, `-log sigmoid(beta d)`.

    Source: DPO, arXiv:2305.18290, equation 7. The default of every service, with beta 0.1.

    Args:
        logprobs: see the module, like the other arguments.

    Raises:
        ValueError: beta is not above 0.
    """
    check_positive("beta", beta)
    pairs = _pairs(logprobs, token_weights, pair_weights, reference_logprobs)
    loss_P = -logsigmoid(beta * pairs.difference)
    return _summed(loss_P, pairs, beta)


def dpo_conservative(
    logprobs: Tensor,
    *,
    token_weights: Tensor,
    pair_weights: Tensor,
    reference_logprobs: Tensor,
    beta: float,
    label_smoothing: float,
) -> LossAndMetrics:
    """DPO with smoothed labels, `-(1 - eps) log sigmoid(beta d) - eps log sigmoid(-beta d)`.

    Source: E. Mitchell, "A note on DPO with noisy preferences", 2023 (cDPO). Baseten and torchtune
    call it label smoothing.

    Args:
        logprobs: see the module, like the other arguments.
        label_smoothing: eps, the share of labels assumed to be flipped, at least 0 and below 0.5.

    Raises:
        ValueError: beta or label_smoothing is out of its range.
    """
    check_positive("beta", beta)
    check_label_smoothing(label_smoothing)
    pairs = _pairs(logprobs, token_weights, pair_weights, reference_logprobs)
    logit_P = beta * pairs.difference
    loss_P = -(1 - label_smoothing) * logsigmoid(logit_P) - label_smoothing * logsigmoid(-logit_P)
    return _summed(loss_P, pairs, beta)


def dpo_robust(
    logprobs: Tensor,
    *,
    token_weights: Tensor,
    pair_weights: Tensor,
    reference_logprobs: Tensor,
    beta: float,
    label_smoothing: float,
) -> LossAndMetrics:
    """DPO unbiased under flipped labels.

    `(-(1 - eps) log sigmoid(beta d) + eps log sigmoid(-beta d)) / (1 - 2 eps)`, which may be
    negative. Source: robust DPO, arXiv:2403.00409, and TRL's `robust`.

    Args:
        logprobs: see the module, like the other arguments.
        label_smoothing: eps, the share of labels that are flipped, at least 0 and below 0.5.

    Raises:
        ValueError: beta or label_smoothing is out of its range.
    """
    check_positive("beta", beta)
    check_label_smoothing(label_smoothing)
    pairs = _pairs(logprobs, token_weights, pair_weights, reference_logprobs)
    logit_P = beta * pairs.difference
    loss_P = -(1 - label_smoothing) * logsigmoid(logit_P) + label_smoothing * logsigmoid(-logit_P)
    return _summed(loss_P / (1 - 2 * label_smoothing), pairs, beta)


def dpo_hinge(
    logprobs: Tensor,
    *,
    token_weights: Tensor,
    pair_weights: Tensor,
    reference_logprobs: Tensor,
    beta: float,
) -> LossAndMetrics:
    """The hinge loss on the same margin, `max(0, 1 - beta d)`.

    Source: the hinge of SLiC-HF, arXiv:2305.10425, on log-ratios to the reference, which is the
    hinge-norm loss of RSO, arXiv:2309.06657.

    Args:
        logprobs: see the module, like the other arguments.

    Raises:
        ValueError: beta is not above 0.
    """
    check_positive("beta", beta)
    pairs = _pairs(logprobs, token_weights, pair_weights, reference_logprobs)
    return _summed(torch.relu(1 - beta * pairs.difference), pairs, beta)


def ipo(
    logprobs: Tensor,
    *,
    token_weights: Tensor,
    pair_weights: Tensor,
    reference_logprobs: Tensor,
    beta: float,
) -> LossAndMetrics:
    """The squared distance of the averaged margin from its goal, `(d/len - 1 / (2 beta))^2`.

    Source: IPO, arXiv:2310.12036, equation 17, whose tau is beta. The paper leaves open whether
    log-probs are summed; averages over tokens, as in TRL, keep the goal independent of length.

    Args:
        logprobs: see the module, like the other arguments.

    Raises:
        ValueError: beta is not above 0.
    """
    check_positive("beta", beta)
    pairs = _pairs(logprobs, token_weights, pair_weights, reference_logprobs).averaged()
    return _summed((pairs.difference - 1 / (2 * beta)).square(), pairs, beta)


def dpo_sigmoid_norm(
    logprobs: Tensor,
    *,
    token_weights: Tensor,
    pair_weights: Tensor,
    reference_logprobs: Tensor,
    beta: float,
) -> LossAndMetrics:
    """DPO on averages over tokens, `-log sigmoid(beta d/len)`.

    Source: the length-normalised DPO of Tulu 3, arXiv:2411.15124, with beta 5: averages are smaller
    than sums.

    Args:
        logprobs: see the module, like the other arguments.

    Raises:
        ValueError: beta is not above 0.
    """
    check_positive("beta", beta)
    pairs = _pairs(logprobs, token_weights, pair_weights, reference_logprobs).averaged()
    return _summed(-logsigmoid(beta * pairs.difference), pairs, beta)


def apo_zero(
    logprobs: Tensor,
    *,
    token_weights: Tensor,
    pair_weights: Tensor,
    reference_logprobs: Tensor,
    beta: float,
) -> LossAndMetrics:
    """Raises the chosen and lowers the rejected, `1 - sigmoid(beta D_c) + sigmoid(beta D_r)`.

    For chosen completions that are better than the policy's own.
    Source: APO, arXiv:2408.06266, equation 7.

    Args:
        logprobs: see the module, like the other arguments.

    Raises:
        ValueError: beta is not above 0.
    """
    check_positive("beta", beta)
    pairs = _pairs(logprobs, token_weights, pair_weights, reference_logprobs)
    # sigmoid(-x) is 1 - sigmoid(x) without cancellation.
    loss_P = torch.sigmoid(-beta * pairs.chosen) + torch.sigmoid(beta * pairs.rejected)
    return _summed(loss_P, pairs, beta)


def apo_down(
    logprobs: Tensor,
    *,
    token_weights: Tensor,
    pair_weights: Tensor,
    reference_logprobs: Tensor,
    beta: float,
) -> LossAndMetrics:
    """Lowers both, the rejected more, `sigmoid(beta D_c) + 1 - sigmoid(beta d)`.

    For chosen completions that are worse than the policy's own.
    Source: APO, arXiv:2408.06266, equation 8.

    Args:
        logprobs: see the module, like the other arguments.

    Raises:
        ValueError: beta is not above 0.
    """
    check_positive("beta", beta)
    pairs = _pairs(logprobs, token_weights, pair_weights, reference_logprobs)
    loss_P = torch.sigmoid(beta * pairs.chosen) + torch.sigmoid(-beta * pairs.difference)
    return _summed(loss_P, pairs, beta)


def exo_pair(
    logprobs: Tensor,
    *,
    token_weights: Tensor,
    pair_weights: Tensor,
    reference_logprobs: Tensor,
    beta: float,
    label_smoothing: float,
) -> LossAndMetrics:
    """The divergence of the policy's preference from the smoothed label, policy first.

    With s = sigmoid(beta d): `s (log s - log(1 - eps)) + (1 - s) (log(1 - s) - log eps)`.
    Source: EXO, arXiv:2402.00856, equation 16.

    Args:
        logprobs: see the module, like the other arguments.
        label_smoothing: eps, above 0 and below 0.5: the divergence from a label of 0 is infinite.

    Raises:
        ValueError: beta or label_smoothing is out of its range.
    """
    check_positive("beta", beta)
    check_positive("label_smoothing", label_smoothing)
    check_label_smoothing(label_smoothing)
    pairs = _pairs(logprobs, token_weights, pair_weights, reference_logprobs)
    logit_P = beta * pairs.difference
    loss_P = torch.sigmoid(logit_P) * (logsigmoid(logit_P) - math.log1p(-label_smoothing))
    loss_P = loss_P + torch.sigmoid(-logit_P) * (logsigmoid(-logit_P) - math.log(label_smoothing))
    return _summed(loss_P, pairs, beta)


def nca_pair(
    logprobs: Tensor,
    *,
    token_weights: Tensor,
    pair_weights: Tensor,
    reference_logprobs: Tensor,
    beta: float,
) -> LossAndMetrics:
    """Noise contrast for each completion by itself, which keeps the chosen log-prob from falling.

    `-log sigmoid(beta D_c) - log sigmoid(-beta D_c) / 2 - log sigmoid(-beta D_r) / 2`.
    Source: NCA, arXiv:2402.05369, section 4, for pairs as in TRL's `nca_pair`.

    Args:
        logprobs: see the module, like the other arguments.

    Raises:
        ValueError: beta is not above 0.
    """
    check_positive("beta", beta)
    pairs = _pairs(logprobs, token_weights, pair_weights, reference_logprobs)
    chosen_P, rejected_P = beta * pairs.chosen, beta * pairs.rejected
    loss_P = -logsigmoid(chosen_P) - 0.5 * (logsigmoid(-chosen_P) + logsigmoid(-rejected_P))
    return _summed(loss_P, pairs, beta)


def sppo_hard(
    logprobs: Tensor,
    *,
    token_weights: Tensor,
    pair_weights: Tensor,
    reference_logprobs: Tensor,
    beta: float,
) -> LossAndMetrics:
    """Squared distances of both log-ratios from their goals.

    `(D_c - 1 / (2 beta))^2 + (D_r + 1 / (2 beta))^2`. Source: SPPO, arXiv:2405.00675, equation 4.7,
    with the probability of winning taken as 1 for the chosen and 0 for the rejected.

    Args:
        logprobs: see the module, like the other arguments.

    Raises:
        ValueError: beta is not above 0.
    """
    check_positive("beta", beta)
    pairs = _pairs(logprobs, token_weights, pair_weights, reference_logprobs)
    goal = 1 / (2 * beta)
    loss_P = (pairs.chosen - goal).square() + (pairs.rejected + goal).square()
    return _summed(loss_P, pairs, beta)


def discopop(
    logprobs: Tensor,
    *,
    token_weights: Tensor,
    pair_weights: Tensor,
    reference_logprobs: Tensor,
    beta: float,
    tau: float,
) -> LossAndMetrics:
    """A blend of the logistic and the exponential loss, found by search.

    With x = beta d and m = sigmoid(x / tau): `(1 - m) (-log sigmoid(x)) + m e^(-x)`.
    Source: DiscoPOP, arXiv:2406.08414, equation 5. -x is clamped to at most 20 in the exponent,
    where for the paper's tau of 0.05 the blend has long left that part out.

    Args:
        logprobs: see the module, like the other arguments.
        tau: temperature of the blend, above 0.

    Raises:
        ValueError: beta or tau is not above 0.
    """
    check_positive("beta", beta)
    check_positive("tau", tau)
    pairs = _pairs(logprobs, token_weights, pair_weights, reference_logprobs)
    logit_P = beta * pairs.difference
    exponential_P = (-logit_P).clamp(max=MAX_LOG_RATIO).exp()
    loss_P = torch.sigmoid(-logit_P / tau) * -logsigmoid(logit_P)
    loss_P = loss_P + torch.sigmoid(logit_P / tau) * exponential_P
    return _summed(loss_P, pairs, beta)


def dpo_sft(
    logprobs: Tensor,
    *,
    token_weights: Tensor,
    pair_weights: Tensor,
    reference_logprobs: Tensor,
    beta: float,
    sft_weight: float,
) -> LossAndMetrics:
    """DPO plus the mean negative log-likelihood per token of the chosen completion.

    `-log sigmoid(beta d) + sft_weight nll_c/len`; the second term keeps the chosen log-prob from
    falling. It has a metric of its own, `sft_loss` (before its weight). To add it to another loss,
    add `sft_term` in a function of your own.
    Source: arXiv:2404.19733, equation 1, whose alpha is sft_weight. TRL's `sft` averages over all
    chosen tokens of a batch instead.

    Args:
        logprobs: see the module, like the other arguments.
        sft_weight: at least 0.

    Raises:
        ValueError: beta or sft_weight is out of its range.
    """
    check_not_negative("sft_weight", sft_weight)
    loss, metrics = dpo_sigmoid(
        logprobs,
        token_weights=token_weights,
        pair_weights=pair_weights,
        reference_logprobs=reference_logprobs,
        beta=beta,
    )
    sft_loss = sft_term(logprobs, token_weights=token_weights, pair_weights=pair_weights)
    return loss + sft_weight * sft_loss, {**metrics, "sft_loss": sft_loss.detach()}


def simpo(
    logprobs: Tensor, *, token_weights: Tensor, pair_weights: Tensor, beta: float, gamma: float
) -> LossAndMetrics:
    """Average log-probs compared with a margin and no reference.

    `-log sigmoid(beta (logp_c/len - logp_r/len) - gamma)`. Source: SimPO, arXiv:2405.14734,
    equation 6. Some state gamma as a share of beta instead.

    Args:
        logprobs: see the module, like the other arguments.
        gamma: margin that the difference of rewards has to reach, at least 0.

    Raises:
        ValueError: beta or gamma is out of its range.
    """
    check_positive("beta", beta)
    check_not_negative("gamma", gamma)
    pairs = _pairs(logprobs, token_weights, pair_weights, None).averaged()
    return _summed(-logsigmoid(beta * pairs.difference - gamma), pairs, beta)


def orpo(
    logprobs: Tensor, *, token_weights: Tensor, pair_weights: Tensor, beta: float
) -> LossAndMetrics:
    """SFT on the chosen plus the odds ratio of both, without a reference.

    With a the average log-prob of a completion and odds(a) = e^a / (1 - e^a):
    `-a_c - beta log sigmoid(log odds(a_c) - log odds(a_r))`. For the odds a is clamped to between
    -50 and -1e-6; where the clamp holds, only the first term has a gradient.
    Source: ORPO, arXiv:2403.07691, equations 6 and 7, whose lambda is beta; Fireworks takes 1.0.

    Args:
        logprobs: see the module, like the other arguments.

    Raises:
        ValueError: beta is not above 0.
    """
    check_positive("beta", beta)
    pairs = _pairs(logprobs, token_weights, pair_weights, None).averaged()
    logit_P = _log_odds(pairs.chosen) - _log_odds(pairs.rejected)
    return _summed(-pairs.chosen - beta * logsigmoid(logit_P), pairs, beta)


def sft_term(logprobs: Tensor, *, token_weights: Tensor, pair_weights: Tensor) -> Tensor:
    """The weighted sum over pairs of the chosen completion's mean negative log-likelihood.

    Args:
        logprobs: see the module, like the other arguments.
    """
    pairs = _pairs(logprobs, token_weights, pair_weights, None).averaged()
    return -(pairs.weights * pairs.chosen).sum()


@dataclass(frozen=True)
class _Pairs:
    """What the losses are made of; each `[P]`."""

    chosen: Tensor
    """Score of the chosen completion."""
    rejected: Tensor
    chosen_logprob: Tensor
    rejected_logprob: Tensor
    chosen_length: Tensor
    """Tokens that count, at least 1."""
    rejected_length: Tensor
    weights: Tensor
    kl: Tensor | None
    """Summed log-ratio, mean of both completions; None = there is no reference."""
    num_tokens: Tensor
    """Of all pairs, a scalar."""

    @property
    def difference(self) -> Tensor:
        return self.chosen - self.rejected

    def averaged(self) -> "_Pairs":
        """The same with scores per token."""
        return replace(
            self,
            chosen=self.chosen / self.chosen_length,
            rejected=self.rejected / self.rejected_length,
        )


def _pairs(
    logprobs: Tensor,
    token_weights: Tensor,
    pair_weights: Tensor,
    reference_logprobs: Tensor | None,
) -> _Pairs:
    assert len(logprobs) % 2 == 0, "rows come in pairs of chosen and rejected"
    marked = token_weights != 0
    logprob_B = _row_sums(logprobs, token_weights, marked)
    score_B = logprob_B
    kl_P = None
    if reference_logprobs is not None:
        score_B = logprob_B - _row_sums(reference_logprobs, token_weights, marked)
        kl_P = 0.5 * (score_B[0::2] + score_B[1::2]).detach()
    num_tokens_B = marked.sum(dim=1).to(logprobs.dtype)
    length_B = num_tokens_B.clamp(min=1)
    return _Pairs(
        chosen=score_B[0::2],
        rejected=score_B[1::2],
        chosen_logprob=logprob_B[0::2],
        rejected_logprob=logprob_B[1::2],
        chosen_length=length_B[0::2],
        rejected_length=length_B[1::2],
        weights=pair_weights[0::2],
        kl=kl_P,
        num_tokens=num_tokens_B.sum(),
    )


def _row_sums(logprobs: Tensor, token_weights: Tensor, marked: Tensor) -> Tensor:
    # `where` before the product: 0 * NaN is NaN, and so is its gradient.
    safe = torch.where(marked, logprobs, torch.zeros_like(logprobs))
    return (token_weights * safe).sum(dim=1)


def _log_odds(average_logprob: Tensor) -> Tensor:
    clamped = average_logprob.clamp(*ORPO_LOGPROB_RANGE)
    return clamped - torch.log(-torch.expm1(clamped))


def _summed(loss_P: Tensor, pairs: _Pairs, beta: float) -> LossAndMetrics:
    """The weighted sum of the losses of pairs, and the metrics of the module."""
    chosen, rejected = pairs.chosen.detach(), pairs.rejected.detach()
    accuracy_P = torch.where(chosen == rejected, 0.5, (chosen > rejected).to(chosen.dtype))
    means = {
        "accuracy": accuracy_P,
        "margin": beta * (chosen - rejected),
        "chosen_reward": beta * chosen,
        "rejected_reward": beta * rejected,
        "chosen_logprob": pairs.chosen_logprob.detach(),
        "rejected_logprob": pairs.rejected_logprob.detach(),
        "chosen_length": pairs.chosen_length,
        "rejected_length": pairs.rejected_length,
    }
    if pairs.kl is not None:
        means["kl"] = pairs.kl
    metrics = {name: (pairs.weights * value_P).sum() for name, value_P in means.items()}
    metrics["num_tokens"] = pairs.num_tokens
    return (pairs.weights * loss_P).sum(), metrics
