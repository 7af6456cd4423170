"""What Tinker does otherwise than the other services of its Python interface."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from tunebook.backends.remote.link import Finish
from tunebook.backends.remote.losses import ServiceLoss
from tunebook.backends.tinker.failures import translated
from tunebook.backends.tinker.package import sdk
from tunebook.errors import BackendError
from tunebook.types import Metrics, SamplingParams

RATIO_BOUNDS = {"clip_low": "clip_low_threshold", "clip_high": "clip_high_threshold"}
SAME_MEANING: Mapping[str, ServiceLoss] = {
    "cross_entropy": ServiceLoss("cross_entropy", {}),
    "importance_sampling": ServiceLoss("importance_sampling", {}),
    "ppo": ServiceLoss("ppo", RATIO_BOUNDS),
    # Per token ours is PPO's.
    "grpo": ServiceLoss("ppo", RATIO_BOUNDS),
    "cispo": ServiceLoss("cispo", RATIO_BOUNDS),
    "dro": ServiceLoss("dro", {"beta": "beta"}),
}
"""Ours -> the service's, all of them sums over tokens that the weights multiply."""
SNAPSHOT, LIVE = "snapshot", "live"
KINDS = {SNAPSHOT: "snapshot", LIVE: "inflight"}
"""`backend.sampler` -> the service's kind of sampling client."""
DOWNLOAD_TTL_S = 3600
"""The least that the service keeps a copy that is made for a download."""


class TinkerDialect:
    """See `tunebook.backends.remote.client.Dialect`."""

    sum_config: Mapping[str, Any] | None = None

    def __init__(self, *, sampler: str, checkpoint_ttl: int | None) -> None:
        """
        Args:
            sampler: snapshot or live.
            checkpoint_ttl: seconds that checkpoints are kept; None = for good.
        """
        self.types: Any = sdk().types
        self._kind = KINDS[sampler]
        self._checkpoint_ttl = checkpoint_ttl

    async def submit(self, client: Any, call: str, *arguments: Any, **settings: Any) -> Any:
        return getattr(client, call)(*arguments, **settings)

    async def sample(self, sampler: Any, prompt: Any, num_samples: int, params: Any) -> Any:
        return await sampler.sample(prompt, num_samples, params)

    async def publish(self, client: Any) -> Finish:
        made = client.save_weights_and_get_sampling_client(kind=self._kind)

        async def finish() -> Any:
            return await made

        return finish

    async def save_for_download(self, client: Any, name: str) -> Any:
        # A name can be saved once, and a checkpoint downloaded again.
        return client.save_weights_external(
            f"{name}-{uuid.uuid4().hex[:8]}", ttl_seconds=DOWNLOAD_TTL_S
        )

    def translated(self, what: str) -> AbstractContextManager[None]:
        return translated(what)

    def loss_of(self, output: Any) -> float | None:
        return output.metrics.get("loss:sum")

    def metrics_of_step(self, output: Any) -> Metrics:
        return {name: float(value) for name, value in (output.metrics or {}).items()}

    def stops(self, params: SamplingParams) -> Any:
        """None = the model's own end; an empty list would take that away."""
        kinds = {type(stop) for stop in params.stop}
        if len(kinds) > 1:
            raise BackendError(
                f"rollout.stop={list(params.stop)}: the service takes strings or token ids, not "
                "both at a time"
            )
        return list(params.stop) or None

    def save_settings(self) -> Mapping[str, Any]:
        return {"ttl_seconds": self._checkpoint_ttl}
