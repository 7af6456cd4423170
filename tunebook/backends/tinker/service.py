"""The service as a config names it: its address, the key, the SDK, and what it has."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunebook.backends.remote.address import checked_address, key_for
from tunebook.backends.remote.client import Dialect
from tunebook.backends.remote.places import check_on_service
from tunebook.backends.tinker.adapters import lora_options
from tunebook.backends.tinker.dialect import TinkerDialect
from tunebook.backends.tinker.downloads import download_adapter
from tunebook.backends.tinker.failures import translated
from tunebook.backends.tinker.package import sdk
from tunebook.errors import CheckpointError, ConfigError
from tunebook.resources import ServiceError
from tunebook.runs.redaction import redact
from tunebook.types import CheckpointRef, LoraConfig

KEY_VARIABLE = "TINKER_API_KEY"
URL_VARIABLE = "TINKER_BASE_URL"
HOSTED_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"
PLACE_EXAMPLE = "tinker://<run>/weights/<name>"
"""What a training checkpoint is called there."""
FINISH_S = 60.0
"""Seconds that the end of a session may take to be told."""
NO_KEY = "tml-none"
"""What a server on this machine is sent where there is no key; the SDK wants this beginning."""
LOOK_S = 10.0
"""Seconds that the service has to answer at all, before its SDK tries again for minutes."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What can be done with a model."""

    max_seq_len: int | None
    """Tokens; None = the service does not say."""
    generator: bool


class TinkerService:
    """What is asked of the service before anything is trained; makes nothing."""

    def __init__(self, base_url: str | None, model: str) -> None:
        """
        Args:
            base_url: None = `TINKER_BASE_URL`, else the hosted service.
            model: as the service calls it.

        Raises:
            ConfigError: the package or the key is missing, or the address is none.
        """
        self.base_url = service_url(base_url)
        self.model = model
        api_key_for(self.base_url)
        sdk()
        self._offer: Offer | None = None

    def offer(self) -> Offer:
        """What the service offers for the model; asked once.

        Raises:
            ConfigError: it does not train it.
        """
        if self._offer is None:
            found = self.asked(
                "its models", lambda rest: rest.get_server_capabilities().result()
            ).supported_models
            self._offer = _read_offer(self.model, found)
        return self._offer

    def check_start(self, start: CheckpointRef, lora: LoraConfig) -> None:
        """Returns if a session can begin from a checkpoint.

        Raises:
            CheckpointError: it is not there, or does not fit.
        """
        place = start.location
        check_on_service(start, PLACE_EXAMPLE)
        try:
            kind = sdk().types.ParsedCheckpointTinkerPath.from_tinker_path(place).checkpoint_type
        except ValueError:
            kind = None
        if kind != "training":
            raise CheckpointError(
                f"{place}: a session begins from a training checkpoint only, "
                "tinker://<run>/weights/<name>"
            )
        try:
            found = self.asked(
                place, lambda rest: rest.get_weights_info_by_tinker_path(place).result()
            )
        except ServiceError as error:
            if not isinstance(error.__cause__, sdk().NotFoundError):
                raise
            raise CheckpointError(
                f"{place}: the service has no such checkpoint, it has expired, or it is not for "
                "this key"
            ) from error
        if found.base_model != self.model:
            raise CheckpointError(f"{place}: it is of {found.base_model}, not of {self.model}")
        if found.lora_rank != lora.rank:
            raise CheckpointError(
                f"{place}: it has an adapter of rank {found.lora_rank}, the config asks for "
                f"{lora.rank}"
            )

    def delete(self, place: str) -> None:
        """Deletes a checkpoint; one that is gone is no error."""
        try:
            self.asked(
                f"deletion of {place}",
                lambda rest: rest.delete_checkpoint_from_tinker_path(place).result(),
            )
        except ServiceError as error:
            if not isinstance(error.__cause__, sdk().NotFoundError):
                raise

    def renew(self, place: str, ttl: int) -> None:
        """Has a checkpoint kept so many seconds from now."""
        self.asked(
            f"renewal of {place}",
            lambda rest: rest.set_checkpoint_ttl_from_tinker_path(place, ttl).result(),
        )

    def asked(self, what: str, question: Callable[[Any], Any]) -> Any:
        """The answer to a question that may be asked again.

        Args:
            what: is asked for, for messages.
            question: is given the SDK's client for such questions.
        """
        self._look()
        with translated(f"{self.base_url}: {what}"):
            return question(
                sdk().RestClient(base_url=self.base_url, api_key=api_key_for(self.base_url))
            )

    def connect(self, name: str) -> Any:
        """The SDK's client that makes training clients.

        Args:
            name: for people, in the service's console.
        """
        self._look()
        with translated(f"{self.base_url}: session"):
            client = sdk().ServiceClient(
                base_url=self.base_url, api_key=api_key_for(self.base_url), display_name=name
            )
            client.holder  # noqa: B018  (opens the session, which waits)
            return client

    def dialect(self, *, sampler: str, checkpoint_ttl: int | None) -> Dialect:
        """How its clients are talked to; see `TinkerDialect`."""
        return TinkerDialect(sampler=sampler, checkpoint_ttl=checkpoint_ttl)

    async def training_client(
        self, client: Any, lora: LoraConfig, place: str | None, with_optimizer: bool
    ) -> Any:
        """A training client: fresh, or from a checkpoint.

        Args:
            client: from `connect`.
            lora: the adapter.
            place: of the checkpoint; None = fresh.
            with_optimizer: restore the optimizer as well.
        """
        if place is None:
            return await client.create_lora_training_client(self.model, **lora_options(lora))
        if with_optimizer:
            return await client.create_training_client_from_state_with_optimizer(place)
        return await client.create_training_client_from_state(place)

    def id_of(self, training_client: Any) -> str:
        """What the service calls what a training client trains."""
        return training_client.model_id

    async def leave(self, training_client: Any) -> None:
        """Does nothing: a training client lives as long as the session that it is of."""
        del training_client

    def finish(self, client: Any, how: str) -> None:
        """Tells the service that the session of a client is over.

        Args:
            client: from `connect`.
            how: success, errored or interrupted.
        """
        with translated(f"{self.base_url}: end of the session"):
            client.close(how).result(FINISH_S)

    def download(self, place: str, directory: Path) -> float | None:
        """The alpha of an adapter that was saved for download, once it is in the folder."""
        found = self.asked(
            f"download of {place}", lambda rest: rest.get_external_weights_urls(place).result()
        )
        return download_adapter(found.urls, directory)

    def _look(self) -> None:
        """Returns if something answers: the SDK would try for minutes.

        Raises:
            ServiceError: nothing does.
        """
        import httpx

        try:
            httpx.get(f"{self.base_url}/api/v1/healthz", timeout=LOOK_S)
        except httpx.TransportError as error:
            raise ServiceError(
                f"{self.base_url} cannot be reached: {redact(str(error), os.environ)}"
            ) from error


def service_url(base_url: str | None) -> str:
    """The address of the service; see `tunebook.backends.remote.address.checked_address`."""
    return checked_address(base_url, variable=URL_VARIABLE, hosted=HOSTED_URL)


def api_key_for(base_url: str) -> str:
    """The API key; see `tunebook.backends.remote.address.key_for`."""
    return key_for(base_url, variable=KEY_VARIABLE, no_key=NO_KEY)


def _read_offer(model: str, models: list[Any]) -> Offer:
    found = next((each for each in models if each.model_name == model), None)
    if found is None or found.trainable is False:
        names = [each.model_name for each in models if each.trainable is not False]
        close = difflib.get_close_matches(model, names, n=3, cutoff=0.5) or names[:10]
        raise ConfigError(
            f"backend.model={model}: the service does not train it. It has "
            f"{', '.join(close) or 'none'}{' and others' if len(names) > len(close) else ''}; set "
            "backend.model to the service's name of model.name"
        )
    return Offer(max_seq_len=found.max_context_length, generator=found.sampleable is not False)
