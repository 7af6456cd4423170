"""Makes the built-in data: one small file for each recipe, and the problems that judge them.

    python scripts/make_tiny_data.py --out tunebook/assets/tiny_data

Made for the built-in model (see `tiny_chats.py`): what the noisy demonstrator got wrong is right
here. The same seed gives the same bytes. Takes a second.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tiny_chats import (
    ANSWER_STYLES,
    CLEAN_STYLE,
    Message,
    Problem,
    draw_fact,
    draw_problem,
    draw_story,
    draw_talk,
    draw_word_game,
    near_miss,
    question,
    reply,
    turn,
)

Row = dict[str, Any]

NUM_CHATS, NUM_PREFERENCES, NUM_PROMPTS, NUM_TEST_PROMPTS = 640, 800, 400, 100
STORY_SHARE = 0.15


def draw_asked(rng: random.Random) -> tuple[Problem, str]:
    """A problem of the training side and how it is asked: plainly, or in a story."""
    if rng.random() < STORY_SHARE:
        return draw_story(rng)
    problem = draw_problem(rng, held_out=False)
    return problem, question(problem, rng)


def draw_clean_chat(rng: random.Random) -> list[Message]:
    """A chat for SFT: one or two right sums, all answered in one style, or something else."""
    kind = rng.random()
    if kind < 0.75:
        messages: list[Message] = []
        for _ in range(2 if rng.random() < 0.15 else 1):
            problem, asked = draw_asked(rng)
            messages += turn(asked, reply(problem, problem.answer, CLEAN_STYLE))
        return messages
    draw = rng.choice((draw_fact, draw_talk, draw_word_game))
    return turn(*draw(rng))


def chats(rng: random.Random) -> Iterator[Row]:
    """SFT rows: `messages`."""
    while True:
        yield {"messages": draw_clean_chat(rng)}


def preferences(rng: random.Random) -> Iterator[Row]:
    """DPO rows: `prompt`, `chosen`, `rejected`; the two answers differ in the number only."""
    while True:
        problem, asked = draw_asked(rng)
        style = rng.choice(ANSWER_STYLES)
        prompt, chosen = turn(asked, reply(problem, problem.answer, style))
        _, rejected = turn(asked, reply(problem, near_miss(problem.answer, rng), style))
        yield {"prompt": [prompt], "chosen": [chosen], "rejected": [rejected]}


def prompts(rng: random.Random) -> Iterator[Row]:
    """GRPO rows: `prompt`, `answer`."""
    while True:
        problem, asked = draw_asked(rng)
        yield {"prompt": [{"role": "user", "content": asked}], "answer": str(problem.answer)}


def test_prompts(rng: random.Random) -> Iterator[Row]:
    """Rows like those of `prompts`, of held-out problems, each problem once."""
    seen: set[Problem] = set()
    while True:
        problem = draw_problem(rng, held_out=True)
        if problem in seen:
            continue
        seen.add(problem)
        yield {
            "prompt": [{"role": "user", "content": question(problem, rng)}],
            "answer": str(problem.answer),
        }


def take_different(rows: Iterable[Row], count: int) -> list[Row]:
    """The first `count` rows of different text."""
    taken: dict[str, Row] = {}
    for row in rows:
        text = " ".join(message["content"] for message in row.get("prompt", row.get("messages")))
        taken.setdefault(text, row)
        if len(taken) == count:
            break
    return list(taken.values())


def write_rows(file: Path, rows: list[Row]) -> None:
    """Writes one JSON object a line, each with an `id`."""
    lines = (
        json.dumps({"id": f"{file.stem}-{index:04d}", **row}) + "\n"
        for index, row in enumerate(rows)
    )
    file.write_text("".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the built-in data.")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder to write; its README.md is left alone"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    files = {
        "chats": (chats, NUM_CHATS),
        "preferences": (preferences, NUM_PREFERENCES),
        "prompts": (prompts, NUM_PROMPTS),
        "test_prompts": (test_prompts, NUM_TEST_PROMPTS),
    }
    for name, (draw_rows, count) in files.items():
        rows = take_different(draw_rows(random.Random(f"{name}-{arguments.seed}")), count)
        write_rows(arguments.out / f"{name}.jsonl", rows)
        print(f"{name}.jsonl: {len(rows)} rows")


if __name__ == "__main__":
    main()
