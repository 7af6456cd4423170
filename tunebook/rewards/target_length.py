"""A window of lengths."""

from __future__ import annotations

from tunebook.errors import ConfigError


class TargetLength:
    """1 within `[minimum, maximum]` tokens, falling linearly to 0 over `margin` tokens outside.

    With distance d to the window: max(0, 1 - d / margin), and 0 outside it if the margin is 0. It
    says nothing about what the tokens are.
    """

    def __init__(self, *, minimum: int, maximum: int, margin: int) -> None:
        """
        Args:
            minimum: tokens.
            maximum: tokens.
            margin: tokens; 0 = a step.

        Raises:
            ConfigError: the window is empty, or something is negative.
        """
        if not 0 <= minimum <= maximum:
            raise ConfigError(
                f"minimum={minimum}, maximum={maximum}: must be 0 <= minimum <= maximum (tokens)"
            )
        if margin < 0:
            raise ConfigError(f"margin={margin}: must be at least 0 (tokens; 0 = a step)")
        self.minimum, self.maximum, self.margin = minimum, maximum, margin

    def __call__(self, completion: str, *, num_tokens: int) -> float:
        distance = max(self.minimum - num_tokens, num_tokens - self.maximum, 0)
        if distance == 0:
            return 1.0
        return max(0.0, 1 - distance / self.margin) if self.margin else 0.0
