"""The service's losses on top of ours: what they read, their defaults, how they are aggregated.

The service gives 0/1 selection to policy losses and real weights to cross-entropy, and reports
sums; only GRPO has a divisor. Legend: B samples, T tokens of a sample.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from loss_fns.cross_entropy import cross_entropy
from loss_fns.kl import with_kl
from loss_fns.policy import cispo, dppo, dro, grpo, gspo, importance_sampling, ppo
from tunebook.backends.base import LossFn
from tunebook.columns import required_columns
from tunebook.serve.errors import invalid
from tunebook.serve.values import check_keys, read_choice, read_number, read_object, required
from tunebook.types import Datum, FloatArray, IntArray

if TYPE_CHECKING:
    from torch import Tensor

FIXED_HORIZON, TOKEN_MEAN, SEQUENCE_MEAN = "fixed_horizon", "token_mean", "sequence_mean"
AGGREGATIONS = {
    "GRPO_LOSS_AGGREGATION_TYPE_UNSPECIFIED": FIXED_HORIZON,
    "GRPO_LOSS_AGGREGATION_TYPE_FIXED_HORIZON": FIXED_HORIZON,
    "GRPO_LOSS_AGGREGATION_TYPE_TOKEN_MEAN": TOKEN_MEAN,
    "GRPO_LOSS_AGGREGATION_TYPE_SEQUENCE_MEAN": SEQUENCE_MEAN,
}
RATIOS = {"GRPO_LOSS_RATIO_TYPE_TOKEN": grpo, "GRPO_LOSS_RATIO_TYPE_SEQUENCE": gspo}
KL_ESTIMATOR = "k3"


@dataclass(frozen=True, slots=True)
class Loss:
    """One loss with its parameters."""

    fn: LossFn
    is_policy: bool
    aggregation: str | None = None
    """Divisor of GRPO; None = a sum."""
    needs_reference: bool = False

    def datum(self, tokens: IntArray, inputs: Mapping[str, FloatArray], where: str) -> Datum:
        """A sample in our columns.

        Args:
            tokens: `[T + 1]`
            inputs: name -> `[T]`
            where: place of the inputs, for messages.

        Raises:
            ApiError: an input is missing, or of another loss.
        """
        if not self.is_policy:
            check_keys(inputs, ("weights",), where)
            return Datum(tokens, {"token_weights": required(inputs, "weights", where)})
        known = ("logprobs", "advantages", "reference_logprobs", "weights", "mask")
        check_keys(inputs, known, where)
        columns = {
            "token_weights": selection(inputs, where, len(tokens) - 1),
            "sampling_logprobs": required(inputs, "logprobs", where),
            "advantages": required(inputs, "advantages", where),
        }
        if self.needs_reference:
            columns["reference_logprobs"] = required(inputs, "reference_logprobs", where)
        return Datum(tokens, columns)

    def aggregated(self, data: Sequence[Datum]) -> list[Datum]:
        """The samples of one request with the divisor of the loss in their `token_weights`.

        A fixed horizon is the longest sample of the request.
        """
        if self.aggregation is None:
            return list(data)
        marks = [np.asarray(datum.columns["token_weights"]) for datum in data]
        counts = [max(1.0, float(mark.sum())) for mark in marks]
        if self.aggregation == SEQUENCE_MEAN:
            divisors = [len(data) * count for count in counts]
        elif self.aggregation == TOKEN_MEAN:
            divisors = [max(1.0, float(sum(mark.sum() for mark in marks)))] * len(data)
        else:
            divisors = [float(len(data) * max(datum.num_scored for datum in data))] * len(data)
        return [
            replace(
                datum, columns={**datum.columns, "token_weights": (mark / d).astype(np.float32)}
            )
            for datum, mark, d in zip(data, marks, divisors, strict=True)
        ]


def selection(inputs: Mapping[str, FloatArray], where: str, num_scored: int) -> FloatArray:
    """`[T]` 1 where a policy loss counts a token, else 0: `weights` or `mask`, neither = all.

    Args:
        inputs: of a sample.
        where: their place, for messages.
        num_scored: T
    """
    if "weights" in inputs and "mask" in inputs:
        raise invalid(where, "holds both weights and mask; give one of them")
    for name in ("weights", "mask"):
        if name in inputs:
            return (inputs[name] != 0).astype(np.float32)
    return np.ones(num_scored, np.float32)


def read_loss(value: Any) -> Loss:
    """The loss that a request names, with the service's defaults.

    Raises:
        ApiError: there is no such loss, or a parameter of it is not allowed.
    """
    loss = read_object(value, "loss")
    read, params_key = read_choice(required(loss, "type", "loss"), LOSSES, "loss.type")
    check_keys(loss, ("type", *([params_key] if params_key else [])), "loss")
    where = f"loss.{params_key}"
    params = {} if params_key is None else read_object(loss.get(params_key) or {}, where)
    return read(params, where)


def _read_cross_entropy(params: Mapping[str, Any], where: str) -> Loss:
    check_keys(params, (), where)
    return Loss(cross_entropy, is_policy=False)


def _read_importance_sampling(params: Mapping[str, Any], where: str) -> Loss:
    check_keys(params, (), where)
    return Loss(importance_sampling, is_policy=True)


def _read_clipped(
    params: Mapping[str, Any], where: str, *, fn: LossFn, low: float, high: float
) -> Loss:
    check_keys(params, ("clip_low_threshold", "clip_high_threshold"), where)
    return Loss(_clipped(params, where, fn=fn, low=low, high=high), is_policy=True)


def _clipped(
    params: Mapping[str, Any], where: str, *, fn: LossFn, low: float, high: float
) -> LossFn:
    given_low, given_high = params.get("clip_low_threshold"), params.get("clip_high_threshold")
    clip_low = read_number(
        low if given_low is None else given_low, f"{where}.clip_low_threshold", low=0, high=1
    )
    clip_high = read_number(
        high if given_high is None else given_high, f"{where}.clip_high_threshold", low=1
    )
    return partial(fn, clip_low=clip_low, clip_high=clip_high)


def _read_dppo(params: Mapping[str, Any], where: str) -> Loss:
    check_keys(params, ("delta_low", "delta_high"), where)
    deltas = {
        name: read_number(
            0.15 if params.get(name) is None else params[name], f"{where}.{name}", low=0, high=1
        )
        for name in ("delta_low", "delta_high")
    }
    return Loss(partial(dppo, **deltas), is_policy=True)


def _read_dro(params: Mapping[str, Any], where: str) -> Loss:
    check_keys(params, ("beta",), where)
    beta = read_number(required(params, "beta", where), f"{where}.beta", low=0)
    if beta == 0:
        raise invalid(f"{where}.beta", "must be above 0")
    return Loss(partial(dro, beta=beta), is_policy=True)


def _read_grpo(params: Mapping[str, Any], where: str) -> Loss:
    known = ("clip_low_threshold", "clip_high_threshold", "beta", "agg_type", "ratio_type")
    check_keys(params, known, where)
    ratio = params.get("ratio_type") or "GRPO_LOSS_RATIO_TYPE_TOKEN"
    fn = _clipped(
        params, where, fn=read_choice(ratio, RATIOS, f"{where}.ratio_type"), low=0.8, high=1.2
    )
    beta = read_number(params.get("beta") or 0.0, f"{where}.beta", low=0)
    aggregation = params.get("agg_type") or "GRPO_LOSS_AGGREGATION_TYPE_UNSPECIFIED"
    return Loss(
        with_kl(fn, beta=beta, estimator=KL_ESTIMATOR) if beta else fn,
        is_policy=True,
        aggregation=read_choice(aggregation, AGGREGATIONS, f"{where}.agg_type"),
        needs_reference=beta > 0,
    )


LOSSES: Mapping[str, tuple[Callable[[Mapping[str, Any], str], Loss], str | None]] = {
    "LOSS_TYPE_CROSS_ENTROPY": (_read_cross_entropy, "cross_entropy_params"),
    "LOSS_TYPE_IMPORTANCE_SAMPLING": (_read_importance_sampling, None),
    "LOSS_TYPE_PPO": (partial(_read_clipped, fn=ppo, low=0.8, high=1.2), "ppo_params"),
    "LOSS_TYPE_CISPO": (partial(_read_clipped, fn=cispo, low=0.0, high=4.0), "cispo_params"),
    "LOSS_TYPE_DPPO": (_read_dppo, "dppo_params"),
    "LOSS_TYPE_DRO": (_read_dro, "dro_params"),
    "LOSS_TYPE_GRPO": (_read_grpo, "grpo_params"),
}


def from_gradients(
    logprobs: Tensor, *, token_weights: Tensor, gradients: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of which the log-probs have given gradients, `sum_t g_t logp_t`.

    Args:
        logprobs: `[B, T]`, nats.
        token_weights: `[B, T]`; 0 where the gradient is 0, so that nothing is computed there.
        gradients: `[B, T]`, of the client's loss.
    """
    marked = token_weights != 0
    loss = (gradients * logprobs.where(marked, logprobs.new_zeros(()))).sum()
    return loss, {"num_tokens": marked.sum().to(logprobs.dtype)}


class Observed:
    """A loss that also keeps the log-probs it is given, by sample."""

    ROW = "row"
    """Column that numbers the samples."""

    def __init__(self, loss_fn: LossFn, num_rows: int) -> None:
        self.loss_fn = loss_fn
        self.logprobs: list[Tensor | None] = [None] * num_rows
        self.__name__ = "observed"
        self.names = required_columns(loss_fn)
        # What the engine gives a loss is read off its signature.
        self.__signature__ = inspect.Signature(
            [
                inspect.Parameter("logprobs", inspect.Parameter.POSITIONAL_OR_KEYWORD),
                *(
                    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
                    for name in (*self.names, self.ROW)
                ),
            ]
        )

    def __call__(self, logprobs: Tensor, **columns: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """What the loss returns.

        Args:
            logprobs: `[B, T]`, nats.
            columns: those of the loss, and `[B]` numbers of the samples.
        """
        for row, values in zip(columns.pop(self.ROW).tolist(), logprobs.detach(), strict=True):
            self.logprobs[int(row)] = values.cpu()
        return self.loss_fn(logprobs, **columns)

    @classmethod
    def numbered(cls, data: Sequence[Datum]) -> list[Datum]:
        """The samples with the column that numbers them."""
        return [
            replace(datum, columns={**datum.columns, cls.ROW: float(number)})
            for number, datum in enumerate(data)
        ]
