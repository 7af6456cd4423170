"""What Loops does otherwise than Tinker, over the SDK's own clients."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from tunebook.backends.baseten.capacity import Patience
from tunebook.backends.baseten.failures import translated
from tunebook.backends.baseten.sdk import loops_sdk, set_patience
from tunebook.backends.remote.failures import INTERNAL_ERROR, RemoteError, broken_answer
from tunebook.backends.remote.link import Finish
from tunebook.backends.remote.loop import LoopThread
from tunebook.errors import BackendError, ConfigError, NonFiniteError
from tunebook.types import Metrics, SamplingParams

PINNED, LIVE, NONE = "pinned", "live", "none"
"""What a publish samples from: its own checkpoint, the run's newest weights, nothing."""
SKIP = "skip_token_normalization"
PASSES = ("forward", "forward_backward")


@dataclass(eq=False)
class Published:
    """The weights of one publish."""

    client: Any
    """The SDK's sampling client."""
    policy_version: int | None = None
    """What the live sampler calls them; None = not said yet, or they are pinned."""


class LoopsDialect:
    """Of one run; see `tunebook.backends.remote.client.Dialect`."""

    sum_config: Mapping[str, Any] | None = {SKIP: True}
    """Otherwise the service divides by the tokens of the step, and our weights hold the divisor."""

    def __init__(
        self,
        *,
        sampler: str,
        fresh: bool,
        submit_timeout: float,
        ready_timeout: float,
        loop: LoopThread,
        say: Callable[[str], None],
    ) -> None:
        """
        Args:
            sampler: pinned, live or none.
            fresh: the run begins with the base model's weights.
            submit_timeout: seconds that the service may refuse a request that the SDK sends again.
            ready_timeout: seconds that a sampler may take to be ready.
            loop: that it is called on.
            say: told of waits.
        """
        self.types = loops_sdk()
        self._sampler = sampler
        self._is_base = fresh
        self._submit_timeout = submit_timeout
        self._ready_timeout = ready_timeout
        self._loop = loop
        self._say = say
        self._published: list[Published] = []

    async def submit(self, client: Any, call: str, *arguments: Any, **settings: Any) -> Any:
        set_patience(client, self._submit_timeout)
        future = await getattr(client, f"{call}_async")(*arguments, **settings)
        if call == "optim_step":
            self._is_base = False
        return _Unhurried(call, future)

    async def save_for_download(self, client: Any, name: str) -> Any:
        # A name that is saved again would replace what somebody may be downloading.
        return await self.submit(
            client, "save_weights_for_sampler", f"{name}-{secrets.token_hex(4)}"
        )

    async def sample(self, sampler: Published, prompt: Any, num_samples: int, params: Any) -> Any:
        found = await sampler.client.sample_async(prompt, num_samples, params)
        if self._sampler == LIVE and found.policy_version is not None:
            expected = sampler.policy_version
            sampler.policy_version = found.policy_version
            if expected not in (None, found.policy_version):
                raise broken_answer(
                    f"sample: completions of policy versions {expected} and {found.policy_version} "
                    "after one publish; somebody else publishes in this run"
                )
        return found

    async def publish(self, client: Any) -> Finish:
        """Submits, and waits: the SDK's own publish does."""
        if self._sampler == NONE:
            raise ConfigError(
                "backend.sampler=none: for samples set it to pinned, or samples.num_prompts=0 for "
                "none"
            )
        set_patience(client, self._ready_timeout)
        name = f"publish-{secrets.token_hex(8)}"
        patience = Patience(self._say)
        while True:
            try:
                made = await self._publish(client, name)
                break
            except Exception as error:
                await asyncio.sleep(patience.wait_s(error, "a sampler"))

        async def finish() -> Published:
            for older in self._published:
                await older.client.aclose()
            self._published = [Published(made)]
            return self._published[0]

        return finish

    async def _publish(self, client: Any, name: str) -> Any:
        # At step 0 the service has nothing to pin, and the SDK's own publish knows that. But it
        # takes a run that began from a checkpoint without its optimizer for one with the base's
        # weights, so that one is always pinned.
        if self._sampler == LIVE or self._is_base:
            return await client.save_weights_and_get_sampling_client_async(name)
        saved = await (await client.save_weights_for_sampler_async(name)).result_async(math.inf)
        return await self._loop.wait_for_thread(lambda: client.create_sampling_client(saved.path))

    def translated(self, what: str) -> AbstractContextManager[None]:
        return translated(what)

    def loss_of(self, output: Any) -> float | None:
        """None: it is a mean that the service does not define."""
        del output

    def metrics_of_step(self, output: Any) -> Metrics:
        metrics = {name: float(value) for name, value in (output.metrics or {}).items()}
        if not math.isfinite(metrics.get("grad_norm", 0.0)):
            raise NonFiniteError(
                f"optim_step: the gradient norm is {metrics['grad_norm']}. Look at the rows of "
                "this step, lower optimizer.learning_rate, and go on from the last checkpoint"
            )
        return metrics

    def stops(self, params: SamplingParams) -> list[str] | list[int] | None:
        texts = [stop for stop in params.stop if isinstance(stop, str)]
        ids = [stop for stop in params.stop if isinstance(stop, int)]
        if texts and ids:
            raise BackendError(
                f"rollout.stop={list(params.stop)}: the service stops at strings or at token ids, "
                "not at both; write all of them as strings, or all as ids"
            )
        return texts or ids or None

    def save_settings(self) -> Mapping[str, Any]:
        """None: the service keeps checkpoints until they are deleted."""
        return {}

    async def aclose(self) -> None:
        """Closes the samplers."""
        for each in self._published:
            await each.client.aclose()
        self._published = []


class _Unhurried:
    """A future of the SDK that waits as long as it takes, and looks at what comes back."""

    def __init__(self, call: str, future: Any) -> None:
        self._call = call
        self._future = future

    def __await__(self) -> Generator[Any, None, Any]:
        return self._value().__await__()

    async def _value(self) -> Any:
        found = await self._future.result_async(timeout=math.inf)
        if self._call in PASSES and found.metrics.get(SKIP) != 1.0:
            raise RemoteError(
                f"{self._call}: the trainer divides by tokens though it was asked for sums "
                f"({SKIP}), so its gradients are not ours",
                code="INTERNAL_ERROR",
                duty=INTERNAL_ERROR,
            )
        return found
