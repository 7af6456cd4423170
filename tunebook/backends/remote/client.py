"""Sessions of services whose Python interface is Tinker's: `Datum`s in, futures out, in order.

A training client takes calls at once and returns futures; awaiting one gives its value. Services
that share this interface differ in how calls are made, what normalises a loss, what stops a
completion and what a publish returns. That is their `Dialect`.

Legend: T scored tokens of a row.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from tunebook.backends.remote.failures import broken_answer
from tunebook.backends.remote.link import Finish, Pass, Sampled
from tunebook.backends.remote.losses import BuiltIn
from tunebook.backends.remote.rows import marks_of
from tunebook.errors import BackendError
from tunebook.types import (
    AdamParams,
    Datum,
    FloatArray,
    Metrics,
    OptimizerParams,
    SamplingParams,
    StopReason,
)

CROSS_ENTROPY = "cross_entropy"
STOP_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH}


class Dialect(Protocol):
    """What one service does otherwise than the others of this interface."""

    types: Any
    """Where `Datum`, `ModelInput`, `TensorData`, `AdamParams` and `SamplingParams` are."""
    sum_config: Mapping[str, Any] | None
    """Makes the service's `cross_entropy` the plain sum `-weights * logprobs`; None = it is."""

    async def submit(self, client: Any, call: str, *arguments: Any, **settings: Any) -> Any:
        """Calls a training client, which has taken the call when this returns; gives its future."""
        ...

    async def sample(self, sampler: Any, prompt: Any, num_samples: int, params: Any) -> Any:
        """Asks a sampler; gives what has `sequences`, once they are drawn."""
        ...

    async def publish(self, client: Any) -> Finish:
        """Makes the weights of a training client ready to sample; gives a sampler of them."""
        ...

    async def save_for_download(self, client: Any, name: str) -> Any:
        """Saves the weights of a training client; gives a future of what has their `path`."""
        ...

    def translated(self, what: str) -> AbstractContextManager[None]:
        """Turns errors of the SDK into ours.

        Args:
            what: the request, for the message.
        """
        ...

    def loss_of(self, output: Any) -> float | None:
        """Sum of the loss over the rows of a pass; None = it says none that compares."""
        ...

    def metrics_of_step(self, output: Any) -> Metrics:
        """What an optimizer step tells, by our names."""
        ...

    def stops(self, params: SamplingParams) -> Any:
        """What ends a completion, as the service takes it."""
        ...

    def save_settings(self) -> Mapping[str, Any]:
        """Of saves of checkpoints, such as how long they are kept."""
        ...


class ClientLink:
    """One training client; see `tunebook.backends.remote.link.Link`."""

    max_rows = None

    def __init__(self, client: Any, dialect: Dialect, *, session_id: str) -> None:
        """
        Args:
            client: the training client.
            dialect: of its service.
            session_id: what the service calls what it trains.
        """
        self.client = client
        self.seen = "nothing"
        self._dialect = dialect
        self._session_id = session_id

    @property
    def session_id(self) -> str:
        return self._session_id

    async def forward(self, data: Sequence[Datum]) -> Finish:
        rows = [self._datum(datum, {"weights": marks_of(datum)}) for datum in data]
        finish_pass = await self._submit("forward", rows, CROSS_ENTROPY, self._dialect.sum_config)

        async def finish() -> list[FloatArray]:
            return _logprobs_in(await finish_pass())

        return finish

    async def forward_backward(self, own: BuiltIn, data: Sequence[Datum]) -> Finish:
        config = own.parameters or None
        if own.name == CROSS_ENTROPY:
            config = self._dialect.sum_config
        rows = [
            self._datum(datum, columns) for datum, columns in zip(data, own.columns, strict=True)
        ]
        finish_pass = await self._submit("forward_backward", rows, own.name, config)

        async def finish() -> Pass:
            output = await finish_pass()
            return Pass(_logprobs_in(output), self._dialect.loss_of(output))

        return finish

    async def backward(self, data: Sequence[Datum], gradients: Sequence[FloatArray]) -> Finish:
        """Cross-entropy of weights -g has the gradient g."""
        rows = [
            self._datum(datum, {"weights": -each})
            for datum, each in zip(data, gradients, strict=True)
        ]
        finish_pass = await self._submit(
            "forward_backward", rows, CROSS_ENTROPY, self._dialect.sum_config
        )

        async def finish() -> None:
            await finish_pass()

        return finish

    async def optim_step(self, params: OptimizerParams) -> Finish:
        if not isinstance(params, AdamParams):
            raise BackendError("the service steps with AdamW only; use optimizer.kind=adamw")
        adam = self._dialect.types.AdamParams(
            learning_rate=params.learning_rate,
            beta1=params.beta1,
            beta2=params.beta2,
            eps=params.eps,
            weight_decay=params.weight_decay,
            grad_clip_norm=params.max_grad_norm,
        )
        finish_step = await self._submit("optim_step", adam)

        async def finish() -> Metrics:
            return self._dialect.metrics_of_step(await finish_step())

        return finish

    async def save(self, name: str) -> Finish:
        finish_save = await self._submit("save_state", name, **self._dialect.save_settings())

        async def finish() -> str:
            return (await finish_save()).path

        return finish

    async def save_for_download(self, name: str) -> Finish:
        what = f"export of session {self.session_id}"
        with self._dialect.translated(what):
            future = await self._dialect.save_for_download(self.client, name)

        async def wait() -> str:
            return (await future).path

        return self._waiting("export", wait)

    async def publish(self) -> Finish:
        with self._dialect.translated(f"publish of session {self.session_id}"):
            finish_publish = await self._dialect.publish(self.client)
        return self._waiting("publish", finish_publish)

    async def sample(
        self,
        published: Any,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        num_samples: int,
    ) -> Finish:
        """One request a prompt, all at once, so each has a seed of its own."""
        asked = [
            asyncio.create_task(
                self._sample(published, prompt, params, num_samples, seed_of(params.seed, number))
            )
            for number, prompt in enumerate(prompts)
        ]

        async def finish() -> list[list[Sampled]]:
            try:
                return list(await asyncio.gather(*asked))
            finally:
                for each in asked:
                    each.cancel()

        return finish

    async def _sample(
        self,
        sampler: Any,
        prompt: Sequence[int],
        params: SamplingParams,
        num_samples: int,
        seed: int | None,
    ) -> list[Sampled]:
        types = self._dialect.types
        given = types.SamplingParams(
            max_tokens=params.max_tokens,
            seed=seed,
            stop=self._dialect.stops(params),
            temperature=params.temperature,
            top_k=params.top_k or -1,
            top_p=params.top_p,
        )
        with self._dialect.translated(f"sample of session {self.session_id}"):
            found = await self._dialect.sample(
                sampler, types.ModelInput.from_ints(list(prompt)), num_samples, given
            )
        return [_sampled(sequence) for sequence in found.sequences]

    async def _submit(self, call: str, *arguments: Any, **settings: Any) -> Finish:
        with self._dialect.translated(f"{call} of session {self.session_id}"):
            future = await self._dialect.submit(self.client, call, *arguments, **settings)

        async def wait() -> Any:
            return await future

        return self._waiting(call, wait)

    def _waiting(self, call: str, wait: Callable[[], Awaitable[Any]]) -> Finish:
        async def finish() -> Any:
            self.seen = f"{call} is under way"
            with self._dialect.translated(f"{call} of session {self.session_id}"):
                found = await wait()
            self.seen = f"{call} is done"
            return found

        return finish

    def _datum(self, datum: Datum, columns: Mapping[str, FloatArray]) -> Any:
        """A row as the service takes it: what is predicted from, the targets, and columns."""
        types = self._dialect.types
        length = datum.num_scored
        inputs = {
            "target_tokens": types.TensorData(
                data=datum.tokens[1:].tolist(), dtype="int64", shape=[length]
            )
        }
        for name, column in columns.items():
            inputs[name] = types.TensorData(data=column.tolist(), dtype="float32", shape=[length])
        return types.Datum(
            model_input=types.ModelInput.from_ints(datum.tokens[:-1].tolist()),
            loss_fn_inputs=inputs,
        )


def seed_of(seed: int | None, prompt: int) -> int | None:
    """The seed of one prompt of a call, below 2^53: services take seeds as JSON numbers.

    Args:
        seed: of the call; None = none.
        prompt: its number.
    """
    if seed is None:
        return None
    sequence = np.random.SeedSequence([seed, prompt])
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(11))


def _logprobs_in(output: Any) -> list[FloatArray]:
    """The log-probs that a pass returned, `[T]` a row."""
    return [np.asarray(each["logprobs"].data, np.float32) for each in output.loss_fn_outputs]


def _sampled(sequence: Any) -> Sampled:
    if sequence.stop_reason not in STOP_REASONS:
        raise broken_answer(f"sample: a completion ended by {sequence.stop_reason!r}")
    return Sampled(
        tokens=np.asarray(sequence.tokens, np.int32),
        logprobs=np.asarray(sequence.logprobs or [], np.float32),
        stop_reason=STOP_REASONS[sequence.stop_reason],
    )
