"""Samples from the weights that a session on the service has published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tunebook.backends.base import Future
from tunebook.backends.together.failures import DUTIES, RemoteError
from tunebook.backends.together.link import Link
from tunebook.backends.together.queue import Finish, Operation, RemoteQueue
from tunebook.backends.together.samples import model_input
from tunebook.errors import BackendError, StaleGenerator
from tunebook.types import Completion, SamplingParams, StopReason

STOP_REASONS = {"STOP_REASON_STOP": StopReason.STOP, "STOP_REASON_LENGTH": StopReason.LENGTH}


class TogetherGenerator:
    """The weights of one publish; see `tunebook.backends.base.Generator`."""

    def __init__(
        self,
        version: int,
        queue: RemoteQueue,
        *,
        weights_version: Callable[[], int],
        newest: Callable[[], int],
    ) -> None:
        """
        Args:
            version: number of the publish.
            queue: of the session.
            weights_version: the service's number of these weights; another one in a new session.
            newest: number of the session's last publish.
        """
        self.version = version
        self._queue = queue
        self._weights_version = weights_version
        self._newest = newest

    def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, num_samples: int
    ) -> Future[list[list[Completion]]]:
        error = self._refusal(params)
        body = {
            "model_inputs": [model_input([int(token) for token in prompt]) for prompt in prompts],
            "num_samples": num_samples,
            "sampling_params": sampling_params(params),
        }

        async def start(link: Link) -> Finish:
            if not prompts:
                return self._nothing
            sent = await link.sample(body)

            async def finish() -> list[list[Completion]]:
                return self._completions((await sent.output()).results, len(prompts), num_samples)

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
        if ids:
            return BackendError(
                f"rollout.stop={ids}: the service stops at strings only, not at token ids; write "
                "them as strings"
            )
        return None

    def _completions(
        self, results: Sequence[Any], num_prompts: int, num_samples: int
    ) -> list[list[Completion]]:
        counts = [len(result.sequences) for result in results]
        if counts != [num_samples] * num_prompts:
            raise _broken(f"{counts} completions for {num_prompts} prompts of {num_samples} each")
        found: list[list[Completion]] = []
        for result in results:
            versions = {segment.version for segment in result.policy_segments}
            if versions != {self._weights_version()}:
                raise _broken(
                    f"completions of weights {sorted(versions)} where {self._weights_version()} "
                    "were published; somebody else publishes in this session"
                )
            found.append([self._completion(sequence) for sequence in result.sequences])
        return found

    def _completion(self, sequence: Any) -> Completion:
        tokens = np.asarray([int(token) for token in sequence.tokens], np.int32)
        logprobs = np.asarray(sequence.logprobs or [], np.float32)
        if len(logprobs) != len(tokens):
            raise _broken(f"{len(tokens)} tokens with {len(logprobs)} log-probs")
        return Completion(
            tokens=tokens,
            logprobs=logprobs,
            stop_reason=STOP_REASONS[sequence.stop_reason],
            version=self.version,
        )


class _Refused:
    """A future of what was never asked for."""

    def __init__(self, error: BackendError) -> None:
        self._error = error

    def result(self) -> list[list[Completion]]:
        raise self._error


def sampling_params(params: SamplingParams) -> dict[str, Any]:
    """Every setting as the service takes it; 0 is off for our `top_k`, -1 for its."""
    found: dict[str, Any] = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "stop": [str(stop) for stop in params.stop],
    }
    if params.seed is not None:
        found["seed"] = params.seed
    return found


def _broken(what: str) -> RemoteError:
    return RemoteError(
        f"sample: the service returned {what}",
        code="INTERNAL_ERROR",
        duty=DUTIES["INTERNAL_ERROR"],
    )
