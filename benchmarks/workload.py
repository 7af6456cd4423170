"""The tokens of every step, rendered once and given to all contestants.

Rows come from a file, or from a seeded generator with the lengths of real data.
Legend: T scored tokens of a row.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.spec import GROUP_SIZE, NEW_TOKENS
from tunebook.compose import compose
from tunebook.config import Mask, OnBadRow, OnBlankAnswer, OnLongRow
from tunebook.data.load import load_rows
from tunebook.data.rows import Kind, Row
from tunebook.models import load_tokenizer
from tunebook.render import render_preference, render_prompt, render_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SFT_ROWS, PAIRS, PROMPTS = 8, 4, 4
"""Of one optimizer step."""
PAIR_TOKENS = 512
"""Tokens of one side of a pair, prompt included."""
PAIR_PROMPT_TOKENS = 384
"""Pairs with longer prompts are left out: their answers would be cut to nothing."""

# Quantiles 0, 0.1, ..., 1 of lengths in tokens of SmolLM2's tokenizer. Questions and answers are
# those of GSM8K (600 rows of the training split); pairs are those of a small set of preferences.
QUESTION = (25, 37, 43, 48, 54, 59, 63, 69, 77, 89, 177)
ANSWER = (28, 47, 56, 66, 76, 86, 98, 112, 127, 152, 342)
PAIR_PROMPT = (13, 25, 45, 60, 85, 110, 140, 170, 220, 290, 370)
PAIR_ANSWER = (3, 60, 120, 180, 230, 290, 340, 400, 440, 480, 500)

# Common words, each one token of most tokenizers.
WORDS = """
the of and to in is for on that with as are this was by from at be have or an not one all they we
can more their which were there when what will out up about some time then them these so her would
make like him into has two see way could people than first been call who now find long down day did
get come made may part number water know year work back give most very after our just name good man
think say great where help much too mean before right any same tell follow want show also around
form three small set put end does another well large must
""".split()  # noqa: SIM905


def sft_workload(
    tokenizer: PreTrainedTokenizerBase,
    *,
    path: Path | None,
    steps: int,
    cache_dir: Path,
    length_scale: float,
    seed: int,
) -> dict[str, Any]:
    """Rows of every step: `tokens` `[T + 1]` and `mask` `[T]`, 1 on the answer.

    Args:
        tokenizer: with the chat template.
        path: file of `messages` rows; None = generated.
        steps: optimizer steps, of `SFT_ROWS` rows each.
        cache_dir: for the renderer.
        length_scale: factor on generated lengths.
        seed: of the generator, and of the order of the rows.
    """
    rows = conversation_rows(
        path, count=steps * SFT_ROWS, folder=cache_dir, length_scale=length_scale, seed=seed
    )
    rendered = render_rows(
        rows,
        tokenizer,
        mask=Mask.all_assistant,
        max_seq_len=1024,
        on_long_row=OnLongRow.truncate,
        on_blank_answer=OnBlankAnswer.error,
        on_bad_row=OnBadRow.fail,
        cache_dir=cache_dir,
    )
    data = [
        {"tokens": each.tokens.tolist(), "mask": [int(value > 0) for value in each.mask]}
        for each in rendered
    ]
    return {"steps": batches(data, SFT_ROWS, steps=steps)}


def short_sft_workload(
    tokenizer: PreTrainedTokenizerBase, *, steps: int, cache_dir: Path, seed: int
) -> dict[str, Any]:
    """Generated rows of a few tokens, for many steps in little time."""
    return sft_workload(
        tokenizer, path=None, steps=steps, cache_dir=cache_dir, length_scale=0.1, seed=seed
    )


def dpo_workload(
    tokenizer: PreTrainedTokenizerBase,
    *,
    path: Path | None,
    steps: int,
    cache_dir: Path,
    length_scale: float,
    seed: int,
) -> dict[str, Any]:
    """Pairs of every step: token ids of `prompt`, `chosen` and `rejected`.

    Answers end with their last trained token, and are cut where a side exceeds `PAIR_TOKENS`, as
    TRL does.

    Args:
        tokenizer: with the chat template.
        path: file of `prompt`, `chosen`, `rejected` rows; None = generated.
        steps: optimizer steps, of `PAIRS` pairs each.
        cache_dir: for generated rows.
        length_scale: factor on generated lengths.
        seed: of the generator, and of the order of the rows.
    """
    if path is None:
        path = write_rows(
            cache_dir / "preferences.jsonl",
            preference_texts(steps * PAIRS, length_scale=length_scale, seed=seed),
        )
    pairs = []
    for row in file_rows(path, Kind.preference, seed=seed):
        pair = render_preference(row, tokenizer)
        room = PAIR_TOKENS - len(pair.prompt)
        chosen = trained_part(pair.chosen, pair.chosen_mask)[:room]
        rejected = trained_part(pair.rejected, pair.rejected_mask)[:room]
        if len(pair.prompt) <= PAIR_PROMPT_TOKENS and chosen and rejected:
            pairs.append({"prompt": pair.prompt, "chosen": chosen, "rejected": rejected})
    return {"steps": batches(pairs, PAIRS, steps=steps)}


def grpo_workload(
    tokenizer: PreTrainedTokenizerBase,
    *,
    path: Path | None,
    steps: int,
    cache_dir: Path,
    length_scale: float,
    seed: int,
) -> dict[str, Any]:
    """Prompts of every step, and the completions that everybody trains on in the warm-up step.

    A prompt has its `messages` and its `tokens`. `completions` are token ids
    `[PROMPTS * GROUP_SIZE][NEW_TOKENS]`: pieces of the prompts' own text, without end tokens.

    Args:
        tokenizer: with the chat template.
        path: file of `prompt` rows; None = generated.
        steps: optimizer steps, of `PROMPTS` prompts each.
        cache_dir: for generated rows.
        length_scale: factor on generated lengths.
        seed: of the generator, and of the order of the rows.
    """
    if path is None:
        rng = random.Random(seed)
        path = write_rows(
            cache_dir / "prompts.jsonl",
            [
                {"prompt": [message("user", words(rng, QUESTION, length_scale))]}
                for _ in range(steps * PROMPTS)
            ],
        )
    rows = file_rows(path, Kind.prompt, seed=seed)
    prompts = [
        {"messages": row.messages, "tokens": render_prompt(row.messages, tokenizer)} for row in rows
    ]
    text = " ".join(row.messages[-1]["content"] for row in rows)
    pool: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    pool = pool * (1 + 2 * NEW_TOKENS // len(pool))
    rng = random.Random(seed)
    starts = [rng.randrange(len(pool) - NEW_TOKENS) for _ in range(PROMPTS * GROUP_SIZE)]
    completions = [pool[start : start + NEW_TOKENS] for start in starts]
    return {"steps": batches(prompts, PROMPTS, steps=steps), "completions": completions}


def reward_of(tokens: Sequence[int]) -> float:
    """A reward that anybody can compute: the share of different tokens."""
    return len(set(tokens)) / len(tokens)


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Rewards of one group, centred and divided by their standard deviation, as TRL does it."""
    values = np.asarray(rewards, np.float64)
    return list((values - values.mean()) / (values.std(ddof=1) + 1e-4))


def conversation_rows(
    path: Path | None, *, count: int, folder: Path, length_scale: float, seed: int
) -> list[Row]:
    """`messages` rows of a file in random order, or generated ones.

    Args:
        path: the file; None = generate.
        count: rows to generate.
        folder: where generated rows are written.
        length_scale: factor on generated lengths.
        seed: of the order and the generator.
    """
    if path is None:
        path = write_rows(
            folder / "messages.jsonl", chat_texts(count, length_scale=length_scale, seed=seed)
        )
    return file_rows(path, Kind.conversation, seed=seed)


def chat_texts(count: int, *, length_scale: float, seed: int) -> list[dict[str, Any]]:
    """Questions with answers, as long as those of GSM8K."""
    rng = random.Random(seed)
    return [
        {
            "messages": [
                message("user", words(rng, QUESTION, length_scale)),
                message("assistant", words(rng, ANSWER, length_scale)),
            ]
        }
        for _ in range(count)
    ]


def preference_texts(count: int, *, length_scale: float, seed: int) -> list[dict[str, Any]]:
    """Prompts with two answers each."""
    rng = random.Random(seed)
    return [
        {
            "prompt": [message("user", words(rng, PAIR_PROMPT, length_scale))],
            "chosen": [message("assistant", words(rng, PAIR_ANSWER, length_scale))],
            "rejected": [message("assistant", words(rng, PAIR_ANSWER, length_scale))],
        }
        for _ in range(count)
    ]


def message(role: str, content: str) -> dict[str, str]:
    """One message of a conversation."""
    return {"role": role, "content": content}


def words(rng: random.Random, quantiles: Sequence[int], length_scale: float) -> str:
    """Random words, as many as a draw from the distribution with these quantiles."""
    position = rng.random() * (len(quantiles) - 1)
    low = int(position)
    between = quantiles[low] + (position - low) * (quantiles[low + 1] - quantiles[low])
    return " ".join(rng.choices(WORDS, k=max(1, round(length_scale * between))))


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Writes rows as JSONL; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def file_rows(path: Path, kind: Kind, *, seed: int) -> list[Row]:
    """The rows of a file in random order."""
    config = compose("sft", {"data.path": str(path.resolve())})
    rows = load_rows(config.data, kind=kind).rows
    random.Random(seed).shuffle(rows)
    return rows


def trained_part(tokens: list[int], mask: list[float]) -> list[int]:
    """An answer up to its last trained token.

    Raises:
        ValueError: a token before that is not trained, which TRL's collator cannot express.
    """
    end = max((index + 1 for index, value in enumerate(mask) if value > 0), default=0)
    if any(value != 1 for value in mask[:end]):
        raise ValueError("an answer of several turns: every token of an answer must be trained")
    return tokens[:end]


def batches(data: list[Any], size: int, *, steps: int) -> list[list[Any]]:
    """The first `steps` batches; rows are repeated when there are too few.

    Raises:
        ValueError: there are none.
    """
    if not data:
        raise ValueError("no usable rows")
    endless = (data[index % len(data)] for index in range(steps * size))
    return [list(islice(endless, size)) for _ in range(steps)]


def tokenizer_of(model: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model."""
    return load_tokenizer(model)
