"""Measures how often a model answers the built-in test problems right, sampled and greedily.

    python scripts/evaluate_tiny.py --model tunebook/assets/tiny_model \
        --data tunebook/assets/tiny_data

Sampling is at temperature 1, without cuts of the distribution. About ten seconds on two cores.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

MAX_NEW_TOKENS = 24


def last_number(text: str) -> str | None:
    """The last whole number of the text, or None."""
    numbers = re.findall(r"\d+", text)
    return str(int(numbers[-1])) if numbers else None


@torch.inference_mode()
def complete(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[dict[str, Any]],
    *,
    num_samples: int,
) -> list[list[str]]:
    """Completions of each row's prompt: `num_samples` at temperature 1; 0 gives the greedy one."""
    texts = [
        tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        for row in rows
    ]
    tokenizer.padding_side = "left"
    batch = tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt")
    how = {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "num_return_sequences": num_samples,
    }
    outputs = model.generate(
        **batch, max_new_tokens=MAX_NEW_TOKENS, **(how if num_samples else {"do_sample": False})
    )
    completions = tokenizer.batch_decode(
        outputs[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
    )
    each = max(num_samples, 1)
    return [completions[start : start + each] for start in range(0, len(completions), each)]


def share_right(rows: list[dict[str, Any]], completions: list[list[str]]) -> float:
    """The share of completions whose last number is the answer of their row."""
    scores = [
        last_number(text) == row["answer"]
        for row, texts in zip(rows, completions, strict=True)
        for text in texts
    ]
    return sum(scores) / len(scores)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure the share of right answers to the built-in test problems."
    )
    parser.add_argument(
        "--model", required=True, help="folder or hub id of a model with a chat template"
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with test_prompts.jsonl")
    parser.add_argument("--samples", type=int, default=8, help="samples a problem at temperature 1")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    lines = (arguments.data / "test_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    torch.manual_seed(arguments.seed)
    sampled = complete(model, tokenizer, rows, num_samples=arguments.samples)
    greedy = complete(model, tokenizer, rows, num_samples=0)
    shares = [share_right(rows, completions) for completions in (sampled, greedy)]
    print(f"{len(rows)} problems: sampled {shares[0]:.1%} right, greedy {shares[1]:.1%} right")
    for row, texts, (best,) in list(zip(rows, sampled, greedy, strict=True))[:5]:
        asked = row["prompt"][-1]["content"]
        print(f"  {asked!r} ({row['answer']}): greedy {best!r}, sampled {texts[:3]}")


if __name__ == "__main__":
    main()
