"""The whole completion against the answer."""

from __future__ import annotations

import unicodedata
from typing import Any

from tunebook.reward_values import no_answer


def exact_match(completion: str, *, answer: Any) -> float:
    """1 where the completion is the answer, or one of several; else 0.

    Both are compared after Unicode NFKC, case folding, and with every run of white space as one
    space and none at the ends. Nothing else is forgiven: a full stop or a sentence around the
    answer makes it wrong. A blank completion is wrong, and noted as `no_answer`.

    Args:
        completion: text to judge.
        answer: of the row: text, a number, or a list of accepted ones.

    Raises:
        ValueError: the answer is empty or blank.
    """
    accepted = [normalised(str(one)) for one in (answer if isinstance(answer, list) else [answer])]
    if answer is None or not accepted or not all(accepted):
        raise ValueError(f"the row's answer is {answer!r}, which nothing can match")
    given = normalised(completion)
    return float(given in accepted) if given else no_answer()


def normalised(text: str) -> str:
    """The text as `exact_match` compares it."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())
