"""Mathematical equality, through the package math-verify."""

from __future__ import annotations

import logging
import re
from importlib.util import find_spec
from typing import Any

from tunebook.errors import ConfigError
from tunebook.reward_values import no_answer

_MARKED = re.compile(r"\$|\\\(|\\\[|\\boxed|\\begin\{")


class MathEquivalence:
    """1 where the final expression of the completion equals the answer mathematically, else 0.

    What counts as the final expression and as equal is math-verify's: the last `\\boxed{}`, else
    LaTeX between dollars, else a plain number or fraction; 1/2 is 0.5 and (x+1)^2 is x^2+2x+1.
    Several boxed expressions are read as one set, so listing does not help. The answer may be
    LaTeX or plain (`\\frac{1}{2}`, `1/2`, `x^2+1`). A completion without an expression is wrong,
    and noted as `no_answer`.

    The package's own time limits are switched off: they work by signals, which fail outside the
    main thread. An expression that takes too long is ended by the scorer, and unscored.

    Needs math-verify: `pip install 'tunebook[math]'`.
    """

    def __init__(self) -> None:
        """
        Raises:
            ConfigError: the package is missing.
        """
        if find_spec("math_verify") is None:
            raise ConfigError(
                "_target_: needs the package math-verify, which is not installed: "
                "pip install 'tunebook[math]'"
            )
        import math_verify  # here, so that no call pays for it with its time

        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that limits are off
        self._package = math_verify

    def __call__(self, completion: str, *, answer: Any) -> float:
        gold = str(answer).strip()
        marked = gold if _MARKED.search(gold) else f"${gold}$"
        expected = self._parse(marked)
        if not expected or not gold or answer is None or isinstance(answer, bool):
            raise ValueError(f"the row's answer is {answer!r}, which holds no expression")
        given = self._parse(completion)
        if not given:
            return no_answer()
        return float(self._package.verify(expected, given, timeout_seconds=None))

    def _parse(self, text: str) -> list[Any]:
        return self._package.parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
