"""How long it takes until something happens: start-up of commands, and rendering of rows."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import workload
from benchmarks.cases import Options, source
from benchmarks.contest import ROOT
from tunebook.config import Mask, OnBadRow, OnBlankAnswer, OnLongRow
from tunebook.render import render_rows

RUNS = 7
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import tunebook": ["-c", "import tunebook"],
    "tunebook --help": ["-c", "from tunebook.cli import main; main()", "--help"],
    "python -m recipes.sft --cfg job": ["-m", "recipes.sft", "--cfg", "job"],
    "import torch": ["-c", "import torch"],
}
TRL_COMMANDS = {"from trl import SFTTrainer": ["-c", "from trl import SFTTrainer"]}
GENERATED_ROWS = 2000
RENDER_RUNS = 3


def startup(options: Options) -> dict[str, Any]:
    """Wall time of commands that compute nothing, run in turn."""
    commands = COMMANDS | (TRL_COMMANDS if find_spec("trl") else {})
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    runs = RUNS if options.steps is None else options.steps
    for _ in range(runs + 1):
        for name, arguments in commands.items():
            started = time.perf_counter()
            subprocess.run(
                [sys.executable, *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
            )
            seconds[name].append(time.perf_counter() - started)
    return {
        "case": "startup",
        "device": options.device,
        "dtype": "any",
        "described": {"runs": runs},
        "times": {
            name: {"median_s": median(values[1:]), "first_s": values[0], "unit": ""}
            for name, values in seconds.items()
        },
        "ratios": {},
    }


def rendering(options: Options) -> dict[str, Any]:
    """Rows to tokens with masks, in turn: our renderer, and the maps that TRL makes.

    TRL's answer-only loss needs prompt and completion apart, so it renders and tokenises each row
    twice; over whole conversations, once and without a mask. Ours finds the mask and verifies it.
    Everybody starts without a cache.
    """
    rows = workload.conversation_rows(
        options.data,
        count=GENERATED_ROWS,
        folder=options.work / "cache",
        length_scale=options.length_scale,
        seed=options.seed,
    )
    tokenizer = workload.tokenizer_of(options.model)
    conversations = {"messages": [row.messages for row in rows]}
    parts = {
        "prompt": [row.messages[:-1] for row in rows],
        "completion": [row.messages[-1:] for row in rows],
    }
    # A folder of its own for each run, so that no run finds what another has cached.
    runs = range(RENDER_RUNS + 1)
    whole = [dataset_of(conversations, options.work / f"whole_{run}") for run in runs]
    pairs = [dataset_of(parts, options.work / f"pairs_{run}") for run in runs]

    def ours(run: int, workers: int | None) -> int:
        rendered = render_rows(
            rows,
            tokenizer,
            mask=Mask.all_assistant,
            max_seq_len=1024,
            on_long_row=OnLongRow.truncate,
            on_blank_answer=OnBlankAnswer.error,
            on_bad_row=OnBadRow.fail,
            cache_dir=options.work / f"render_{workers}_{run}",
            num_workers=workers,
        )
        return int(rendered.lengths.sum())

    ways: dict[str, Callable[[int], int]] = {
        "ours": lambda run: ours(run, None),
        "ours, one process": lambda run: ours(run, 0),
        "datasets.map, prompt and completion": lambda run: mapped_pairs(pairs[run], tokenizer),
        "datasets.map, whole conversation": lambda run: mapped_whole(whole[run], tokenizer),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    counts: dict[str, int] = {}
    for run in runs:
        for name, render in ways.items():
            started = time.perf_counter()
            counts[name] = render(run)
            seconds[name].append(time.perf_counter() - started)
            options.tell(f"{name}: {seconds[name][-1]:.2f} s, {counts[name]} tokens")
    if len(set(counts.values())) != 1:
        raise ValueError(f"the ways of rendering give different tokens: {counts}")
    return {
        "case": "rendering",
        "device": "cpu",
        "dtype": "any",
        "model": options.model,
        "described": {
            "rows": len(rows),
            "tokens": counts["ours"],
            "rows from": source(options.data),
        },
        "times": {
            name: {
                "median_s": median(values[1:]),
                "first_s": values[0],
                "unit": f"{len(rows) / median(values[1:]):.0f} rows/s, "
                f"{counts[name] / median(values[1:]):.0f} tokens/s",
            }
            for name, values in seconds.items()
        },
        "ratios": {
            "rendering": {
                f"{name} / ours": median(
                    a / b for a, b in zip(values[1:], seconds["ours"][1:], strict=True)
                )
                for name, values in seconds.items()
                if name != "ours"
            }
        },
    }


def mapped_whole(dataset: Any, tokenizer: Any) -> int:
    """Tokens of all rows, each row rendered and tokenised once in `datasets.map`."""

    def tokenize(example: dict[str, Any]) -> dict[str, Any]:
        tokens = tokenizer.apply_chat_template(example["messages"], return_dict=True)
        return {"input_ids": tokens["input_ids"]}

    return count_tokens(dataset.map(tokenize))


def mapped_pairs(dataset: Any, tokenizer: Any) -> int:
    """Tokens of all rows as TRL makes them of prompt and completion, with the completion's mask."""

    def tokenize(example: dict[str, Any]) -> dict[str, Any]:
        prompt = tokenizer.apply_chat_template(
            example["prompt"], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        whole = tokenizer.apply_chat_template(
            example["prompt"] + example["completion"], return_dict=True
        )["input_ids"]
        mask = [0] * len(prompt) + [1] * (len(whole) - len(prompt))
        return {"input_ids": whole, "completion_mask": mask}

    return count_tokens(dataset.map(tokenize))


def dataset_of(columns: dict[str, list[Any]], folder: Path) -> Any:
    """A dataset on disk, so that `map` writes its result as it does for one that was loaded."""
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(columns).save_to_disk(folder)
    return datasets.load_from_disk(str(folder))


def count_tokens(dataset: Any) -> int:
    """Tokens of a dataset."""
    return sum(map(len, dataset["input_ids"]))
