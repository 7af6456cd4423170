"""The operations of a session as a client asks for them: JSON in, checked values out.

What can be known from the request alone is checked here, before an operation exists. What depends
on the session's state is found when the operation runs.
Legend: T tokens of a sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from tunebook.serve.errors import ApiError, invalid
from tunebook.serve.losses import Loss, read_loss, selection
from tunebook.serve.values import (
    INT64,
    check_keys,
    read_choice,
    read_flag,
    read_floats,
    read_int,
    read_integers,
    read_list,
    read_number,
    read_object,
    read_text,
    required,
)
from tunebook.types import (
    AdamParams,
    Datum,
    FloatArray,
    IntArray,
    MuonParams,
    OptimizerParams,
    SamplingParams,
)

SYNC_TYPES = {
    "WEIGHT_SYNC_TYPE_SYNCHRONOUS": "synchronous",
    "WEIGHT_SYNC_TYPE_BACKGROUND_PUBLISH": "background",
    "WEIGHT_SYNC_TYPE_PIPELINE": "pipeline",
}
INPUT_DTYPES = {
    "target_tokens": ("int64",),
    "logprobs": ("float32",),
    "advantages": ("float32",),
    "reference_logprobs": ("float32",),
    "weights": ("int64", "float32"),
    "mask": ("int64", "float32"),
}
MAX_TOP_LOGPROBS = 20
DEFAULT_MAX_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """What one operation may hold."""

    vocab_size: int
    max_seq_len: int | None
    """Tokens; None = not known."""
    max_samples: int = 4096
    """Of a forward-backward, and completions of a sample."""
    max_rank: int = 256


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """A pass over samples with one of the service's losses."""

    data: list[Datum]
    loss: Loss
    forward_only: bool
    return_outputs: bool


@dataclass(frozen=True, slots=True)
class CustomForwardBackward:
    """A backward pass from gradients of the log-probs, the column `gradients` of the data."""

    data: list[Datum]


@dataclass(frozen=True, slots=True)
class OptimStep:
    """An optimizer step."""

    params: OptimizerParams


@dataclass(frozen=True, slots=True)
class WeightsSync:
    """Makes the weights as they are now those that are sampled."""

    mode: str


@dataclass(frozen=True, slots=True)
class Sample:
    """Completions of prompts."""

    prompts: list[list[int]]
    params: SamplingParams
    num_samples: int
    prompt_logprobs: bool
    top_logprobs: int


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    """Saves the session."""

    for_training: bool


Request: TypeAlias = (
    ForwardBackward | CustomForwardBackward | OptimStep | WeightsSync | Sample | SaveCheckpoint
)


def read_request(kind: str, body: Mapping[str, Any], limits: Limits) -> Request:
    """The operation that a body asks for.

    Args:
        kind: last part of the path, a key of `READERS`.
        body: the request, an uploaded payload merged into it.
        limits: see `Limits`.

    Raises:
        ApiError: naming sample and field.
    """
    return READERS[kind](body, limits)


def _read_forward_backward(body: Mapping[str, Any], limits: Limits) -> ForwardBackward:
    known = ("loss", "samples", "forward_only", "return_loss_fn_outputs", "payload_id")
    check_keys(body, known, "")
    loss = read_loss(required(body, "loss"))
    forward_only = read_flag(body.get("forward_only") or False, "forward_only")
    return_outputs = read_flag(
        body.get("return_loss_fn_outputs") or False, "return_loss_fn_outputs"
    )
    data: list[Datum] = []
    for index, sample in enumerate(_read_samples(body, limits)):
        where = f"samples[{index}].loss_fn_inputs"
        datum = loss.datum(sample.tokens, sample.inputs, where)
        _check_chained(sample, np.asarray(datum.columns["token_weights"]), where)
        data.append(datum)
    return ForwardBackward(loss.aggregated(data), loss, forward_only, return_outputs)


def _read_custom(body: Mapping[str, Any], limits: Limits) -> CustomForwardBackward:
    check_keys(body, ("samples", "gradients", "payload_id"), "")
    samples = _read_samples(body, limits)
    gradients = read_list(required(body, "gradients"), "gradients")
    if len(gradients) != len(samples):
        raise invalid(
            "gradients", f"has {len(gradients)} entries for {len(samples)} samples; give one each"
        )
    data: list[Datum] = []
    for index, (sample, given) in enumerate(zip(samples, gradients, strict=True)):
        where, num_scored = f"gradients[{index}]", len(sample.tokens) - 1
        gradient = read_object(given, where)
        check_keys(gradient, ("data", "dtype"), where)
        if gradient.get("dtype") not in (None, "D_TYPE_FLOAT32", "D_TYPE_UNSPECIFIED"):
            raise invalid(f"{where}.dtype", "must be D_TYPE_FLOAT32")
        values = read_floats(required(gradient, "data", where), f"{where}.data")
        if len(values) != num_scored:
            raise invalid(
                f"{where}.data", f"has {len(values)} values for {num_scored} input tokens"
            )
        place = f"samples[{index}].loss_fn_inputs"
        values = np.where(selection(sample.inputs, place, num_scored) != 0, values, np.float32(0))
        marked = (values != 0).astype(np.float32)
        _check_chained(sample, marked, place)
        data.append(Datum(sample.tokens, {"token_weights": marked, "gradients": values}))
    return CustomForwardBackward(data)


def _read_optim_step(body: Mapping[str, Any], limits: Limits) -> OptimStep:
    del limits
    check_keys(body, ("adam_params", "muon_params"), "")
    if body.get("adam_params") is not None and body.get("muon_params") is not None:
        raise invalid("", "adam_params and muon_params exclude each other")
    if body.get("muon_params") is None:
        return OptimStep(_read_adam(body.get("adam_params") or {}, "adam_params"))
    where = "muon_params"
    muon = read_object(body["muon_params"], where)
    keys = ("learning_rate", "momentum", "newton_schulz_steps", "weight_decay", "grad_clip_norm")
    check_keys(muon, (*keys, "adam"), where)
    clip = _number(muon, "grad_clip_norm", where, default=1.0, low=0)
    return OptimStep(
        MuonParams(
            learning_rate=_learning_rate(muon, where),
            momentum=_number(muon, "momentum", where, default=0.95, low=0, below=1),
            newton_schulz_steps=read_int(
                _or_default(muon, "newton_schulz_steps", 5),
                f"{where}.newton_schulz_steps",
                low=1,
                high=99,
            ),
            weight_decay=_number(muon, "weight_decay", where, default=0.0, low=0),
            max_grad_norm=clip,
            adam=_read_adam(muon.get("adam") or {}, f"{where}.adam"),
        )
    )


def _read_adam(value: Any, where: str) -> AdamParams:
    adam = read_object(value, where)
    keys = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
    check_keys(adam, keys, where)
    return AdamParams(
        learning_rate=_learning_rate(adam, where),
        beta1=_number(adam, "beta1", where, default=0.9, low=0, below=1),
        beta2=_number(adam, "beta2", where, default=0.95, low=0, below=1),
        eps=_number(adam, "eps", where, default=1e-8, low=0),
        weight_decay=_number(adam, "weight_decay", where, default=0.0, low=0),
        max_grad_norm=_number(adam, "grad_clip_norm", where, default=1.0, low=0),
    )


def _read_weights_sync(body: Mapping[str, Any], limits: Limits) -> WeightsSync:
    del limits
    check_keys(body, ("weight_sync_type",), "")
    given = required(body, "weight_sync_type")
    return WeightsSync(read_choice(given, SYNC_TYPES, "weight_sync_type"))


def _read_sample(body: Mapping[str, Any], limits: Limits) -> Sample:
    known = (
        "model_inputs",
        "num_samples",
        "sampling_params",
        "prompt_logprobs",
        "topk_prompt_logprobs",
        "return_routed_experts",
        "payload_id",
    )
    check_keys(body, known, "")
    inputs = read_list(required(body, "model_inputs"), "model_inputs")
    num_samples = read_int(
        _or_default(body, "num_samples", 1), "num_samples", low=1, high=limits.max_samples
    )
    if not 1 <= len(inputs) * num_samples <= limits.max_samples:
        raise invalid(
            "model_inputs",
            f"{len(inputs)} prompts with {num_samples} samples each; one request takes from 1 to "
            f"{limits.max_samples} completions",
        )
    prompts: list[list[int]] = []
    for index, given in enumerate(inputs):
        where = f"model_inputs[{index}]"
        prompt = _read_tokens(given, where, limits)
        if limits.max_seq_len is not None and len(prompt) >= limits.max_seq_len:
            raise invalid(
                where,
                f"has {len(prompt)} tokens, which leaves no room for an answer in the "
                f"{limits.max_seq_len} of the model",
            )
        prompts.append(prompt.tolist())
    top_logprobs = read_int(
        _or_default(body, "topk_prompt_logprobs", 0),
        "topk_prompt_logprobs",
        low=0,
        high=min(MAX_TOP_LOGPROBS, limits.vocab_size),
    )
    read_flag(body.get("return_routed_experts") or False, "return_routed_experts")
    return Sample(
        prompts=prompts,
        params=_read_sampling(body.get("sampling_params") or {}, limits),
        num_samples=num_samples,
        prompt_logprobs=read_flag(body.get("prompt_logprobs") or False, "prompt_logprobs"),
        top_logprobs=top_logprobs,
    )


def _read_sampling(value: Any, limits: Limits) -> SamplingParams:
    where = "sampling_params"
    given = read_object(value, where)
    check_keys(given, ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop"), where)
    longest = limits.max_seq_len or 2**31 - 1
    max_tokens = read_int(
        _or_default(given, "max_tokens", min(DEFAULT_MAX_TOKENS, longest)),
        f"{where}.max_tokens",
        low=1,
        high=2**31 - 1,
    )
    temperature = _number(given, "temperature", where, default=1.0, low=0, high=100)
    if 0 < temperature < 1e-6:
        raise invalid(f"{where}.temperature", "must be 0 (greedy) or at least 1e-06")
    top_p = _number(given, "top_p", where, default=1.0, low=0, high=1)
    if top_p == 0:
        raise invalid(f"{where}.top_p", "must be above 0")
    # The service's own clients send -1 for "off".
    top_k = read_int(_or_default(given, "top_k", -1), f"{where}.top_k", low=-1, high=2**31 - 1)
    stops = read_list(given.get("stop") or [], f"{where}.stop")
    if len(stops) > 64:
        raise invalid(f"{where}.stop", f"has {len(stops)} strings, at most 64 are allowed")
    stop = tuple(read_text(one, f"{where}.stop[{i}]") for i, one in enumerate(stops))
    if "" in stop:
        raise invalid(f"{where}.stop[{stop.index('')}]", "is empty")
    seed = given.get("seed")
    if seed is not None:
        # A seed is a bit pattern: a negative one is as good as any other.
        seed = read_int(seed, f"{where}.seed", low=-INT64, high=INT64 - 1) % 2**64
    return SamplingParams(
        max_tokens=min(max_tokens, longest),
        temperature=temperature,
        top_p=top_p,
        top_k=max(top_k, 0),
        stop=stop,
        seed=seed,
    )


def _read_checkpoint(*, for_training: bool) -> Callable[[Mapping[str, Any], Limits], Request]:
    def read(body: Mapping[str, Any], limits: Limits) -> SaveCheckpoint:
        del limits
        check_keys(body, (), "")
        return SaveCheckpoint(for_training)

    return read


READERS: Mapping[str, Callable[[Mapping[str, Any], Limits], Request]] = {
    "forward-backward": _read_forward_backward,
    "custom-forward-backward": _read_custom,
    "optim-step": _read_optim_step,
    "weights-sync": _read_weights_sync,
    "sample": _read_sample,
    "training-checkpoint": _read_checkpoint(for_training=True),
    "inference-checkpoint": _read_checkpoint(for_training=False),
}
WITH_PAYLOAD = ("forward-backward", "custom-forward-backward", "sample")
"""Kinds of which the body may be uploaded."""


@dataclass(frozen=True, slots=True)
class _Sample:
    tokens: IntArray
    """`[T + 1]`: the input, and the last target."""
    targets: IntArray
    """`[T]`"""
    inputs: Mapping[str, FloatArray]
    """Of the loss, `[T]` each."""


def _read_samples(body: Mapping[str, Any], limits: Limits) -> list[_Sample]:
    samples = read_list(required(body, "samples"), "samples")
    if not 1 <= len(samples) <= limits.max_samples:
        raise invalid(
            "samples", f"has {len(samples)} entries, must have from 1 to {limits.max_samples}"
        )
    return [_read_sample_of(one, f"samples[{i}]", limits) for i, one in enumerate(samples)]


def _read_sample_of(value: Any, where: str, limits: Limits) -> _Sample:
    sample = read_object(value, where)
    check_keys(sample, ("model_input", "loss_fn_inputs", "routed_experts_key"), where)
    if sample.get("routed_experts_key"):
        raise invalid(f"{where}.routed_experts_key", "this model has no experts to route to")
    tokens = _read_tokens(required(sample, "model_input", where), f"{where}.model_input", limits)
    if limits.max_seq_len is not None and len(tokens) > limits.max_seq_len:
        raise invalid(
            f"{where}.model_input",
            f"has {len(tokens)} tokens, the model takes at most {limits.max_seq_len}",
        )
    place = f"{where}.loss_fn_inputs"
    inputs: dict[str, FloatArray] = {}
    targets = None
    for name, given in read_object(required(sample, "loss_fn_inputs", where), place).items():
        values = _read_tensor(name, given, f"{place}[{name[:40]!r}]", len(tokens))
        if name == "target_tokens":
            targets = values
        else:
            inputs[name] = values.astype(np.float32)
    if targets is None:
        raise invalid(f"{place}.target_tokens", "is missing")
    _check_range(targets, f"{place}.target_tokens", limits)
    sequence = np.append(tokens, targets[-1]).astype(np.int32)
    return _Sample(sequence, targets.astype(np.int32), inputs)


def _check_chained(sample: _Sample, marks: FloatArray, where: str) -> None:
    """Returns if every target that counts is the token that follows in the input."""
    apart = (sample.targets != sample.tokens[1:]) & (marks != 0)
    if apart.any():
        index = int(np.argmax(apart))
        raise invalid(
            f"{where}.target_tokens[{index}]",
            f"is {sample.targets[index]}, but the input goes on with {sample.tokens[index + 1]}; "
            "this server scores the tokens of one sequence: input = sequence[:-1], "
            "target_tokens = sequence[1:]",
        )


def _read_tensor(name: str, value: Any, where: str, num_scored: int) -> Any:
    tensor = read_object(value, where)
    check_keys(
        tensor, ("data", "dtype", "shape", "sparse_crow_indices", "sparse_col_indices"), where
    )
    for key in ("sparse_crow_indices", "sparse_col_indices"):
        if tensor.get(key):
            raise invalid(f"{where}.{key}", "sparse tensors are not supported")
    dtypes = INPUT_DTYPES.get(name, ("int64", "float32"))
    dtype = read_choice(tensor.get("dtype"), {one: one for one in dtypes}, f"{where}.dtype")
    read = read_integers if dtype == "int64" else read_floats
    values = read(required(tensor, "data", where), f"{where}.data")
    shape = tensor.get("shape")
    if shape is not None and list(read_list(shape, f"{where}.shape")) != [len(values)]:
        raise invalid(f"{where}.shape", f"must be [{len(values)}], the length of data")
    if len(values) != num_scored:
        raise invalid(
            where, f"has {len(values)} values for {num_scored} input tokens; give one for each"
        )
    return values


def _read_tokens(value: Any, where: str, limits: Limits) -> Any:
    model_input = read_object(value, where)
    check_keys(model_input, ("chunks",), where)
    parts: list[Any] = []
    for index, given in enumerate(
        read_list(required(model_input, "chunks", where), f"{where}.chunks")
    ):
        place = f"{where}.chunks[{index}]"
        chunk = read_object(given, place)
        check_keys(chunk, ("encoded_text",), place)
        text = read_object(required(chunk, "encoded_text", place), f"{place}.encoded_text")
        check_keys(text, ("tokens",), f"{place}.encoded_text")
        place = f"{place}.encoded_text.tokens"
        tokens = read_integers(required(text, "tokens", place.removesuffix(".tokens")), place)
        if not len(tokens):
            raise invalid(place, "is empty")
        _check_range(tokens, place, limits)
        parts.append(tokens)
    if not parts:
        raise invalid(f"{where}.chunks", "is empty")
    return np.concatenate(parts)


def _check_range(tokens: Any, where: str, limits: Limits) -> None:
    bad = (tokens < 0) | (tokens >= limits.vocab_size)
    if bad.any():
        index = int(np.argmax(bad))
        raise invalid(
            f"{where}[{index}]",
            f"is {tokens[index]}, the token ids of this model are 0 to {limits.vocab_size - 1}",
        )


def _learning_rate(given: Mapping[str, Any], where: str) -> float:
    return _number(given, "learning_rate", where, default=1e-4, low=0)


def _number(
    given: Mapping[str, Any],
    name: str,
    where: str,
    *,
    default: float,
    low: float = -math.inf,
    high: float = math.inf,
    below: float = math.inf,
) -> float:
    value = read_number(_or_default(given, name, default), f"{where}.{name}", low=low, high=high)
    if value >= below:
        raise invalid(f"{where}.{name}", f"is {value:g}, must be below {below:g}")
    return value


def _or_default(given: Mapping[str, Any], name: str, default: Any) -> Any:
    value = given.get(name)
    return default if value is None else value


def merged(inline: Mapping[str, Any], payload: Any) -> Mapping[str, Any]:
    """A body with what was uploaded in place of its shortened copy.

    Raises:
        ApiError: the payload is no object, or of another number of samples.
    """
    uploaded = read_object(payload, "payload")
    for name in ("samples", "gradients", "model_inputs"):
        short, whole = inline.get(name), uploaded.get(name)
        if isinstance(short, Sequence) and isinstance(whole, Sequence) and len(short) != len(whole):
            raise ApiError(400, f"{name}: {len(short)} inline, {len(whole)} in the payload")
    return {**inline, **uploaded}
