"""Arithmetic that a model wrote: exact, and never more than arithmetic."""

from contextlib import suppress
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunebook.environments.arithmetic import LONGEST, MOST_BITS, evaluate, shown


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * 4", "20"),
        ("-3 - -4", "1"),
        ("+7", "7"),
        ("0.1 + 0.2", "0.3"),
        ("10 / 4", "2.5"),
        ("1 / 3", "0.3333333333"),
        ("2 / 3 * 3", "2"),
        ("7 // 2", "3"),
        ("7 % 4", "3"),
        ("2 ** 10", "1024"),
        ("2 ** -2", "0.25"),
        ("-2 ** 2", "-4"),
        ("0 ** 0", "1"),
        ("1e3", "1000"),
        ("1_000 * 2", "2000"),
        (" 5 ", "5"),
        ("100000000000 / 8", "12500000000"),
        ("1 / 1000", "0.001"),
        ("1e-12", "0.000000000001"),
        ("123456789012 / 7", "17636684144.5714"),
    ],
)
def test_values(expression, expected):
    assert shown(evaluate(expression)) == expected


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1 / 0", "division by zero"),
        ("1 // 0", "division by zero"),
        ("1 % 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("2 ** 0.5", "whole powers"),
        ("9 ** 9 ** 9", "too large"),
        ("9 ** 1000000", "too large"),
        ("(2 ** 1000) ** 1000", "too large"),
        ("(2 ** 900) * (2 ** 900)", "too large"),
        ("1e999", "too large"),
        ("1" * 201, "at most 200 characters"),
        ("", "not an arithmetic"),
        ("1 +", "not an arithmetic"),
        ("\x00", "not an arithmetic"),
        ("(" * 150, "not an arithmetic"),
        ("1,000", "only numbers"),
        ("x", "only numbers"),
        ("True + 1", "only numbers"),
        ("'a' * 100", "only numbers"),
        ("2j", "only numbers"),
        ("1 << 100", "only numbers"),
        ("~1", "only numbers"),
        ("1 if 2 else 3", "only numbers"),
        ("[1][0]", "only numbers"),
        ("__import__('os').system('true')", "only numbers"),
        ("(lambda: 1)()", "only numbers"),
        ("1 < 2", "only numbers"),
    ],
)
def test_everything_else_is_refused(expression, message):
    with pytest.raises(ValueError, match=message):
        evaluate(expression)


@given(st.text(max_size=LONGEST + 5))
def test_no_text_does_any_harm(text):
    with suppress(ValueError):
        assert isinstance(evaluate(text), Fraction)


@given(st.recursive(
    st.integers(0, 10**6).map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda t: f"({' '.join(t)})"),
    max_leaves=8,
))  # fmt: skip
def test_whole_numbers_are_those_of_python(expression):
    value = eval(expression)
    if len(expression) <= LONGEST and abs(value).bit_length() <= MOST_BITS:
        assert shown(evaluate(expression)) == str(value)
