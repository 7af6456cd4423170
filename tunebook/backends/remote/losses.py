"""How a loss is computed: by the service where it has the same one, else here in two passes.

What a service calls its losses is in its table. Its policy losses may take any weight other than 0
for 1, so our `token_weights`, which hold the divisor too, go into the advantages: all of these
losses but `dro` are homogeneous in the advantage, for weights of at least 0. The pull of `dro` is
not, so its `beta` is multiplied by the weight instead, which has to be the same for all tokens.

Everything else takes two passes: the log-probs come here, the loss is computed and differentiated
here, and the gradient with respect to the log-probs goes back. Loss and metrics are computed here
in both ways, from the log-probs of the pass itself, so they are those of `backend=local`.

Legend: B rows, T tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tunebook.backends.base import LossFn
from tunebook.backends.remote.rows import marked_column, marks_of
from tunebook.columns import loss_name, required_columns
from tunebook.errors import BackendError, NonFiniteError
from tunebook.losses import loss_and_metrics
from tunebook.types import Datum, FloatArray, Metrics

if TYPE_CHECKING:
    from torch import Tensor

CROSS_ENTROPY = "cross_entropy"
ROWS_AT_ONCE = 64
"""Rows whose loss is computed at once; bounds the memory that padding takes."""
INDEPENDENT = "the loss does not depend on the log-probs it was given"
TOLERANCE = 0.02
"""Relative difference of the service's loss from ours from which on it means something else; less
is what a lower precision than float32 makes."""


@dataclass(frozen=True, slots=True)
class ServiceLoss:
    """A loss of a service."""

    name: str
    """As the service calls it."""
    parameters: Mapping[str, str]
    """Ours -> the service's; bounds are those of the ratio itself on both sides."""


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A loss that the service computes, for some rows."""

    name: str
    """As the service calls it."""
    parameters: dict[str, float]
    """By the service's names; all of them, its defaults are none of ours."""
    columns: list[dict[str, FloatArray]]
    """Of each row: name of the service -> `[T]`."""


def built_in(
    loss_fn: LossFn, data: Sequence[Datum], losses: Mapping[str, ServiceLoss]
) -> BuiltIn | None:
    """The service's own loss for these rows; None where it has none of this meaning.

    Args:
        loss_fn: ours.
        data: the rows.
        losses: of the service as sums over tokens, by our names; its policy losses read
            `logprobs`, `advantages` and 0/1 in `weights`.
    """
    from loss_fns import cross_entropy, policy

    function, bound = _unbound(loss_fn)
    if function is cross_entropy.cross_entropy and not bound and CROSS_ENTROPY in losses:
        weights = [marked_column(datum, "token_weights", row) for row, datum in enumerate(data)]
        return BuiltIn(losses[CROSS_ENTROPY].name, {}, [{"weights": each} for each in weights])
    name = getattr(function, "__name__", "")
    if name not in losses or function is not getattr(policy, name, None):
        return None
    theirs = losses[name]
    if bound.keys() != theirs.parameters.keys():
        return None
    weights = [marked_column(datum, "token_weights", row) for row, datum in enumerate(data)]
    used = np.concatenate([each[each != 0] for each in weights])
    if (used < 0).any():
        return None
    parameters = {their: float(bound[our]) for our, their in theirs.parameters.items()}
    if name == "dro":
        if not len(used) or (used != used[0]).any():
            return None
        parameters[theirs.parameters["beta"]] *= float(used[0])
    columns = [
        {
            "logprobs": marked_column(datum, "sampling_logprobs", row),
            "advantages": weights[row] * marked_column(datum, "advantages", row),
            "weights": marks_of(datum),
        }
        for row, datum in enumerate(data)
    ]
    return BuiltIn(theirs.name, parameters, columns)


def evaluated(data: Sequence[Datum], logprobs: Sequence[FloatArray], loss_fn: LossFn) -> Metrics:
    """The loss and its metrics, summed over the rows.

    Args:
        data: the rows.
        logprobs: `[T]` of each.
        loss_fn: the loss.

    Raises:
        NonFiniteError: the loss is.
    """
    totals: Metrics = {"loss": 0.0}
    _each_part(data, logprobs, loss_fn, 1, totals, lambda rows, leaf, loss: None, grad=False)
    return totals


def differentiated(
    data: Sequence[Datum],
    logprobs: Sequence[FloatArray],
    loss_fn: LossFn,
    *,
    rows_per_unit: int,
) -> tuple[list[FloatArray], Metrics]:
    """The gradient with respect to the log-probs, `[T]` a row, and loss and metrics.

    Args:
        data: the rows.
        logprobs: `[T]` of each; what stands where a weight is 0 does not matter.
        loss_fn: the loss.
        rows_per_unit: consecutive rows that belong together.

    Raises:
        NonFiniteError: the loss or its gradient is.
        BackendError: the loss does not depend on the log-probs.
    """
    import torch

    totals: Metrics = {"loss": 0.0}
    gradients: list[FloatArray] = []

    def take(rows: Sequence[Datum], leaf: Tensor, loss: Tensor) -> None:
        gradient = None
        if loss.requires_grad:
            (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
        if gradient is None:
            if any(marks_of(datum).any() for datum in rows):
                raise BackendError(INDEPENDENT)
            gradient = torch.zeros_like(leaf)
        if not torch.isfinite(gradient).all():
            raise NonFiniteError(
                f"loss {loss_name(loss_fn)!r}: its gradient is NaN or infinite; nothing of it was "
                "sent. Look at the rows of this step, or lower optimizer.learning_rate"
            )
        for row, datum in enumerate(rows):
            gradients.append(gradient[row, : datum.num_scored].numpy() * marks_of(datum))

    _each_part(data, logprobs, loss_fn, rows_per_unit, totals, take, grad=True)
    return gradients, totals


def differs(theirs: float, ours: float) -> bool:
    """Whether the service's value of a loss is another one than ours."""
    return not math.isclose(theirs, ours, rel_tol=TOLERANCE, abs_tol=TOLERANCE * 0.01)


def _each_part(
    data: Sequence[Datum],
    logprobs: Sequence[FloatArray],
    loss_fn: LossFn,
    rows_per_unit: int,
    totals: Metrics,
    take: Callable[[Sequence[Datum], Tensor, Tensor], None],
    *,
    grad: bool,
) -> None:
    """Computes the loss part by part, adds it to the totals and hands it on."""
    import torch

    from tunebook.backends.local.logprobs import collate_columns

    names = required_columns(loss_fn)
    size = max(1, ROWS_AT_ONCE // rows_per_unit) * rows_per_unit
    for start in range(0, len(data), size):
        rows = data[start : start + size]
        longest = max(datum.num_scored for datum in rows)
        padded = np.zeros((len(rows), longest), np.float32)
        for row, datum in enumerate(rows):
            padded[row, : datum.num_scored] = logprobs[start + row]
        leaf = torch.from_numpy(padded).requires_grad_(grad)
        columns = collate_columns(rows, names, num_columns=longest, device=leaf.device)
        with torch.set_grad_enabled(grad):
            # A copy, so that a loss may write into what it is given.
            returned = loss_fn(leaf.clone(), **columns)
        loss, metrics = loss_and_metrics(loss_fn, returned)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise NonFiniteError(
                f"loss {loss_name(loss_fn)!r}: its value is {value}, and no step is taken. Look at "
                "the rows of this step, or lower optimizer.learning_rate"
            )
        for name, metric in {"loss": value, **metrics}.items():
            totals[name] = totals.get(name, 0.0) + metric
        take(rows, leaf, loss)


def _unbound(loss_fn: LossFn) -> tuple[Any, dict[str, Any]]:
    """The function behind partials, and the arguments that they bind."""
    bound: dict[str, Any] = {}
    function: Any = loss_fn
    while isinstance(function, functools.partial):
        if function.args:
            return None, {}
        bound = {**function.keywords, **bound}
        function = function.func
    return function, bound
