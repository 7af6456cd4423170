"""Sampling in several processes: each draws for its own prompts, all step token by token together.

Legend: B rows, T tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tunebook.backends.local.completions import Ending, Row, Sampled, draw_tokens, draws_of
from tunebook.backends.local.distributed.sharding import ShardedModel
from tunebook.backends.local.distributed.team import Team
from tunebook.backends.local.execution import micro_batches
from tunebook.backends.local.generator import next_inputs, next_logits, padded_prompts
from tunebook.types import SamplingParams


@dataclass(frozen=True, slots=True)
class RowToSample:
    """One completion to draw."""

    prompt: list[int]
    max_tokens: int
    index: tuple[int, int]
    """Prompt and sample number."""


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
) -> list[tuple[int, Sampled]]:
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
    found: list[tuple[int, Sampled]] = []
    for number in range(max(map(len, plans))):
        numbers = own_plan[number] if number < len(own_plan) else []
        rows = [task.rows[row] for row in numbers]
        sampled = complete_together(model, rows or [EMPTY_ROW], task, team=team)
        found += zip(numbers, sampled, strict=False)  # without the empty row
    return found


def complete_together(
    model: ShardedModel, rows: Sequence[RowToSample], task: SamplingTask, *, team: Team
) -> list[Sampled]:
    """Draws tokens until the rows of all processes are finished.

    The random numbers of a row come from `(seed, prompt, sample)` alone, as in one process.
    """
    base, params = model.base, task.params
    policy = (params.temperature, params.top_k, params.top_p)
    ending = Ending(task.stop_ids, task.strings, task.tokenizer)
    drawn = [
        Row(
            prompt=tuple(row.prompt),
            max_tokens=row.max_tokens,
            policy=policy,
            ending=ending,
            draws=draws_of(task.seed, row.index, row.max_tokens),
        )
        for row in rows
    ]
    input_ids_BT, mask_BT = padded_prompts([row.prompt for row in drawn], base.device)
    cache: Any = None
    while True:
        inputs = (input_ids_BT, mask_BT, cache)
        logits_BV, cache = model.run(lambda inputs=inputs: next_logits(base, *inputs))
        unfinished = [number for number, row in enumerate(drawn) if not row.finished]
        if unfinished:
            draw_tokens([drawn[number] for number in unfinished], logits_BV[unfinished])
        if all(team.exchange(all(row.finished for row in drawn), None)):
            # What was drawn, without what it was drawn with.
            return [Sampled(row.tokens, row.logprobs, row.stopped, row.broken) for row in drawn]
        input_ids_BT, mask_BT = next_inputs(drawn, mask_BT)
