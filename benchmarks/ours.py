"""The contestants `ours` and `plain`: the local backend with and without its fast path.

Legend: B rows, T tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.spec import ADAM, BETA, GROUP_SIZE, LORA, NEW_TOKENS, Spec, read_workload
from benchmarks.turns import Turns
from benchmarks.workload import PAIRS, group_advantages, reward_of
from loss_fns.cross_entropy import cross_entropy
from tunebook.backends.base import LossFn
from tunebook.backends.local import LocalBackend
from tunebook.backends.local.session import LocalSession
from tunebook.token_weights import token_mean, token_sum
from tunebook.types import AdamParams, CheckpointRef, Datum, SamplingParams

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
SAMPLING = SamplingParams(
    max_tokens=NEW_TOKENS, temperature=1.0, top_p=1.0, top_k=0, stop=(), seed=0
)


def compete(spec: Spec, turns: Turns) -> None:
    """Trains as the spec says, one step a turn."""
    workload = read_workload(spec)
    with open_backend(spec) as backend:
        if spec.case == "dpo":
            compete_dpo(spec, turns, backend, workload)
        elif spec.case == "grpo":
            compete_grpo(spec, turns, backend, workload)
        else:
            compete_sft(spec, turns, backend, workload)


def open_backend(spec: Spec) -> LocalBackend:
    """The backend of a contestant."""
    options: dict[str, Any] = {}
    if spec.contestant == "plain" and "fast" in inspect.signature(LocalBackend).parameters:
        options["fast"] = False
    return LocalBackend(model=spec.model, device=spec.device, dtype=DTYPES[spec.dtype], **options)


def compete_sft(spec: Spec, turns: Turns, backend: LocalBackend, workload: dict[str, Any]) -> None:
    """SFT of one adapter, or of several at once: all are queued before anybody waits."""
    sessions = [
        open_session(spec, backend, name=f"adapter_{index}")
        for index in range(len(spec.learning_rates))
    ]
    for number, rows in enumerate(workload["steps"]):
        if not turns.wait():
            return
        data = sft_data(rows)
        seconds, losses = train_step(spec, turns, sessions, data, cross_entropy, number=number)
        turns.report(seconds=seconds, loss=losses)


def sft_data(rows: Sequence[dict[str, Any]]) -> list[Datum]:
    """The data of one step: the loss is the mean over its supervised tokens."""
    weights = token_mean([np.asarray(row["mask"], np.float32) for row in rows])
    return [
        Datum(np.asarray(row["tokens"], np.int32), {"token_weights": token_weights})
        for row, token_weights in zip(rows, weights, strict=True)
    ]


def compete_dpo(spec: Spec, turns: Turns, backend: LocalBackend, workload: dict[str, Any]) -> None:
    """DPO; the reference is the base without adapter, computed once for all pairs beforehand."""
    session = open_session(spec, backend, name="policy")
    steps = [pair_data(pairs) for pairs in workload["steps"]]
    if not turns.wait():
        return
    reference = backend.open_session("reference", LORA, directory=Path(spec.folder) / "reference")
    references = [reference_logprobs(reference, data) for data in steps]
    reference.close()
    seconds = turns.seconds()
    turns.facts(reference_seconds=seconds, reference_pairs=sum(map(len, steps)) // 2)
    loss_fn = partial(dpo, beta=BETA, num_pairs=PAIRS)
    for number, (data, logprobs) in enumerate(zip(steps, references, strict=True)):
        if not turns.wait():
            return
        rows = [
            Datum(datum.tokens, {**datum.columns, "reference_logprob": logprob})
            for datum, logprob in zip(data, logprobs, strict=True)
        ]
        seconds, losses = train_step(
            spec, turns, [session], rows, loss_fn, number=number, rows_per_unit=2
        )
        turns.report(seconds=seconds, loss=losses)


def pair_data(pairs: Sequence[dict[str, Any]]) -> list[Datum]:
    """Chosen and rejected in turn, `token_weights` 1 on the answers."""
    tokens, masks = [], []
    for pair in pairs:
        for side in ("chosen", "rejected"):
            tokens.append(np.asarray(pair["prompt"] + pair[side], np.int32))
            mask = [0.0] * (len(pair["prompt"]) - 1) + [1.0] * len(pair[side])
            masks.append(np.asarray(mask, np.float32))
    return [
        Datum(row, {"token_weights": weights})
        for row, weights in zip(tokens, token_sum(masks), strict=True)
    ]


def reference_logprobs(session: LocalSession, data: Sequence[Datum]) -> list[float]:
    """The log-prob of every answer."""
    return [float(row.nansum()) for row in session.forward(data).result()]


def dpo(
    logprobs: Tensor,
    *,
    token_weights: Tensor,
    reference_logprob: Tensor,
    beta: float,
    num_pairs: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The sigmoid loss of DPO, a mean over the pairs of the step. Source: arXiv:2305.18290, eq. 7.

    Args:
        logprobs: `[B, T]`, rows chosen and rejected in turn.
        token_weights: `[B, T]`, 1 on the answer.
        reference_logprob: `[B]`, nats.
        beta: strength of the reference.
        num_pairs: pairs of the step.
    """
    scored_BT = torch.where(token_weights != 0, logprobs, torch.zeros_like(logprobs))
    logratio_B = (token_weights * scored_BT).sum(1) - reference_logprob
    margin_P = beta * (logratio_B[0::2] - logratio_B[1::2])
    return -F.logsigmoid(margin_P).sum() / num_pairs, {"margin": margin_P.detach().sum()}


def compete_grpo(spec: Spec, turns: Turns, backend: LocalBackend, workload: dict[str, Any]) -> None:
    """GRPO: sampling and training timed apart. The warm-up step trains on given completions."""
    session = open_session(spec, backend, name="policy")
    for number, prompts in enumerate(workload["steps"]):
        if not turns.wait():
            return
        prompt_tokens = [prompt["tokens"] for prompt in prompts]
        generator = session.publish_weights().result()
        sampled = generator.sample(prompt_tokens, SAMPLING, GROUP_SIZE).result()
        completions = [each.tokens.tolist() for group in sampled for each in group]
        rollout_seconds = turns.seconds()
        num_sampled = sum(map(len, completions))
        if number == 0:
            completions = workload["completions"]
        data = group_data(prompt_tokens, completions)
        seconds, losses = train_step(spec, turns, [session], data, policy_gradient, number=number)
        turns.report(
            seconds=seconds,
            loss=losses,
            rollout_seconds=rollout_seconds,
            sampled_tokens=num_sampled,
        )


def group_data(prompts: Sequence[list[int]], completions: Sequence[list[int]]) -> list[Datum]:
    """Rows of the groups in order, with the advantage of each; the loss is a mean over tokens."""
    rows = [
        (prompt, completion)
        for prompt, group in zip(prompts, in_groups(completions), strict=True)
        for completion in group
    ]
    advantages = [
        advantage
        for group in in_groups(completions)
        for advantage in group_advantages([reward_of(completion) for completion in group])
    ]
    masks = [
        np.asarray([0.0] * (len(prompt) - 1) + [1.0] * len(completion), np.float32)
        for prompt, completion in rows
    ]
    return [
        Datum(
            np.asarray(prompt + completion, np.int32),
            {"token_weights": weights, "advantage": advantage},
        )
        for (prompt, completion), weights, advantage in zip(
            rows, token_mean(masks), advantages, strict=True
        )
    ]


def in_groups(completions: Sequence[list[int]]) -> list[Sequence[list[int]]]:
    """Completions by prompt."""
    return [
        completions[first : first + GROUP_SIZE] for first in range(0, len(completions), GROUP_SIZE)
    ]


def policy_gradient(
    logprobs: Tensor, *, token_weights: Tensor, advantage: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """GRPO's loss at the policy that sampled: the ratio is 1, its gradient is that of the log-prob.

    Source: arXiv:2402.03300, equation 21.

    Args:
        logprobs: `[B, T]`
        token_weights: `[B, T]`, mask over the number of completion tokens.
        advantage: `[B]`
    """
    scored_BT = torch.where(token_weights != 0, logprobs, torch.zeros_like(logprobs))
    ratio_BT = (scored_BT - scored_BT.detach()).exp()
    return -(token_weights * ratio_BT * advantage[:, None]).sum(), {}


def open_session(spec: Spec, backend: LocalBackend, *, name: str) -> LocalSession:
    """A session that starts from the common adapter."""
    start = CheckpointRef(name="start", location=spec.adapter, has_optimizer=False)
    return backend.open_session(
        name, LORA, directory=Path(spec.folder) / name, restore=start, with_optimizer=False
    )


def train_step(
    spec: Spec,
    turns: Turns,
    sessions: Sequence[LocalSession],
    data: Sequence[Datum],
    loss_fn: LossFn | Callable[..., Any],
    *,
    number: int,
    rows_per_unit: int = 1,
) -> tuple[float, list[float]]:
    """One optimizer step of every session on the same data; returns seconds and losses.

    Step 0 is the warm-up: the gradient of the first session is written down before it is applied.
    """
    losses = [
        session.forward_backward(data, loss_fn, rows_per_unit=rows_per_unit) for session in sessions
    ]
    if number == 0:
        losses[-1].result()
        write_gradients(spec, sessions[0])
    updates = [
        session.optim_step(AdamParams(learning_rate=learning_rate, **ADAM))
        for session, learning_rate in zip(sessions, spec.learning_rates, strict=True)
    ]
    for update in updates:
        update.result()
    return turns.seconds(), [loss.result()["loss"] for loss in losses]


def write_gradients(spec: Spec, session: LocalSession) -> None:
    """Writes the gradient of every adapter weight under its name."""
    gradients = {}
    for name, parameter in session._weights.parameters.items():
        assert parameter.grad is not None
        gradients[name] = parameter.grad.float().cpu().numpy()
    np.savez(spec.gradients, **gradients)
