"""What answers a model between its turns.

An environment is a class that a config names; every rollout gets an instance of its own, so state
is plain attributes. Making one takes nothing that has to be freed, that is for `reset`: one more is
made to ask it for its tools. The loop in `tunebook.rollouts` calls it so:

1. `reset(start)` gives the messages that the model answers first, most often those of the row.
2. The model samples a turn. `step(turn)` reads it and gives the messages that follow (a tool's
   result, a user's reply), or says that the conversation is over.
3. So on until a step is `done`, the model has had `max_turns` turns, or no room is left.
4. `close()`, however it ended.

A config file for it begins with `defaults: [base]` for the limits `max_turns`, `timeout_s` and
`max_concurrency`; all other keys are arguments of the class. `rollout.max_new_tokens` holds for
each turn, `max_seq_len` for the conversation.

What the model sampled is never changed, nor tokenised again: the messages of a step are rendered
behind it with the model's chat template (see `tunebook.render.turns`), and carry no loss.

Methods may be `async` or plain. Asynchronous ones of all rollouts run in one event loop and must
not block it. Plain ones run in a thread, of one instance one at a time. A call that raises or takes
longer than `environment.timeout_s` ends its rollout, which then has no reward and is counted: that
is not a reward of 0.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from tunebook.types import StopReason

Message: TypeAlias = dict[str, Any]
"""`role`, `content` (a string), and where they apply `tool_calls`, `tool_call_id` and `name`."""
Tools: TypeAlias = list[dict[str, Any]] | None


@dataclass(frozen=True, slots=True)
class Start:
    """What a rollout begins with."""

    messages: Sequence[Message]
    """The prompt of the row."""
    columns: Mapping[str, Any]
    """The row's other columns, `answer` for example."""
    seed: int
    """For what the environment draws: the same for all rollouts of a group, another in each step.
    Their rewards are compared with each other, so they should begin alike."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that stands in an answer."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model has sampled."""

    number: int
    """Of this turn, from 1."""
    is_last: bool
    """`max_turns` is reached: whatever the step returns, the model answers no more."""
    text: str
    """The answer without special tokens."""
    calls: tuple[ToolCall, ...]
    """The calls that could be read from it; see `tunebook.environments.tool_calls`."""
    call_errors: tuple[str, ...]
    """What is wrong with those that could not."""
    stop_reason: StopReason
    """`length`: the answer was cut, and a call in it may be, too."""


@dataclass(frozen=True, slots=True)
class Step:
    """What follows a turn."""

    messages: Sequence[Message]
    """What the model answers next; not read where `done`."""
    done: bool
    reward: float | None = None
    """What this turn earned; the sum over the turns is the reward of the rollout. An environment
    that scores gives a number at every step, 0 where nothing is earned yet, since a rollout may be
    cut after any of them. None at every step = it leaves scoring to the reward functions."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers to log; added up over the turns of a rollout."""


class Environment(Protocol):
    """One conversation. A class that derives from this one may leave out `tools` and `close`."""

    @property
    def tools(self) -> Tools:
        """JSON schemas of the functions that a model may call; None = none.

        The chat template prints them, the same for every rollout of a run.
        """
        return None

    def reset(self, start: Start) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """The messages that the model answers first; called once, before any `step`.

        Where they are those of the row, the tokens that the run has frozen are used.
        """
        ...

    def step(self, turn: Turn) -> Step | Awaitable[Step]:
        """What follows a turn of the model; not called again after a step that is `done`."""
        ...

    def close(self) -> Awaitable[None] | None:
        """Frees what the conversation holds; called once, also after a failure."""
        return None
