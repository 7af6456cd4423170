"""Training and sampling on Baseten Loops, each session a run of its own."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from tunebook.backends.base import Capabilities
from tunebook.backends.baseten.capacity import Patience
from tunebook.backends.baseten.catalogue import PLACE_EXAMPLE, Catalogue
from tunebook.backends.baseten.dialect import LIVE, NONE, PINNED, LoopsDialect
from tunebook.backends.baseten.failures import refused, translated
from tunebook.backends.baseten.run import owned_run
from tunebook.backends.baseten.sdk import leave_own_loop, loops_sdk
from tunebook.backends.baseten.service import BasetenService
from tunebook.backends.remote.backend import Base, RemoteBackend
from tunebook.backends.remote.client import CROSS_ENTROPY, ClientLink
from tunebook.backends.remote.export import TokenizerSource, alpha_of, note_other_alpha
from tunebook.backends.remote.lease import Leases
from tunebook.backends.remote.loop import LoopThread
from tunebook.backends.remote.losses import ServiceLoss
from tunebook.backends.remote.queue import RemoteQueue
from tunebook.backends.remote.session import RemoteSession
from tunebook.backends.remote.settings import (
    AUTO,
    LOSSES,
    check_above_0,
    check_at_least_0,
    check_choice,
)
from tunebook.errors import BackendError, ConfigError
from tunebook.notices import Notes
from tunebook.resources import Ledger
from tunebook.runs.attempts import shielded
from tunebook.types import CheckpointRef, Estimate, LoraConfig, Workload

SAME_MEANING = {CROSS_ENTROPY: ServiceLoss(CROSS_ENTROPY, {})}
"""The service's policy losses are divided by tokens that it does not define, so they are not ours;
its cross-entropy can be had as a sum."""
SAMPLERS = (PINNED, LIVE, NONE)
SCOPES = ("default", "serverless", "team", "deployment")


@dataclass(eq=False)
class OpenRun:
    """A run with what is open for it."""

    stack: ExitStack
    """Deactivates the run when it is closed; not on the loop."""
    link: ClientLink


class Held:
    """The run of one session: none while a lost one is replaced, none at all once it is closed."""

    def __init__(self) -> None:
        self.closed = threading.Event()
        self._run: OpenRun | None = None
        self._changing = threading.Lock()
        """A run is made in one thread while the session may be closed in another."""

    def put(self, run: OpenRun) -> OpenRun:
        """Keeps a run, which is returned.

        Raises:
            BackendError: the session is closed, and the run is deactivated.
        """
        with self._changing:
            if not self.closed.is_set():
                self._run = run
                return run
        run.stack.close()
        raise BackendError("the session is closed")

    def drop(self) -> None:
        """Deactivates the run, if there is one."""
        with self._changing:
            run, self._run = self._run, None
        if run is not None:
            run.stack.close()

    def close(self) -> None:
        """Deactivates the run, and one that is being made once it is there."""
        self.closed.set()
        self.drop()


class BasetenBackend(RemoteBackend):
    """Runs of one base model; see `tunebook.backends.base.Backend`.

    A session makes a run, and closing it deactivates the run: a dedicated one bills until then.
    """

    def __init__(
        self,
        *,
        service_model: str,
        model: str,
        base_url: str | None = None,
        scope: str | None = None,
        sampler: str = PINNED,
        losses: str = AUTO,
        lora_alpha: float = 32.0,
        max_runs: int = 4,
        max_seq_len: int | None = None,
        ready_timeout: float = 3600.0,
        submit_timeout: float = 120.0,
        stall_timeout: float | None = None,
        recover: int = 0,
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
            base_url: None = `LOOPS_BASE_URL`, else the hosted service.
            scope: where trainers run: default, serverless, team or deployment (one of its own);
                None = `BASETEN_LOOPS_SCOPE`, else as the organization has it.
            sampler: pinned = every publish samples from a checkpoint of its own; live = from the
                run's newest weights; none = no sampler is made.
            losses: auto = those of the service where they mean the same, two_passes = none of them.
            lora_alpha: of the service's adapters, which has no such option and does not say.
            max_runs: runs that may be open at a time, each with a trainer of its own.
            max_seq_len: tokens that a run has to take; None = as many as the model does there.
            ready_timeout: seconds that a trainer or sampler may take to be ready.
            submit_timeout: seconds, about, that a request is tried again which the service refuses
                with HTTP 400, 404, 408 or 502.
            stall_timeout: seconds without any progress after which waiting ends; None = never.
            recover: times that a lost run is replaced from its last checkpoint.
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
        check_choice("sampler", sampler, SAMPLERS)
        if scope is not None:
            check_choice("scope", scope, SCOPES)
        check_above_0(
            lora_alpha=lora_alpha,
            max_runs=max_runs,
            ready_timeout=ready_timeout,
            submit_timeout=submit_timeout,
            stall_timeout=stall_timeout,
        )
        check_at_least_0(recover=recover)
        loops_sdk()
        self._service = BasetenService(base_url)
        self._catalogue = Catalogue(self._service, service_model)
        self._service_model = service_model
        self._scope = scope
        self._sampler = sampler
        self._losses = SAME_MEANING if losses == AUTO else {}
        self._lora_alpha = lora_alpha
        self._max_runs = max_runs
        self._max_seq_len = max_seq_len
        self._ready_timeout = ready_timeout
        self._submit_timeout = submit_timeout
        self._stall_timeout = stall_timeout
        self._recover = recover
        self._tokenizer = TokenizerSource(
            tokenizer or model, revision, chat_template, trust_remote_code
        )
        self._notes = Notes()
        self._loop: LoopThread | None = None
        self._num_recovering = 0

    @property
    def capabilities(self) -> Capabilities:
        """What Loops has of everything, and how long rows may be there."""
        return Capabilities(
            max_sessions=self._max_runs,
            has_generator=self._sampler != NONE,
            full_weight=False,
            optimizers=frozenset({"adamw"}),
            losses=None,
            max_seq_len=self._catalogue.max_seq_len(),
            temperature=False,
            bills=True,
            files=False,
            lora_alpha=self._lora_alpha,
            lora_dropout=False,
        )

    def check(self, lora: LoraConfig | None, start: CheckpointRef | None) -> int | None:
        checked = self._adapter(lora)
        self._catalogue.max_seq_len()
        if start is not None:
            self._catalogue.check_start(start, checked)
        return None

    def estimate(self, workload: Workload) -> Estimate:
        return Estimate(
            seconds=None,
            train_tokens=workload.train_tokens,
            peak_memory_bytes=None,
            price=None,
            basis="the service bills tokens (serverless) or the time of a trainer (dedicated) and "
            "has no call that tells a price",
        )

    def _close_shared(self) -> None:
        try:
            self._notes.say()
        finally:
            if self._loop is not None:
                self._loop.close()

    def _open(
        self, name: str, lora: LoraConfig | None, directory: Path, base: Base
    ) -> RemoteSession:
        lora = self._adapter(lora)
        loop = self._loop = self._loop or LoopThread()
        run = str(directory.parent)
        max_seq_len = self._catalogue.max_seq_len()
        held = Held()

        async def reopen(place: str | None, with_optimizer: bool) -> ClientLink:
            def replace() -> ClientLink:
                held.drop()
                base = (place, with_optimizer)
                return held.put(self._open_run(name, lora, run, base, loop, held.closed)).link

            self._num_recovering += 1
            try:
                return await loop.wait_for_thread(replace)
            finally:
                self._num_recovering -= 1

        with ExitStack() as stack:
            stack.callback(held.close)
            queue = RemoteQueue(
                name,
                held.put(self._open_run(name, lora, run, base, loop, held.closed)).link,
                loop,
                self._notes,
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
                losses=self._losses,
                stop_ids=True,
                max_seq_len=max_seq_len,
                download=lambda place, directory: self._download(
                    queue.link.client, place, directory
                ),
                open_at=self._opener_at(name, lora, directory),
                delete=lambda place: None,  # the service has no call that does
                leases=Leases(None, lambda place: None),
                on_close=lambda: self._end(name, held),
            )
            stack.pop_all()
        return session

    def _end(self, name: str, held: Held) -> None:
        """Deactivates the run of a session."""
        self._sessions.pop(name, None)
        with shielded():
            held.close()
            self._notes.say()

    def _open_run(
        self,
        name: str,
        lora: LoraConfig,
        run: str,
        base: Base,
        loop: LoopThread,
        closed: threading.Event,
    ) -> OpenRun:
        """A ready run with the weights of a checkpoint, or fresh ones; not called on the loop.

        Raises:
            BackendError: the session was closed while its run was waited for.
        """
        place, with_optimizer = base
        with ExitStack() as stack:
            client = stack.enter_context(self._owned_client(name, lora, run, closed))
            leave_own_loop(client)
            dialect = LoopsDialect(
                sampler=self._sampler,
                fresh=place is None,
                submit_timeout=self._submit_timeout,
                ready_timeout=self._ready_timeout,
                loop=loop,
                say=self._say,
            )
            stack.callback(_close_clients, client, dialect, loop)
            if place is not None:
                call = "load_state_with_optimizer" if with_optimizer else "load_state"
                loop.run(_load(client, dialect, call, place))
            link = ClientLink(client, dialect, session_id=client.run_id)
            return OpenRun(stack.pop_all(), link)

    def _owned_client(
        self, name: str, lora: LoraConfig, run: str, closed: threading.Event
    ) -> AbstractContextManager[Any]:
        """The training client of a new run, in a Loops session of its own."""
        service = self._patiently(
            f"a Loops session for session {name!r}",
            lambda: loops_sdk().ServiceClient(
                api_key=self._service.api_key, base_url=self._service.base_url
            ),
            closed,
        )

        def create() -> Any:
            what = f"a trainer for session {name!r} (Loops session {service.session_id})"
            self._say(f"waiting for {what}")
            return self._patiently(
                what,
                lambda: service.create_lora_training_client(
                    self._service_model,
                    rank=lora.rank,
                    seed=lora.seed,
                    max_seq_len=self._max_seq_len,
                    ready_timeout=self._ready_timeout,
                    name=name,
                    scope=self._scope,
                ),
                closed,
            )

        return owned_run(
            Ledger.of_user(),
            self._service,
            {"session_id": service.session_id, "base_model": self._service_model},
            create,
            run=run,
            say=self._say,
        )

    def _patiently(self, what: str, make: Callable[[], Any], closed: threading.Event) -> Any:
        """What a call makes; where the shared pool is full, it is called again later.

        Raises:
            BackendError: the session was closed meanwhile.
        """
        patience, wait_s = Patience(self._say), 0.0
        while not closed.wait(wait_s):
            with translated(what):
                try:
                    return make()
                except Exception as error:
                    wait_s = patience.wait_s(error, what)
        raise BackendError(f"{what}: not made, the session is closed")

    def _say(self, text: str) -> None:
        self._notes.add("resource", text)
        if not self._num_recovering:  # else whoever waits for the session says it
            self._notes.say()

    def _adapter(self, lora: LoraConfig | None) -> LoraConfig:
        if lora is None:
            raise ConfigError("lora=null: the service trains adapters only")
        if lora.rank < 1:
            raise ConfigError(f"lora.rank={lora.rank}: must be at least 1")
        if lora.target_modules != "all-linear":
            raise ConfigError(
                f"lora.target_modules={lora.target_modules}: the service chooses the layers; use "
                "all-linear"
            )
        return replace(lora, alpha=self._lora_alpha, rslora=False, dropout=0.0)

    def _download(self, client: Any, place: str, directory: Path) -> Path:
        """The folder, with what a checkpoint for samplers is made of and the tokenizer."""
        found = self._catalogue.checkpoint(place)
        with translated(f"download of {place}"), self._tokenizer.completing(directory) as folder:
            landed = _downloaded(client, place, found.id, folder)
            if landed != folder:  # a volume keeps its own paths
                for file in landed.iterdir():
                    file.rename(folder / file.name)
                shutil.rmtree(folder / landed.relative_to(folder).parts[0])
            alpha = alpha_of(folder)
        note_other_alpha(self._notes, directory, alpha, expected=self._lora_alpha)
        return directory


def _close_clients(client: Any, dialect: LoopsDialect, loop: LoopThread) -> None:
    """Ends the connections of a run, those on the loop and the SDK's own."""
    try:
        loop.run(dialect.aclose())
        loop.run(client.aclose())
    finally:
        client.close()


def _downloaded(client: Any, place: str, checkpoint_id: str, folder: Path) -> Path:
    """Where the files of a checkpoint landed, in the folder or below it."""
    import httpx

    try:
        return client.download_checkpoint(checkpoint_id, dest_dir=str(folder)).dest_dir
    except httpx.HTTPStatusError as error:
        status, name = error.response.status_code, PurePosixPath(error.request.url.path).name
        # Without the SDK's error: whoever has the address in its text can read the file.
        raise refused(f"download of {place}", error.response, f"HTTP {status} for {name}") from None


async def _load(client: Any, dialect: LoopsDialect, call: str, place: str) -> None:
    with translated(f"{call} of {place}"):
        await (await dialect.submit(client, call, place))
