"""Samples from the weights that a session on a service has published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tunebook.backends.base import Future
from tunebook.backends.remote.failures import broken_answer
from tunebook.backends.remote.link import Finish, Link, Sampled
from tunebook.backends.remote.queue import Operation, RemoteQueue
from tunebook.errors import BackendError, StaleGenerator
from tunebook.types import Completion, SamplingParams


class RemoteGenerator:
    """The weights of one publish; see `tunebook.backends.base.Generator`."""

    def __init__(
        self,
        version: int,
        queue: RemoteQueue[Any],
        *,
        published: Callable[[], Any],
        newest: Callable[[], int],
        stop_ids: bool,
    ) -> None:
        """
        Args:
            version: number of the publish.
            queue: of the session.
            published: the weights as its link knows them; another value in a new session.
            newest: number of the session's last publish.
            stop_ids: whether the service stops at token ids.
        """
        self.version = version
        self._queue = queue
        self._published = published
        self._newest = newest
        self._stop_ids = stop_ids

    def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, num_samples: int
    ) -> Future[list[list[Completion]]]:
        error = self._refusal(params)
        wanted = [[int(token) for token in prompt] for prompt in prompts]

        async def start(link: Link) -> Finish:
            if not wanted:
                return self._nothing
            finish_sampling = await link.sample(self._published(), wanted, params, num_samples)

            async def finish() -> list[list[Completion]]:
                return self._completions(await finish_sampling(), len(wanted), num_samples)

            return finish

        if error is not None:
            return _Refused(error)
        return self._queue.call(Operation("sample", start, changes=False))

    async def _nothing(self) -> list[list[Completion]]:
        return []

    def _refusal(self, params: SamplingParams) -> BackendError | None:
        if self._newest() != self.version:
            return StaleGenerator(
                f"this generator has the weights of publish {self.version} and the session has "
                f"published {self._newest()} times; sample from what publish_weights returned last"
            )
        ids = [stop for stop in params.stop if isinstance(stop, int)]
        if ids and not self._stop_ids:
            return BackendError(
                f"rollout.stop={ids}: the service stops at strings only, not at token ids; write "
                "them as strings"
            )
        return None

    def _completions(
        self, found: Sequence[Sequence[Sampled]], num_prompts: int, num_samples: int
    ) -> list[list[Completion]]:
        counts = [len(samples) for samples in found]
        if counts != [num_samples] * num_prompts:
            raise broken_answer(
                f"sample: the service returned {counts} completions for {num_prompts} prompts of "
                f"{num_samples} each"
            )
        return [[self._completion(sampled) for sampled in samples] for samples in found]

    def _completion(self, sampled: Sampled) -> Completion:
        if len(sampled.logprobs) != len(sampled.tokens):
            raise broken_answer(
                f"sample: the service returned {len(sampled.tokens)} tokens with "
                f"{len(sampled.logprobs)} log-probs"
            )
        return Completion(
            tokens=sampled.tokens,
            logprobs=sampled.logprobs,
            stop_reason=sampled.stop_reason,
            version=self.version,
        )


class _Refused:
    """A future of what was never asked for."""

    def __init__(self, error: BackendError) -> None:
        self._error = error

    def result(self) -> list[list[Completion]]:
        raise self._error
