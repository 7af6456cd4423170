"""Every loss with hyper-parameters, and random batches to put into them.

Legend: B rows, T tokens, P pairs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from loss_fns import dpo, kl, policy
from loss_fns.cross_entropy import cross_entropy
from tunebook.columns import required_columns

Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]

POLICY: dict[str, Loss] = {
    "importance_sampling": policy.importance_sampling,
    "ppo": partial(policy.ppo, clip_low=0.8, clip_high=1.2),
    "grpo": partial(policy.grpo, clip_low=0.8, clip_high=1.28),
    "gspo": partial(policy.gspo, clip_low=0.95, clip_high=1.05),
    "cispo": partial(policy.cispo, clip_low=0.7, clip_high=1.5),
    "dppo": partial(policy.dppo, delta_low=0.05, delta_high=0.1),
    "dro": partial(policy.dro, beta=0.05),
}
WITH_KL: dict[str, Loss] = {
    f"grpo_{name}": kl.with_kl(POLICY["grpo"], beta=0.1, estimator=name)
    for name in ("k1", "k2", "k3")
}
PREFERENCE: dict[str, Loss] = {
    "dpo_sigmoid": partial(dpo.dpo_sigmoid, beta=0.3),
    "dpo_conservative": partial(dpo.dpo_conservative, beta=0.3, label_smoothing=0.1),
    "dpo_robust": partial(dpo.dpo_robust, beta=0.3, label_smoothing=0.2),
    "dpo_hinge": partial(dpo.dpo_hinge, beta=0.3),
    "dpo_sigmoid_norm": partial(dpo.dpo_sigmoid_norm, beta=2.0),
    "dpo_sft": partial(dpo.dpo_sft, beta=0.3, sft_weight=0.5),
    "ipo": partial(dpo.ipo, beta=0.4),
    "apo_zero": partial(dpo.apo_zero, beta=0.3),
    "apo_down": partial(dpo.apo_down, beta=0.3),
    "exo_pair": partial(dpo.exo_pair, beta=0.3, label_smoothing=0.01),
    "nca_pair": partial(dpo.nca_pair, beta=0.3),
    "sppo_hard": partial(dpo.sppo_hard, beta=0.3),
    "discopop": partial(dpo.discopop, beta=0.3, tau=0.5),
    "simpo": partial(dpo.simpo, beta=2.0, gamma=1.0),
    "orpo": partial(dpo.orpo, beta=1.0),
}
EVERY = {"cross_entropy": cross_entropy, **POLICY, **WITH_KL, **PREFERENCE}


def make_batch(
    *, rows: int = 6, tokens: int = 5, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs `[B, T]` and every column that any loss reads.

    A third of the tokens has weight 0, the first of each row among them. The weights of the others
    differ, as in a mean over rows; pairs share their weight.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=generator, dtype=dtype)

    logprobs = uniform(-3, -0.1, rows, tokens)
    weights = uniform(0.1, 1, rows, tokens)
    weights[torch.rand(rows, tokens, generator=generator) < 1 / 3] = 0
    weights[:, 0], weights[:, 1] = 0, 0.5
    return logprobs, {
        "token_weights": weights,
        "sampling_logprobs": logprobs + uniform(-0.6, 0.6, rows, tokens),
        "reference_logprobs": logprobs + uniform(-0.8, 0.8, rows, tokens),
        "advantages": uniform(-2, 2, rows, tokens),
        "pair_weights": uniform(0.1, 0.5, rows // 2).repeat_interleave(2),
    }


def columns_of(loss: Loss, columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """The columns that a loss reads."""
    return {name: columns[name] for name in required_columns(loss)}


def value_and_gradient(
    loss: Loss, logprobs: Tensor, columns: dict[str, Tensor]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The loss, its gradient `[B, T]` and its metrics."""
    leaf = logprobs.clone().requires_grad_()
    value, metrics = loss(leaf, **columns_of(loss, columns))
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient, metrics


def per_token(columns: dict[str, Tensor]) -> list[str]:
    """Names of the columns `[B, T]` besides the weights."""
    return [name for name, each in columns.items() if each.ndim == 2 and name != "token_weights"]


def changed(columns: dict[str, Tensor], change: Callable[[Tensor], Any]) -> dict[str, Tensor]:
    """The columns with every one of them changed."""
    return {name: change(each) for name, each in columns.items()}
