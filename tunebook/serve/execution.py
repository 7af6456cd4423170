"""Runs operations on the engine: those of a kind that several sessions ask for run as one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from tunebook.errors import NonFiniteError
from tunebook.serve.losses import Observed, from_gradients
from tunebook.serve.operations import (
    CustomForwardBackward,
    ForwardBackward,
    OptimStep,
    Request,
    Sample,
    SaveCheckpoint,
    WeightsSync,
)
from tunebook.serve.records import Checkpoint, Operation
from tunebook.serve.trainee import Trainee
from tunebook.types import Completion, Datum, StopReason

Output: TypeAlias = dict[str, Any]
ADAPTER, MERGED = "adapter", "merged"
STOP_REASONS = {StopReason.STOP: "STOP_REASON_STOP", StopReason.LENGTH: "STOP_REASON_LENGTH"}
LOWEST = float(np.finfo(np.float32).min)


class OperationError(Exception):
    """A failure of an operation that the client is told about."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class Result:
    """What an operation has come to."""

    output: Output
    checkpoint: Checkpoint | None = None
    large: str | None = None
    """The member of the output that is downloaded where it is too large."""


def joint_kind(request: Request) -> str | None:
    """What an operation can run together with; None = nothing."""
    if isinstance(request, ForwardBackward):
        return "forward" if request.forward_only else "forward_backward"
    if isinstance(request, CustomForwardBackward):
        return "forward_backward"
    return "sample" if isinstance(request, Sample) else None


def num_tokens(request: Request) -> int:
    """Tokens that an operation reads."""
    if isinstance(request, ForwardBackward | CustomForwardBackward):
        return sum(datum.num_scored for datum in request.data)
    return sum(map(len, request.prompts)) if isinstance(request, Sample) else 0


def begin(
    trainee: Trainee, operation: Operation, request: Request, now: float
) -> Callable[[], Result]:
    """Hands an operation to the engine; what is returned waits for it.

    Args:
        trainee: of the session.
        operation: its record.
        request: what is asked for.
        now: seconds since the epoch.

    Raises:
        OperationError: the session's state does not allow it.
    """
    if isinstance(request, ForwardBackward):
        if request.forward_only:
            return _forward(trainee, request)
        return _forward_backward(trainee, request)
    if isinstance(request, CustomForwardBackward):
        future = trainee.session.forward_backward(request.data, from_gradients)

        def finish() -> Result:
            metrics = future.result()
            trainee.passed()
            return Result({"metrics": _finite(metrics)})

        return finish
    if isinstance(request, Sample):
        return _sample(trainee, request)
    if isinstance(request, OptimStep):
        return _optim_step(trainee, request)
    if isinstance(request, WeightsSync):
        return lambda: _sync(trainee, operation)
    return lambda: _save(trainee, operation, request, now)


def _forward(trainee: Trainee, request: ForwardBackward) -> Callable[[], Result]:
    future = trainee.session.forward(request.data)

    def finish() -> Result:
        logprobs = future.result()
        metrics = _value_of(request, logprobs)
        output: Output = {"loss": metrics.pop("loss"), "metrics": _finite(metrics)}
        if request.return_outputs:
            output["loss_fn_outputs"] = _outputs(logprobs, request.data)
        return Result(output, large="loss_fn_outputs" if request.return_outputs else None)

    return finish


@torch.no_grad()
def _value_of(request: ForwardBackward, logprobs: Sequence[Tensor]) -> dict[str, float]:
    """The loss and its metrics, of log-probs that were computed before, row by row."""
    totals = {"loss": 0.0}
    for values, datum in zip(logprobs, request.data, strict=True):
        columns = {name: torch.as_tensor(column)[None] for name, column in datum.columns.items()}
        loss, metrics = request.loss.fn(values[None], **columns)
        for name, value in {"loss": loss, **metrics}.items():
            totals[name] = totals.get(name, 0.0) + float(value)
    if not np.isfinite(totals["loss"]):
        raise NonFiniteError(f"the loss is {totals['loss']}")
    return totals


def _forward_backward(trainee: Trainee, request: ForwardBackward) -> Callable[[], Result]:
    observed = Observed(request.loss.fn, len(request.data)) if request.return_outputs else None
    if observed is None:
        future = trainee.session.forward_backward(request.data, request.loss.fn)
    else:
        future = trainee.session.forward_backward(Observed.numbered(request.data), observed)

    def finish() -> Result:
        metrics = future.result()
        trainee.passed()
        output: Output = {"loss": metrics.pop("loss"), "metrics": _finite(metrics)}
        if observed is not None:
            output["loss_fn_outputs"] = _outputs(observed.logprobs, request.data)
        return Result(output, large=None if observed is None else "loss_fn_outputs")

    return finish


def _outputs(logprobs: Sequence[Tensor | None], data: Sequence[Datum]) -> list[Output]:
    """Log-probs of samples as the service has them: 0 outside the loss."""
    found: list[Output] = []
    for values, datum in zip(logprobs, data, strict=True):
        numbers = np.zeros(datum.num_scored, np.float32)
        if values is not None:
            marked = np.asarray(datum.columns["token_weights"]) != 0
            numbers[marked] = values[: datum.num_scored].numpy()[marked]
        tensor = {"data": numbers.tolist(), "dtype": "float32", "shape": [len(numbers)]}
        found.append({"tensors": {"logprobs": tensor}})
    return found


def _optim_step(trainee: Trainee, request: OptimStep) -> Callable[[], Result]:
    if trainee.record.non_finite:
        raise OperationError(
            "NON_FINITE_LOSS",
            "an earlier step of this session met a gradient that is not finite; stop the session "
            "and resume from a checkpoint with a lower learning rate",
        )
    if not trainee.has_gradient:
        raise OperationError(
            "INVALID_INPUT", "optim-step needs a forward-backward since the last one"
        )
    future = trainee.session.optim_step(request.params)

    def finish() -> Result:
        try:
            metrics = future.result()
        except NonFiniteError:
            trainee.record.non_finite = True
            raise
        trainee.stepped(trainee.record.progress)
        return Result({"step": str(trainee.record.progress.step), "metrics": _finite(metrics)})

    return finish


def _sync(trainee: Trainee, operation: Operation) -> Result:
    return Result({"weights_version": str(trainee.sync(operation.seq))})


def _sample(trainee: Trainee, request: Sample) -> Callable[[], Result]:
    published = trainee.record.published
    assert published is not None
    generator, version = trainee.generator, published.version
    future = generator.sample(request.prompts, request.params, request.num_samples)
    scored = request.prompt_logprobs or request.top_logprobs > 0
    scores = generator.score(request.prompts, request.top_logprobs) if scored else None

    def finish() -> Result:
        results = [_sampled(completions, version) for completions in future.result()]
        for result, score in zip(results, scores.result() if scores else [], strict=False):
            if request.prompt_logprobs:
                result["prompt_logprobs"] = _numbers(score.logprobs)
            if request.top_logprobs:
                result["topk_prompt_logprobs"] = [
                    {"token_ids": ids, "logprobs": _numbers(values)}
                    for ids, values in zip(score.top_ids, score.top_logprobs, strict=True)
                ]
        return Result({"results": results}, large="results")

    return finish


def _sampled(completions: Sequence[Completion], version: int) -> Output:
    return {
        "policy_segments": [{"version": version, "start_token": 0}],
        "sequences": [
            {
                "tokens": [str(token) for token in completion.tokens.tolist()],
                "logprobs": _numbers(completion.logprobs.tolist()),
                "stop_reason": STOP_REASONS[completion.stop_reason],
                "prompt_cache_hit_tokens": 0,
            }
            for completion in completions
        ],
    }


def _save(trainee: Trainee, operation: Operation, request: SaveCheckpoint, now: float) -> Result:
    if trainee.has_gradient:
        raise OperationError(
            "INVALID_INPUT",
            "a checkpoint between forward-backward and optim-step would lose the gradient; take "
            "the step first",
        )
    record = trainee.record
    # The same after a crash, so that what it left is replaced.
    identity = operation.id.replace("op-", "ck-", 1)
    folder = trainee.home / "checkpoints" / identity
    saved = trainee.session.save(identity).result()
    if request.for_training:
        folder = saved.path
    else:
        # Only what is served or downloaded is kept: the adapter, or the whole model.
        variant = ADAPTER if record.lora is not None else MERGED
        trainee.session.export(saved, folder / variant)
        trainee.session.discard(saved)
        folder = folder / variant
    checkpoint = Checkpoint(
        id=identity,
        session_id=record.id,
        base_model=record.base_model,
        created_at=now,
        step=record.progress.step,
        for_training=request.for_training,
        folder=str(folder.relative_to(trainee.home)),
        lora=record.lora,
        train_unembed=record.train_unembed,
    )
    return Result({"checkpoint": checkpoint.to_short_wire()}, checkpoint)


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that are numbers; JSON has no others."""
    return {name: value for name, value in metrics.items() if np.isfinite(value)}


def _numbers(values: Sequence[float]) -> list[float]:
    """Log-probs as JSON can carry them: an impossible token has the lowest number there is."""
    return [max(value, LOWEST) for value in values]


def failure_of(error: Exception) -> OperationError:
    """What a client is told about a failure in the engine."""
    if isinstance(error, OperationError):
        return error
    if isinstance(error, NonFiniteError):
        return OperationError(
            "NON_FINITE_LOSS",
            "a loss, gradient, weight or logit is NaN or infinite; nothing of this operation was "
            "applied. Look at its samples, or go on from a checkpoint with a lower learning rate",
        )
    causes = [error, error.__cause__]
    text = " ".join(str(one) for one in causes)
    if any(isinstance(one, MemoryError | torch.OutOfMemoryError) for one in causes) or (
        "can't allocate memory" in text
    ):
        return OperationError(
            "RESOURCE_EXHAUSTED",
            "out of memory; shorten the samples, or send them in several requests",
        )
    return OperationError("INTERNAL_ERROR", "the server failed at this; its log has the cause")
