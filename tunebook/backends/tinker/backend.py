"""Training and sampling on Tinker."""

from __future__ import annotations

from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from tunebook.backends.base import Capabilities
from tunebook.backends.remote.backend import Base, RemoteBackend
from tunebook.backends.remote.client import ClientLink
from tunebook.backends.remote.export import TokenizerSource, note_other_alpha
from tunebook.backends.remote.lease import Leases
from tunebook.backends.remote.loop import LoopThread
from tunebook.backends.remote.queue import RemoteQueue
from tunebook.backends.remote.session import RemoteSession
from tunebook.backends.remote.settings import (
    AUTO,
    LOSSES,
    check_above_0,
    check_at_least_0,
    check_choice,
    check_cost,
)
from tunebook.backends.tinker.adapters import lora_options
from tunebook.backends.tinker.dialect import KINDS, SAME_MEANING, SNAPSHOT
from tunebook.backends.tinker.service import PLACE_EXAMPLE, TinkerService
from tunebook.errors import ConfigError
from tunebook.notices import Notes
from tunebook.resources import ServiceError
from tunebook.runs.attempts import shielded
from tunebook.types import CheckpointRef, Estimate, LoraConfig, Workload

MAX_SESSIONS = 16
"""Adapters that this backend trains at once; the service names no limit."""
SHORTEST_TTL_S = 3600
"""Of a checkpoint, by the service."""


class TinkerBackend(RemoteBackend):
    """The adapters of one session of the service; see `tunebook.backends.base.Backend`.

    The session begins when the first adapter is opened, lives by a heartbeat, and is finished when
    the backend is closed. What it saved stays.
    """

    def __init__(
        self,
        *,
        service_model: str,
        model: str,
        base_url: str | None = None,
        losses: str = AUTO,
        sampler: str = SNAPSHOT,
        lora_alpha: float = 32.0,
        checkpoint_ttl: int | None = None,
        stall_timeout: float | None = None,
        recover: int = 0,
        price_per_million_tokens: float | None = None,
        max_cost: float | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        allow_pickle: bool = False,
        tokenizer: str | None = None,
        chat_template: str | None = None,
    ) -> None:
        """Checks the settings; nothing is asked of the service.

        Args:
            service_model: as the service calls the model.
            model: as in `tunebook.models.resolve_model`; its tokenizer goes with what is exported.
            base_url: None = `TINKER_BASE_URL`, else the hosted service.
            losses: auto = those of the service where they mean the same, two_passes = none of them.
            sampler: snapshot = every publish has a copy of the weights, live = they are changed
                under the requests that are under way.
            lora_alpha: of the adapters of the service, whatever a config asks for.
            checkpoint_ttl: seconds that checkpoints are kept beyond the last use of them by a run;
                None = for good.
            stall_timeout: seconds without any progress after which waiting ends; None = never.
            recover: times that a lost training client is replaced from its last checkpoint.
            price_per_million_tokens: of training, US dollars; None = not known.
            max_cost: refuses a run whose training is expected to cost more, US dollars; None = no
                limit.
            revision: of the tokenizer on its hub.
            trust_remote_code: allow its repository's own Python code.
            allow_pickle: not used; no weights are loaded here.
            tokenizer: of another model; None = the model's own.
            chat_template: as in `tunebook.models.load_tokenizer`.

        Raises:
            ConfigError: a value that is not allowed, or the package or the key is missing.
        """
        del allow_pickle
        super().__init__(place_example=PLACE_EXAMPLE)
        check_choice("losses", losses, LOSSES)
        check_choice("sampler", sampler, tuple(KINDS))
        if checkpoint_ttl is not None and checkpoint_ttl < SHORTEST_TTL_S:
            raise ConfigError(
                f"backend.checkpoint_ttl={checkpoint_ttl}: must be at least {SHORTEST_TTL_S} "
                "seconds, or null to keep checkpoints for good"
            )
        check_at_least_0(recover=recover)
        check_above_0(
            lora_alpha=lora_alpha,
            stall_timeout=stall_timeout,
            price_per_million_tokens=price_per_million_tokens,
            max_cost=max_cost,
        )
        if max_cost is not None and price_per_million_tokens is None:
            raise ConfigError(
                "backend.max_cost needs backend.price_per_million_tokens, which the service does "
                "not tell; take it from its price list"
            )
        self._service = TinkerService(base_url, service_model)
        self._service_model = service_model
        self._losses = SAME_MEANING if losses == AUTO else {}
        self._sampler = sampler
        self._lora_alpha = lora_alpha
        self._checkpoint_ttl = checkpoint_ttl
        self._stall_timeout = stall_timeout
        self._recover = recover
        self._price = price_per_million_tokens
        self._max_cost = max_cost
        self._tokenizer = TokenizerSource(
            tokenizer or model, revision, chat_template, trust_remote_code
        )
        self._notes = Notes()
        self._stack = ExitStack()
        self._loop: LoopThread | None = None
        self._client: Any = None
        self._ending = "success"

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._ending = "errored" if issubclass(kind, Exception) else "interrupted"
        super().__exit__(kind, error, traceback)

    @property
    def capabilities(self) -> Capabilities:
        """What the service's catalogue says of the model."""
        offer = self._service.offer()
        return Capabilities(
            max_sessions=MAX_SESSIONS,
            has_generator=offer.generator,
            full_weight=False,
            optimizers=frozenset({"adamw"}),
            losses=None,
            max_seq_len=offer.max_seq_len,
            temperature=False,
            bills=True,
            files=False,
            lora_alpha=self._lora_alpha,
            lora_dropout=False,
        )

    def check(self, lora: LoraConfig | None, start: CheckpointRef | None) -> int | None:
        self._service.offer()
        lora = self._adapter(lora)
        if start is not None:
            self._service.check_start(start, lora)
        return None

    def estimate(self, workload: Workload) -> Estimate:
        """Tokens of the planned run, and their price where the config has it.

        Raises:
            ConfigError: it is above `max_cost`.
        """
        price, basis = None, "the service bills tokens; backend.price_per_million_tokens is null"
        if self._price is not None:
            price = workload.train_tokens * self._price / 1e6
            basis = (
                f"{self._price:g} USD a million tokens (backend.price_per_million_tokens); "
                "evaluation and sampling are not counted, nor a second pass over rows whose loss "
                "is computed here"
            )
            check_cost(price, self._max_cost, "USD", basis)
        return Estimate(
            seconds=None,
            train_tokens=workload.train_tokens,
            peak_memory_bytes=None,
            price=price,
            basis=basis,
        )

    def _adapter(self, lora: LoraConfig | None) -> LoraConfig:
        if lora is None:
            raise ConfigError("lora=null: the service trains adapters only, not full weights")
        lora_options(lora)
        return lora

    def _close_shared(self) -> None:
        """Finishes the session on the service."""
        try:
            self._stack.close()
        finally:
            self._notes.say()

    def _open(
        self,
        name: str,
        lora: LoraConfig | None,
        directory: Path,
        base: Base,
    ) -> RemoteSession:
        lora = self._adapter(lora)
        loop = self._connect(name)
        service = self._service
        dialect = service.dialect(sampler=self._sampler, checkpoint_ttl=self._checkpoint_ttl)
        max_seq_len = service.offer().max_seq_len

        async def open_link(place: str | None, with_optimizer: bool) -> ClientLink:
            with dialect.translated(f"training client for session {name!r}"):
                client = await service.training_client(self._client, lora, place, with_optimizer)
            return ClientLink(client, dialect, session_id=service.id_of(client))

        async def leave() -> None:
            with dialect.translated(f"end of session {name!r}"):
                await service.leave(queue.link.client)

        leases = Leases(self._checkpoint_ttl, self._renew)
        if base[0] is not None:
            leases.renew(base[0])
        queue: RemoteQueue[ClientLink] = RemoteQueue(
            name,
            loop.run(open_link(*base)),
            loop,
            self._notes,
            reopen=open_link,
            base=base,
            recover=self._recover,
            stall_timeout=self._stall_timeout,
        )
        keeping = loop.start(leases.keep(loop))
        return RemoteSession(
            name,
            lora,
            queue,
            at=base[0],
            losses=self._losses,
            stop_ids=True,
            max_seq_len=max_seq_len,
            download=self._download,
            open_at=self._opener_at(name, lora, directory),
            delete=self._delete,
            leases=leases,
            on_close=lambda: self._end(name, leave(), keeping),
        )

    def _connect(self, name: str) -> LoopThread:
        if self._loop is None:
            client = self._service.connect(name)
            loop = LoopThread()
            # Ended in the other order: what runs on the loop waits for the client.
            self._stack.callback(self._finish, client)
            self._stack.callback(loop.close)
            self._loop, self._client = loop, client
        return self._loop

    def _finish(self, client: Any) -> None:
        """Tells the service that the session is over; it finds out by itself where that fails."""
        try:
            self._service.finish(client, self._ending)
        except (ServiceError, TimeoutError) as error:
            self._notes.add("session_not_finished", f"the session is left to expire: {error}")

    def _end(self, name: str, leaving: Coroutine[Any, Any, None], keeping: Future[None]) -> None:
        self._sessions.pop(name, None)
        keeping.cancel()
        assert self._loop is not None
        with shielded():
            self._loop.run(leaving)
        self._notes.say()

    def _renew(self, place: str) -> None:
        """Renews a checkpoint; that it fails is no reason to end a run."""
        assert self._checkpoint_ttl is not None
        try:
            self._service.renew(place, self._checkpoint_ttl)
        except ServiceError as error:
            self._notes.add("not_renewed", f"checkpoint {place} may expire: {error}")

    def _delete(self, place: str) -> None:
        """Deletes a checkpoint; that it fails is no reason to end a run."""
        try:
            self._service.delete(place)
        except ServiceError as error:
            self._notes.add("not_deleted", f"checkpoint {place} is left: {error}")

    def _download(self, place: str, directory: Path) -> Path:
        """The folder, with the adapter that was saved for it and the tokenizer."""
        with self._tokenizer.completing(directory) as temporary:
            alpha = self._service.download(place, temporary)
        note_other_alpha(self._notes, directory, alpha, expected=self._lora_alpha)
        return directory
