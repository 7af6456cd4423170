"""The value of an arithmetic expression that somebody else wrote.

Numbers are exact fractions, so 0.1 + 0.2 is 0.3. Only literals and operators are evaluated, from
the syntax tree; nothing is run, and what an expression may cost is limited.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction

LONGEST = 200
"""Characters of an expression."""
MOST_BITS = 1024
"""Of the numerator and of the denominator of any value on the way."""
SHOWN_DIGITS = 10
"""Significant digits of a result that is no whole number."""
SHOWN_DECIMALS = 4
"""Digits behind the point that a large one has at least."""

OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def evaluate(expression: str) -> Fraction:
    """The exact value of an expression of numbers, brackets and + - * / // % **.

    Raises:
        ValueError: it is something else, too long, too large, or divides by zero.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"an expression has at most {LONGEST} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError("not an arithmetic expression") from None
    return _value(tree.body)


def shown(value: Fraction) -> str:
    """A value in decimal digits, all of a whole number, zeros at the end left out."""
    if value.denominator == 1:
        return str(value.numerator)
    whole = len(str(abs(value.numerator) // value.denominator))
    context = Context(prec=max(SHOWN_DIGITS, whole + SHOWN_DECIMALS))
    quotient = context.divide(Decimal(value.numerator), Decimal(value.denominator))
    text = format(quotient, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _literal(number)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            try:
                return _limited(Fraction(OPERATORS[type(op)](_value(left), _value(right))))
            except ZeroDivisionError:
                raise ValueError("division by zero") from None
    raise ValueError("only numbers, brackets and + - * / // % ** are allowed")


def _literal(number: int | float) -> Fraction:
    # The digits as written, not the float that is nearest to them.
    try:
        return _limited(Fraction(repr(number)))
    except ValueError:
        raise ValueError("a number is too large") from None


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("only whole powers are allowed")
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    # Before it is computed: the result has about this many bits.
    if abs(exponent) > MOST_BITS or size * abs(exponent) > 2 * MOST_BITS:
        raise ValueError("a number is too large")
    try:
        return _limited(Fraction(base ** int(exponent)))
    except ZeroDivisionError:
        raise ValueError("division by zero") from None


def _limited(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_BITS:
        raise ValueError("a number is too large")
    return value
