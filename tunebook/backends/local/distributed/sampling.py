"""Sampling in several processes: each draws for its own prompts, all step token by token together.

Legend: B rows, T tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from tunebook.backends.local.completions import LARGEST_DRAW, draw, ends
from tunebook.backends.local.distributed.sharding import ShardedModel
from tunebook.backends.local.distributed.team import Team
from tunebook.backends.local.execution import micro_batches
from tunebook.backends.local.generator import next_logits
from tunebook.types import SamplingParams


@dataclass(frozen=True, slots=True)
class RowToSample:
    """One completion to draw."""

    prompt: list[int]
    max_tokens: int
    index: tuple[int, int]
    """Prompt and sample number."""


@dataclass(frozen=True, slots=True)
class SampledRow:
    """What was drawn for one row."""

    tokens: list[int]
    logprobs: list[float]
    stopped: bool


@dataclass(frozen=True, slots=True)
class SamplingTask:
    """All that the processes need to draw their rows."""

    rows: list[RowToSample]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    strings: tuple[str, ...]
    tokenizer: PreTrainedTokenizerBase | None
    """For stop strings; None where there are none."""
    batch_tokens: int


EMPTY_ROW = RowToSample(prompt=[0], max_tokens=0, index=(0, 0))
"""Where a process has no rows left; nothing is drawn for it."""


@torch.no_grad()
def sample_rows(
    model: ShardedModel, task: SamplingTask, slices: Sequence[Sequence[int]], *, team: Team
) -> list[tuple[int, SampledRow]]:
    """The rows of this process with their numbers.

    Args:
        model: computes with the weights to sample from.
        task: all rows.
        slices: the rows of each process.
        team: decides together when a batch is finished.
    """
    plans = [
        [
            [own[index] for index in batch.rows]
            for batch in micro_batches(
                [len(task.rows[row].prompt) + task.rows[row].max_tokens for row in own],
                rows_per_unit=1,
                max_tokens=task.batch_tokens,
            )
        ]
        for own in slices
    ]
    own_plan = plans[team.rank]
    found: list[tuple[int, SampledRow]] = []
    for number in range(max(map(len, plans))):
        numbers = own_plan[number] if number < len(own_plan) else []
        rows = [task.rows[row] for row in numbers]
        sampled = complete_together(model, rows or [EMPTY_ROW], task, team=team)
        found += zip(numbers, sampled, strict=False)  # without the empty row
    return found


def complete_together(
    model: ShardedModel, rows: Sequence[RowToSample], task: SamplingTask, *, team: Team
) -> list[SampledRow]:
    """Draws tokens until the rows of all processes are finished.

    The random numbers of a row come from `(seed, prompt, sample)` alone, as in one process.
    """
    base, params = model.base, task.params
    sampled = [SampledRow([], [], False) for _ in rows]
    draws_BT = np.stack(
        [np.random.default_rng([task.seed, *row.index]).random(params.max_tokens) for row in rows]
    )
    draws = torch.from_numpy(np.minimum(draws_BT, LARGEST_DRAW).astype(np.float32)).to(base.device)
    longest = max(len(row.prompt) for row in rows)
    input_ids_BT = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask_BT = torch.zeros(len(rows), longest, dtype=torch.int64)
    for number, row in enumerate(rows):
        input_ids_BT[number, longest - len(row.prompt) :] = torch.tensor(row.prompt)
        mask_BT[number, longest - len(row.prompt) :] = 1
    input_ids_BT, mask_BT = input_ids_BT.to(base.device), mask_BT.to(base.device)
    positions_BT = (mask_BT.cumsum(1) - 1).clamp_min(0)
    cache: Any = None
    for step in range(params.max_tokens):
        inputs = (input_ids_BT, mask_BT, positions_BT, cache)
        logits_BV, cache = model.run(lambda inputs=inputs: next_logits(base, *inputs))
        tokens_B, logprobs_B = draw(
            logits_BV,
            draws[:, step],
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
        )
        drawn = zip(rows, tokens_B.tolist(), logprobs_B.tolist(), strict=True)
        for number, (row, token, logprob) in enumerate(drawn):
            if not finished(row, sampled[number]):
                sampled[number] = with_token(sampled[number], token, logprob, task)
        here = all(finished(row, one) for row, one in zip(rows, sampled, strict=True))
        if all(team.exchange(here, None)):
            break
        input_ids_BT = tokens_B[:, None]
        mask_BT = torch.cat([mask_BT, torch.ones_like(mask_BT[:, :1])], dim=1)
        positions_BT = positions_BT[:, -1:] + 1
    return sampled


def finished(row: RowToSample, sampled: SampledRow) -> bool:
    """Whether nothing more is drawn for a row."""
    return sampled.stopped or len(sampled.tokens) >= row.max_tokens


def with_token(sampled: SampledRow, token: int, logprob: float, task: SamplingTask) -> SampledRow:
    """A row with one more token."""
    tokens = [*sampled.tokens, token]
    if task.tokenizer is None:
        stopped = token in task.stop_ids
    else:
        stopped = ends(tokens, set(task.stop_ids), task.strings, task.tokenizer)
    return SampledRow(tokens, [*sampled.logprobs, logprob], stopped)
