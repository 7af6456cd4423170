"""Training and sampling on Together AI's post-training service, or a server that speaks as it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from tunebook.backends.base import Capabilities
from tunebook.backends.remote.backend import Base, RemoteBackend
from tunebook.backends.remote.export import TokenizerSource
from tunebook.backends.remote.lease import Leases
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
from tunebook.backends.together.adapters import lora_config
from tunebook.backends.together.catalogue import PLACE_EXAMPLE, Catalogue, compute_config
from tunebook.backends.together.connection import Connection
from tunebook.backends.together.link import TogetherLink
from tunebook.backends.together.losses import SAME_MEANING
from tunebook.backends.together.resource import ResourceSettings
from tunebook.backends.together.service import TogetherService
from tunebook.errors import ConfigError
from tunebook.runs.attempts import shielded
from tunebook.types import CheckpointRef, Estimate, LoraConfig, Workload

MAX_SESSIONS = 5
"""Adapters that a resource trains at once; of full weights it is one."""
OPTIMIZERS = {"adamw": {"adam": {}}, "muon": {"muon": {}}}
"""Our name -> what a resource is asked for."""


class TogetherBackend(RemoteBackend):
    """One model resource of the service; see `tunebook.backends.base.Backend`.

    It is made when the first session is opened. Closing the backend stops it, or leaves it where
    `model_resources_id` names one of yours.
    """

    def __init__(
        self,
        *,
        service_model: str,
        model: str,
        model_resources_id: str | None = None,
        base_url: str | None = None,
        generator_replicas: int = 0,
        gpu_type: str | None = None,
        optimizer: str = "adamw",
        losses: str = AUTO,
        inactive_timeout: int = 3600,
        ready_timeout: float | None = None,
        keep_alive: float = 14_400.0,
        stall_timeout: float | None = None,
        retry_budget: float = 180.0,
        recover: int = 0,
        max_cost: float | None = None,
        tokens_per_second: float = 5000.0,
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
            model_resources_id: a resource of yours to train on, which is left running; None = one
                is made, and stopped at the end.
            base_url: without `/v1`; None = `TOGETHER_BASE_URL`, else the hosted service.
            generator_replicas: of a resource that is made; 0 = it cannot sample.
            gpu_type: of a resource that is made; None = the model's own.
            optimizer: of a resource that is made: adamw, or muon, for full weights.
            losses: auto = those of the service where they mean the same, two_passes = none of them.
            inactive_timeout: seconds without an operation after which the service stops a resource
                that is made.
            ready_timeout: seconds that it may take to be ready; None = without end.
            keep_alive: seconds without an operation during which it is kept from stopping, for long
                rollouts; 0 = never.
            stall_timeout: seconds without any progress after which waiting ends; None = never.
            retry_budget: seconds, about, that a request is tried again where the service is busy,
                failing or not there.
            recover: times that a lost session is replaced from its last checkpoint.
            max_cost: refuses a run that is expected to cost more, US dollars; None = no limit.
            tokens_per_second: that training is assumed to take, for the cost of a run.
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
        check_choice("optimizer", optimizer, tuple(OPTIMIZERS))
        if not 300 <= inactive_timeout <= 86_400:
            raise ConfigError(
                f"backend.inactive_timeout={inactive_timeout}: must be from 300 to 86400 seconds"
            )
        check_at_least_0(
            generator_replicas=generator_replicas,
            keep_alive=keep_alive,
            retry_budget=retry_budget,
            recover=recover,
        )
        check_above_0(
            ready_timeout=ready_timeout,
            stall_timeout=stall_timeout,
            max_cost=max_cost,
            tokens_per_second=tokens_per_second,
        )
        self._catalogue = Catalogue(
            TogetherService(base_url),
            service_model,
            gpu_type=gpu_type,
            borrowed_id=model_resources_id,
            generator_replicas=generator_replicas,
        )
        self._service_model = service_model
        self._borrowed_id = model_resources_id
        self._generator_replicas = generator_replicas
        self._gpu_type = gpu_type
        self._optimizer = optimizer
        self._own_losses = losses == AUTO
        self._inactive_timeout = inactive_timeout
        self._ready_timeout = ready_timeout
        self._keep_alive = keep_alive
        self._stall_timeout = stall_timeout
        self._retry_budget = retry_budget
        self._recover = recover
        self._max_cost = max_cost
        self._tokens_per_second = tokens_per_second
        self._tokenizer = TokenizerSource(
            tokenizer or model, revision, chat_template, trust_remote_code
        )
        self._connection: Connection | None = None
        self._full_weights_used = False

    @property
    def capabilities(self) -> Capabilities:
        """What the service's catalogue says, and of a borrowed resource what it is."""
        offer = self._catalogue.offer()
        replicas = self._generator_replicas
        lora, full = offer.lora is not None, offer.full is not None
        if self._borrowed_id is not None:
            borrowed = self._catalogue.borrowed()
            replicas = borrowed.compute_config.num_generator_replicas
            lora, full = borrowed.lora_enabled, not borrowed.lora_enabled
        return Capabilities(
            max_sessions=MAX_SESSIONS if lora else 1,
            has_generator=replicas > 0,
            full_weight=full,
            optimizers=frozenset(OPTIMIZERS if full else {"adamw"}),
            losses=None,
            max_seq_len=offer.max_seq_len,
            temperature=False,
            stop_ids=False,
            bills=True,
            files=False,
        )

    def check(self, lora: LoraConfig | None, start: CheckpointRef | None) -> int | None:
        offer = self._catalogue.offer()
        mode = offer.full if lora is None else offer.lora
        if mode is None:
            what = "full weights" if lora is None else "adapters"
            raise ConfigError(f"{self._service_model}: the service does not train its {what}")
        if self._borrowed_id is not None and self._catalogue.borrowed().lora_enabled != (
            lora is not None
        ):
            raise ConfigError(
                f"backend.model_resources_id={self._borrowed_id}: it trains "
                f"{'full weights' if lora else 'adapters'} only"
            )
        if self._borrowed_id is None and self._generator_replicas and not offer.generator:
            raise ConfigError(
                f"backend.generator_replicas={self._generator_replicas}: the service does not "
                f"sample from {self._service_model}"
            )
        if lora is not None:
            lora_config(lora)
            if mode.max_rank is not None and lora.rank > mode.max_rank:
                raise ConfigError(f"lora.rank={lora.rank}: the service takes {mode.max_rank}")
            if self._optimizer == "muon":
                raise ConfigError(
                    "optimizer.kind=muon needs full weights (lora=null) on this service; use adamw"
                )
        if start is not None:
            self._catalogue.check_start(start, lora)
        return None

    def estimate(self, workload: Workload) -> Estimate:
        """The price of the planned run, by the price of an hour and an assumed speed.

        Raises:
            ConfigError: it is above `max_cost`.
        """
        forward = workload.num_evaluations * sum(workload.eval_lengths)
        forward += sum(workload.scored_lengths)
        seconds = (workload.train_tokens + forward / 3) / self._tokens_per_second
        price, currency = self._catalogue.price_per_hour(workload.lora is not None)
        cost = price * seconds / 3600
        basis = (
            f"{price:.2f} {currency} an hour while the resource is ready; assumed are "
            f"{self._tokens_per_second:g} tokens/s (backend.tokens_per_second) and no waits, and "
            "sampling is not counted"
        )
        check_cost(cost, self._max_cost, currency, basis)
        return Estimate(
            seconds=seconds,
            train_tokens=workload.train_tokens,
            peak_memory_bytes=None,
            price=cost if currency == "USD" else None,
            basis=basis,
        )

    def _adapter(self, lora: LoraConfig | None) -> LoraConfig | None:
        if lora is not None:
            lora_config(lora)
        return lora

    def _close_shared(self) -> None:
        """Stops a resource that was made; a borrowed one keeps running."""
        if self._connection is not None:
            self._connection.close()

    def _open(
        self,
        name: str,
        lora: LoraConfig | None,
        directory: Path,
        base: Base,
    ) -> RemoteSession:
        """A session that begins from a checkpoint, with or without its optimizer."""
        offer = self._catalogue.offer()
        mode = offer.full if lora is None else offer.lora
        connection = self._connect(lora is not None)
        resource = connection.resource
        resource.require(lora=lora is not None, run=str(directory.parent))
        if lora is None and base[0] is not None and self._full_weights_used:
            # The weights of such a resource go on from one session to the next.
            connection.loop.run(resource.renew())
        self._full_weights_used = lora is None

        async def open_link(checkpoint_id: str | None, with_optimizer: bool) -> TogetherLink:
            return await connection.open_link(name, lora, checkpoint_id, with_optimizer)

        async def reopen(checkpoint_id: str | None, with_optimizer: bool) -> TogetherLink:
            lost = queue.link
            if lora is None:
                await resource.renew()
            else:
                await resource.replace(lost.resource_id)
            if resource.id == lost.resource_id:
                await connection.stop_session(lost.session_id)  # it may hold its place still
            return await open_link(checkpoint_id, with_optimizer)

        link = connection.loop.run(open_link(*base))
        with ExitStack() as stack:
            stack.callback(lambda: connection.loop.run(connection.stop_session(link.session_id)))
            queue: RemoteQueue[TogetherLink] = RemoteQueue(
                name,
                link,
                connection.loop,
                connection.notes,
                reopen=reopen,
                base=base,
                recover=self._recover,
                stall_timeout=self._stall_timeout,
            )
            session = RemoteSession(
                name,
                lora,
                queue,
                at=base[0],
                losses=SAME_MEANING if self._own_losses else {},
                stop_ids=False,
                max_seq_len=mode.max_seq_len if mode else None,
                download=self._download,
                open_at=self._opener_at(name, lora, directory),
                delete=lambda place: None,  # the service has no call that does
                leases=Leases(None, lambda place: None),
                on_close=lambda: self._end(name, queue),
            )
            stack.pop_all()
        return session

    def _end(self, name: str, queue: RemoteQueue[TogetherLink]) -> None:
        """Gives the place of a session on the service to another one."""
        self._sessions.pop(name, None)
        assert self._connection is not None
        with shielded():
            self._connection.loop.run(self._connection.stop_session(queue.link.session_id))
            self._connection.say()

    def _connect(self, lora: bool) -> Connection:
        if self._connection is None:
            self._connection = self._make_connection(lora)
        return self._connection

    def _make_connection(self, lora: bool) -> Connection:
        what = {
            "base_model": self._service_model,
            "compute_config": compute_config(self._generator_replicas, self._gpu_type),
            "optimizer_config": OPTIMIZERS[self._optimizer],
            "inactive_timeout": self._inactive_timeout,
        }
        settings = ResourceSettings(
            service=self._catalogue.service,
            borrowed_id=self._borrowed_id,
            what=what,
            inactive_timeout=self._inactive_timeout,
            ready_timeout=self._ready_timeout,
            keep_alive=self._keep_alive,
            price=None if self._borrowed_id else self._catalogue.price_per_hour(lora),
        )
        return Connection(settings, retry_budget=self._retry_budget)

    def _download(self, checkpoint_id: str, directory: Path) -> Path:
        """The folder, with what an inference checkpoint is made of and the tokenizer."""
        from together.post_training import download_checkpoint

        assert self._connection is not None
        lora = self._connection.resource.lora
        with (
            self._catalogue.asking() as client,
            self._tokenizer.completing(directory) as temporary,
        ):
            download_checkpoint(
                client,
                checkpoint_id,
                variant="CHECKPOINT_VARIANT_ADAPTER" if lora else "CHECKPOINT_VARIANT_MERGED",
                output_dir=temporary,
            )
        return directory
