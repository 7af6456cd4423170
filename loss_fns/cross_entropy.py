"""Cross-entropy on weighted tokens. Legend: B rows, T tokens."""

import torch
from torch import Tensor


def cross_entropy(logprobs: Tensor, *, token_weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted sum of negative log-probs, and its metrics.

    `loss = -sum_t w_t * logp_t`. The divisor is part of the weights, so with `token_mean` weights
    this is the mean negative log-likelihood per supervised token of the optimizer step.

    Args:
        logprobs: `[B, T]` log-probs of the target tokens, nats.
        token_weights: `[B, T]`; 0 = the token is not in the loss, whatever its log-prob (NaN too).
    """
    supervised_BT = token_weights != 0
    # `where` before the product: 0 * NaN is NaN, and would leak through a mask.
    safe_logprobs_BT = torch.where(supervised_BT, logprobs, torch.zeros_like(logprobs))
    loss = -(token_weights * safe_logprobs_BT).sum()
    return loss, {"num_tokens": supervised_BT.sum().to(logprobs.dtype)}
