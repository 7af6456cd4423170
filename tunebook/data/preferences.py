"""Reads preference rows: pairs with or without a prompt of their own, and scored samples."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from tunebook.data.json_values import BadRow, type_name
from tunebook.data.messages import Message, normalise_messages, without_trained
from tunebook.data.turns import (
    LIST_KEYS,
    Content,
    Reading,
    all_strings,
    required_key,
    turns_of,
)


def read_pair(values: dict[str, Any], reading: Reading, *, prune: bool) -> Content:
    """The pair of a row with `chosen` and `rejected`, its prompt given or shared by both sides.

    Raises:
        BadRow: a side that is no completion of the prompt, or two sides that do not differ.
    """
    chosen = turns_of(values, "chosen", "assistant", reading, prune=prune)
    rejected = turns_of(values, "rejected", "assistant", reading, prune=prune)
    prompt_key = next((key for key in ("prompt", *LIST_KEYS) if key in values), None)
    if without_trained(chosen) == without_trained(rejected):
        raise BadRow("rejected", "is identical to chosen, so the pair teaches nothing; remove it")
    implicit = prompt_key is None or (prompt_key != "prompt" and chosen[0]["role"] != "assistant")
    if implicit:
        prompt, chosen, rejected = _split_shared(values, chosen, rejected)
    else:
        assert prompt_key is not None
        prompt = turns_of(values, prompt_key, "user", reading, prune=prune)
        chosen = _without_prompt(chosen, prompt, "chosen")
        rejected = _without_prompt(rejected, prompt, "rejected")
    _check_completion(chosen, "chosen", reading)
    _check_completion(rejected, "rejected", reading)
    _refuse_same_text(chosen, rejected, "rejected")
    used = (*([prompt_key] if prompt_key else []), "chosen", "rejected")
    plain = not implicit and all_strings(values, used)
    return Content(prompt, chosen, rejected, plain=plain, used=used)


def _split_shared(
    values: dict[str, Any], chosen: list[Message], rejected: list[Message]
) -> tuple[list[Message], list[Message], list[Message]]:
    """Prompt, chosen and rejected of two whole conversations: the prompt is what they share."""
    for key in ("chosen", "rejected"):
        if isinstance(values[key], str):
            raise BadRow(
                "prompt", f"is missing; it is needed because {key} is a string, not a conversation"
            )
    sides = without_trained(chosen), without_trained(rejected)
    num_shared = 0
    for one, other in zip(*sides, strict=False):
        if one != other:
            break
        num_shared += 1
    if num_shared == min(map(len, sides)):
        shorter = "chosen" if len(chosen) < len(rejected) else "rejected"
        raise BadRow(
            shorter, f"is only the beginning of the other side ({num_shared} shared messages)"
        )
    if num_shared == 0:
        raise BadRow("prompt", "is missing, and chosen and rejected do not begin with one message")
    return chosen[:num_shared], chosen[num_shared:], rejected[num_shared:]


def _without_prompt(side: list[Message], prompt: list[Message], key: str) -> list[Message]:
    """The completion of a side that repeats the prompt; a side that does not comes back as is."""
    if without_trained(side[: len(prompt)]) == without_trained(prompt):
        return side[len(prompt) :]
    if side[0]["role"] == "assistant":
        return side
    if len(side) > 1 and side[0]["role"] == "system" and side[1 : len(prompt) + 1] == prompt:
        raise BadRow(key, "has a system message that the prompt lacks; put it into the prompt")
    raise BadRow(key, f"starts with a {side[0]['role']} message that is not the prompt's")


def _check_completion(side: list[Message], key: str, reading: Reading) -> None:
    if not side:
        raise BadRow(key, "holds the prompt and no answer")
    if side[0]["role"] != "assistant":
        raise BadRow(
            key, f"starts with a {side[0]['role']} message after the prompt; it must be an answer"
        )
    if side[-1]["role"] == "user":
        raise BadRow(key, "ends with a user message; a completion ends with the assistant")


def _refuse_same_text(chosen: list[Message], rejected: list[Message], key: str) -> None:
    """White space at the ends of a message is no preference."""
    if _stripped(chosen) == _stripped(rejected):
        raise BadRow(
            key, "differs from chosen only in white space around its messages; remove the pair"
        )


def _stripped(messages: list[Message]) -> list[Message]:
    return [
        {**message, "content": message["content"].strip()} for message in without_trained(messages)
    ]


def read_samples(values: dict[str, Any], reading: Reading, *, prune: bool) -> list[Content]:
    """One pair for every sample of score 0, each against the only sample of score 1.

    Raises:
        BadRow: graded scores, or no such pair.
    """
    key = required_key(values, ("prompt", *LIST_KEYS))
    prompt = turns_of(values, key, "user", reading, prune=prune)
    samples = values["samples"]
    if not isinstance(samples, list):
        raise BadRow("samples", f"is {type_name(samples)}; must be a list of content and score")
    sides: dict[float, list[list[Message]]] = {0.0: [], 1.0: []}
    for i, sample in enumerate(samples):
        turn, score = _sample(sample, f"samples[{i}]", reading, prune=prune)
        sides[score].append(turn)
    if len(sides[1.0]) != 1 or not sides[0.0]:
        raise BadRow(
            "samples",
            f"hold {len(sides[1.0])} of score 1 and {len(sides[0.0])} of score 0; a preference "
            "needs exactly one of score 1 and at least one of score 0",
        )
    chosen = sides[1.0][0]
    for rejected in sides[0.0]:
        if rejected == chosen:
            raise BadRow("samples", "the samples of score 1 and 0 are identical; remove the row")
        _refuse_same_text(chosen, rejected, "samples")
    group = None
    if len(sides[0.0]) > 1:
        text = json.dumps([prompt, chosen], ensure_ascii=False)
        group = "samples:" + hashlib.sha256(text.encode("utf-8")).hexdigest()[:32]
    return [
        Content(list(prompt), list(chosen), rejected, group=group, used=(key, "samples"))
        for rejected in sides[0.0]
    ]


def _sample(
    sample: Any, field: str, reading: Reading, *, prune: bool
) -> tuple[list[Message], float]:
    if not isinstance(sample, dict):
        raise BadRow(field, f"is {type_name(sample)}; must be an object with content and score")
    score = sample.get("score")
    if isinstance(score, bool) or score not in (0, 1):
        shown = "missing" if score is None else json.dumps(score, ensure_ascii=False)[:60]
        raise BadRow(
            f"{field}.score",
            f"is {shown}; graded scores are no preference: give 1 to the best and 0 to the others",
        )
    message = {key: value for key, value in sample.items() if key != "score"}
    message.setdefault("role", "assistant")
    turns = normalise_messages([message], field, unread=reading.unread, prune=prune)
    if turns[0]["role"] != "assistant":
        raise BadRow(f"{field}.role", f"is {turns[0]['role']}; a sample is an assistant message")
    return turns, float(score)
