"""A pattern that has to be found."""

from __future__ import annotations

import re

from tunebook.errors import ConfigError


class RegexMatch:
    """1 where the pattern is found anywhere in the completion, else 0.

    Python's `re`: `\\A...\\Z` asks for the whole text, `(?i)` ignores case, `(?s)` lets `.` match
    line ends. A pattern such as `(a+)+$` can take for ever on some texts; then the time limit of
    the scorer ends it, and the completion is unscored.
    """

    def __init__(self, *, pattern: str | float | None) -> None:
        """
        Args:
            pattern: a regular expression; YAML reads one of digits as a number.

        Raises:
            ConfigError: there is no pattern, or it is no regular expression.
        """
        pattern = "" if pattern is None else str(pattern)
        if not pattern:
            raise ConfigError("pattern is not given: a regular expression to look for")
        try:
            self.pattern = re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"pattern={pattern}: is no regular expression: {error}") from error

    def __call__(self, completion: str) -> float:
        return float(self.pattern.search(completion) is not None)
