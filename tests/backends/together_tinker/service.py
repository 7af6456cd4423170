"""The adapter of `backend=tinker` over Together's client with Tinker's interface.

Its types are the genuine ones of another release of `tinker`, and its wire is one that
`tunebook serve` speaks. It is for tests only: `backend=together` does more on the same service.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tunebook.backends.tinker.adapters import lora_options
from tunebook.backends.tinker.service import Offer
from tunebook.backends.together.catalogue import Catalogue
from tunebook.backends.together.failures import translated
from tunebook.backends.together.service import TogetherService


class TogetherTinkerDialect:
    """See `tunebook.backends.remote.client.Dialect`."""

    sum_config = None

    def __init__(self) -> None:
        from tinker import types

        self.types = types

    async def submit(self, client: Any, call: str, *arguments: Any, **settings: Any) -> Any:
        if call == "forward_backward":
            settings["return_loss_fn_outputs"] = True
        return await getattr(client, f"{call}_async")(*arguments, **settings)

    async def sample(self, sampler: Any, prompt: Any, num_samples: int, params: Any) -> Any:
        return await sampler.sample_async(prompt, num_samples, params)

    async def publish(self, client: Any) -> Any:
        sampler = await client.save_weights_and_get_sampling_client_async()

        async def finish() -> Any:
            return sampler

        return finish

    async def save_for_download(self, client: Any, name: str) -> Any:
        return await client.save_weights_for_sampler_async(name)

    def translated(self, what: str) -> Any:
        return translated(what)

    def loss_of(self, output: Any) -> float | None:
        return output.metrics.get("loss:sum")

    def metrics_of_step(self, output: Any) -> dict[str, float]:
        return {}

    def stops(self, params: Any) -> Any:
        return list(params.stop) or None

    def save_settings(self) -> dict[str, Any]:
        return {}


class TogetherTinkerService:
    """Takes the place of `tunebook.backends.tinker.service.TinkerService`."""

    resource_id: str
    """That all training clients share; set by the test."""

    def __init__(self, base_url: str, model: str) -> None:
        self.base_url = base_url
        self.model = model
        self._catalogue = Catalogue(
            TogetherService(base_url),
            model,
            gpu_type=None,
            borrowed_id=self.resource_id,
            generator_replicas=1,
        )

    def offer(self) -> Offer:
        offer = self._catalogue.offer()
        return Offer(offer.max_seq_len, offer.generator)

    def check_start(self, start: Any, lora: Any) -> None:
        self._catalogue.check_start(start, lora)

    def connect(self, name: str) -> Any:
        from together.post_training import tinker

        return tinker.ServiceClient(
            base_url=self.base_url, api_key="none", model_resources_id=self.resource_id
        )

    def dialect(self, *, sampler: str, checkpoint_ttl: int | None) -> Any:
        return TogetherTinkerDialect()

    async def training_client(
        self, client: Any, lora: Any, place: str | None, with_optimizer: bool
    ) -> Any:
        if place is None:
            return await client.create_lora_training_client_async(self.model, **lora_options(lora))
        resume = client.create_training_client_from_state
        if with_optimizer:
            resume = client.create_training_client_from_state_with_optimizer
        return await asyncio.to_thread(resume, place)

    def id_of(self, training_client: Any) -> str:
        return training_client._session.session_id

    async def leave(self, training_client: Any) -> None:
        await training_client.close_async()

    def finish(self, client: Any, how: str) -> None:
        """Its sessions are stopped already, and the resource is the test's."""

    def delete(self, place: str) -> None:
        """The service has no call that does."""

    def download(self, place: str, directory: Path) -> float | None:
        import json

        from together.post_training import download_checkpoint

        with self._catalogue.asking() as client:
            download_checkpoint(
                client, place, variant="CHECKPOINT_VARIANT_ADAPTER", output_dir=directory
            )
        return json.loads((directory / "adapter_config.json").read_text())["lora_alpha"]
