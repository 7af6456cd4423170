"""What a session needs of a service: operations that are submitted now and waited for later."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from tunebook.backends.remote.losses import BuiltIn
from tunebook.types import (
    Datum,
    FloatArray,
    IntArray,
    OptimizerParams,
    SamplingParams,
    StopReason,
)

Finish: TypeAlias = Callable[[], Awaitable[Any]]
"""Waits for an operation that was submitted and returns its value."""


@dataclass(frozen=True, slots=True)
class Pass:
    """What a loss of the service's own came to."""

    logprobs: list[FloatArray]
    """`[T]` a row, of the weights before the step; any value where a token has no weight."""
    loss: float | None
    """Sum over the rows; None = the service says none that compares with ours."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One completion of a prompt."""

    tokens: IntArray
    logprobs: FloatArray
    stop_reason: StopReason


class Link(Protocol):
    """One session on a service. A call submits, in call order, and returns a `Finish`."""

    seen: str
    """What the service last said of an operation, for people."""

    @property
    def session_id(self) -> str:
        """As the service calls it."""
        ...

    @property
    def max_rows(self) -> int | None:
        """Rows that it takes in one operation; None = any number."""
        ...

    async def forward(self, data: Sequence[Datum]) -> Finish:
        """Log-probs of rows, `list[FloatArray]`, `[T]` each; any number where a weight is 0."""
        ...

    async def forward_backward(self, own: BuiltIn, data: Sequence[Datum]) -> Finish:
        """A loss of its own over at most `max_rows` rows, its gradient added; gives a `Pass`."""
        ...

    async def backward(self, data: Sequence[Datum], gradients: Sequence[FloatArray]) -> Finish:
        """Adds the gradient of `sum(g * logprob)` over at most `max_rows` rows; gives None.

        Args:
            data: the rows.
            gradients: g, `[T]` a row.
        """
        ...

    async def optim_step(self, params: OptimizerParams) -> Finish:
        """Applies the gradient and clears it; gives `Metrics`, what the service tells of them."""
        ...

    async def save(self, name: str) -> Finish:
        """Saves all that is needed to go on; gives the place of the checkpoint."""
        ...

    async def save_for_download(self, name: str) -> Finish:
        """Saves the weights as they are now for a download; gives their place."""
        ...

    async def publish(self) -> Finish:
        """Makes the weights as they are now ready to sample from; gives what `sample` takes."""
        ...

    async def sample(
        self,
        published: Any,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        num_samples: int,
    ) -> Finish:
        """Completions of published weights, `list[list[Sampled]]`, one list a prompt."""
        ...
