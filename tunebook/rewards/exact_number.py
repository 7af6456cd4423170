"""The number that a completion ends in against the answer, as in GSM8K."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from tunebook.reward_values import no_answer

MARKER = "####"
LONGEST = 300
"""Characters of a number; what is longer is no answer that anybody wrote."""

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_DIGIT = re.compile(r"\d")
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]}%])[-\u2212])?"  # behind a word or a bracket it subtracts
    r"(?:[$€£¥](?P<inner_sign>[-\u2212])?)?"
    rf"(?P<above>(?:{_DIGITS}(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{{1,3}}(?![\d.]))?)"
    rf"(?:/(?P<below>{_DIGITS})(?![\d/]|\.\d))?"
)


def exact_number(completion: str, *, answer: Any) -> float:
    """1 where the number that the completion gives equals the number of the answer, else 0.

    The number is the last one behind the last `####`, or the last of the whole text where no number
    stands there; the same for `answer`, so that a GSM8K solution can be the answer as it is. Read
    are 18, 18., -18, 1,234.5, .5, 1e3, 3/4; currency signs, `%` and words around a number are
    skipped, so 50% is 50. Compared exactly: 0.75 is 3/4, and 0.33 is not 1/3. A mixed number (1
    1/2) or LaTeX (`\\frac{3}{4}`) is not read as one number; see `MathEquivalence`. A completion
    without a number is wrong, and noted as `no_answer`. Only the last number counts, so listing
    many does not help; a correct number for wrong reasons scores 1.

    Args:
        completion: text to judge.
        answer: of the row; a number or text that gives one.

    Raises:
        ValueError: the answer holds no number.
    """
    expected = final_number(str(answer))
    if expected is None or isinstance(answer, bool):
        raise ValueError(f"the row's answer is {answer!r}, which holds no number")
    given = final_number(completion)
    return no_answer() if given is None else float(given == expected)


def final_number(text: str) -> Fraction | None:
    """The number that a text ends in, by the rule of `exact_number`; None if it holds none."""
    _, marker, behind = text.rpartition(MARKER)
    number = _last_number(behind) if marker else None
    return _last_number(text) if number is None else number


def _last_number(text: str) -> Fraction | None:
    for word in reversed(text.split()):  # no number goes over white space
        if _DIGIT.search(word) and (found := _last_match(word)) is not None:
            value = _plain(found["above"]) / _plain(found["below"] or "1")
            return value if (found["sign"] is None) == (found["inner_sign"] is None) else -value
    return None


def _last_match(word: str) -> re.Match[str] | None:
    last: re.Match[str] | None = None
    for match in _NUMBER.finditer(word):
        if len(match[0]) <= LONGEST and (match["below"] is None or _plain(match["below"]) != 0):
            last = match
    return last


def _plain(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))
