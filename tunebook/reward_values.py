"""What a reward function can say besides a number: why there is none, or what was noticed."""

from __future__ import annotations

NO_ANSWER = "no_answer"
"""Note of a completion in which there was nothing to judge."""


class Unscored(Exception):
    """Raised by a reward that could not judge; the completion is unscored, never 0.

    It is for what the completion cannot help (a judge that answers HTTP 429). Unlike any other
    exception it does not end a run under `reward.on_error=fail`.
    """

    def __init__(self, kind: str, message: str = "") -> None:
        """
        Args:
            kind: a short name that is counted, `rate_limited` for example.
            message: what happened, for people.
        """
        super().__init__(message or kind)
        self.kind = kind


class NotedReward(float):
    """A reward with a short name for what was noticed, counted apart from the reward itself."""

    note: str

    def __new__(cls, value: float, note: str = "") -> NotedReward:
        reward = super().__new__(cls, value)
        reward.note = note
        return reward


def no_answer() -> NotedReward:
    """The reward of a completion without any answer: wrong (0), and counted as `no_answer`."""
    return NotedReward(0.0, NO_ANSWER)
