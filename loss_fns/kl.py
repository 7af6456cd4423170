"""KL divergence to a reference, estimated from sampled tokens. Legend: B rows, T tokens.

For one token, p is its log-prob under the trained policy and f under the reference. The estimators
agree in what they estimate, KL(policy, reference) if the tokens were sampled from the policy, but
not in their gradient, which is what a term of the loss is for:
    k1: unbiased, may be negative. Its gradient is that of p alone, 0 in expectation: as a term of
        the loss it adds noise. It belongs in the reward (`tunebook.advantages`).
    k2: biased, never negative. Its gradient is that of the divergence.
    k3: unbiased, never negative. Its gradient is that of k2 to first order, and is bounded where
        the policy gives a token more than the reference does.

Sources: J. Schulman, "Approximating KL Divergence", 2020 (the estimators); arXiv:2510.01555
(their gradients). Services differ in what they do to large differences: xorl clamps the exponent at
10, SkyRL at 20 and the value at 10. TRL multiplies k3 by the importance ratio
(`use_bias_correction_kl`); here, as in GRPO (arXiv:2402.03300, equation 4), it is not.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from loss_fns.checks import MAX_LOG_RATIO, check_positive

PolicyLoss: TypeAlias = Callable[..., tuple[Tensor, Mapping[str, Tensor]]]
Estimator: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """The log-ratio `p - f`, `[B, T]`, nats.

    Args:
        logprobs: `[B, T]` p.
        reference_logprobs: `[B, T]` f.
    """
    return logprobs - reference_logprobs


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Half the squared log-ratio, `(p - f)^2 / 2`, `[B, T]`.

    Args:
        logprobs: `[B, T]` p.
        reference_logprobs: `[B, T]` f.
    """
    return 0.5 * (logprobs - reference_logprobs).square()


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """`e^(f - p) - (f - p) - 1`, `[B, T]`.

    Where f - p is above 20 it goes on as a straight line with the slope it has there: finite, and
    still pulling towards the reference with the gradient it has at 20.

    Args:
        logprobs: `[B, T]` p.
        reference_logprobs: `[B, T]` f.
    """
    logratio = reference_logprobs - logprobs
    # expm1: near 0 the difference of e^x and 1 + x is far below the rounding of either.
    curved = torch.expm1(logratio.clamp(max=MAX_LOG_RATIO)) - logratio
    return curved + math.exp(MAX_LOG_RATIO) * torch.relu(logratio - MAX_LOG_RATIO)


ESTIMATORS: Mapping[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3}
"""Name -> estimator, as a config names them."""


def with_kl(loss_fn: PolicyLoss, *, beta: float, estimator: str | Estimator) -> "WithKL":
    """The loss plus `sum_t w_t * beta * kl_t`, `w` the `token_weights`.

    It reads the columns of `loss_fn`, `token_weights` and `reference_logprobs`, has the name of
    `loss_fn`, and adds the metric `kl_sum` (nats; the estimate summed over tokens that count).

    Args:
        loss_fn: a policy loss, its hyper-parameters bound.
        beta: weight of the term, above 0; for none, use `loss_fn` as it is.
        estimator: `k1`, `k2`, `k3`, or a function of two `[B, T]` tensors like them.

    Raises:
        ValueError: beta is not above 0, or there is no such estimator.
    """
    return WithKL(loss_fn, beta=beta, estimator=estimator)


class WithKL:
    """What `with_kl` returns: a loss that can be pickled, and inspected like a function."""

    def __init__(self, loss_fn: PolicyLoss, *, beta: float, estimator: str | Estimator) -> None:
        check_positive("beta", beta)
        if isinstance(estimator, str) and estimator not in ESTIMATORS:
            raise ValueError(f"estimator={estimator}: must be one of {', '.join(ESTIMATORS)}")
        self.loss_fn = loss_fn
        self.beta = beta
        self.estimator = ESTIMATORS[estimator] if isinstance(estimator, str) else estimator

    def __call__(
        self,
        logprobs: Tensor,
        *,
        token_weights: Tensor,
        reference_logprobs: Tensor,
        **columns: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and its metrics, see `with_kl`.

        Args:
            logprobs: `[B, T]`, nats.
            token_weights: `[B, T]`; 0 = the token is in neither term.
            reference_logprobs: `[B, T]`, nats; anything where the weight is 0.
            columns: the others that `loss_fn` reads.
        """
        given = {
            **columns,
            "token_weights": token_weights,
            "reference_logprobs": reference_logprobs,
        }
        own = inspect.signature(self.loss_fn).parameters
        loss, metrics = self.loss_fn(
            logprobs, **{name: given[name] for name in given if name in own}
        )
        marked = token_weights != 0
        zero = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
        p = torch.where(marked, logprobs, zero)
        f = torch.where(marked, reference_logprobs, zero)
        kl = torch.where(marked, self.estimator(p, f), zero)
        term = (token_weights * self.beta * kl).sum()
        return loss + term, {**metrics, "kl_sum": kl.detach().sum()}

    @property
    def __name__(self) -> str:
        inner: Any = self.loss_fn
        while isinstance(inner, functools.partial):
            inner = inner.func
        return getattr(inner, "__name__", type(inner).__name__)

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(self.loss_fn)
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=Tensor)
            for name in ("token_weights", "reference_logprobs")
            if name not in signature.parameters
        ]
        return signature.replace(parameters=[*signature.parameters.values(), *added])
