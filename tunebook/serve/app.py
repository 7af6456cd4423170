"""The server put together: store, worker, routes, and the clock that moves states on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from filelock import FileLock, Timeout
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tunebook.backends.local.backend import LocalBackend
from tunebook.backends.local.base_model import read_architecture, read_config
from tunebook.backends.local.lora import adapter_targets, linear_modules
from tunebook.errors import ConfigError
from tunebook.models import model_fingerprint
from tunebook.serve import resources
from tunebook.serve.answers import error_answer
from tunebook.serve.downloads import Downloads
from tunebook.serve.endings import advance
from tunebook.serve.errors import ApiError, log, log_failure
from tunebook.serve.faults import FaultyApp
from tunebook.serve.operations import Limits
from tunebook.serve.payloads import Payloads
from tunebook.serve.routes import Routes
from tunebook.serve.state import Settings, State
from tunebook.serve.store import Store
from tunebook.serve.worker import Worker

TICK_S = 0.25
PRUNE_S = 60.0


@dataclass(frozen=True, slots=True)
class Engine:
    """What the server computes with."""

    model: str
    """As in `tunebook.models.resolve_model`."""
    device: str = "auto"
    dtype: str = "auto"
    micro_batch_tokens: int | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False

    def new_backend(self) -> LocalBackend:
        """A backend; nothing is loaded yet."""
        return LocalBackend(
            model=self.model,
            device=self.device,
            dtype=self.dtype,
            micro_batch_tokens=self.micro_batch_tokens,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
            allow_pickle=self.allow_pickle,
        )


class Server:
    """All parts of the server; `app` answers requests once `start` was called."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        """Opens the home, and reads what the model is like.

        Raises:
            ConfigError: another server uses the home, it is of another model, or there is no model.
        """
        home = settings.home
        home.mkdir(parents=True, exist_ok=True)
        self._home_lock = FileLock(home / "lock")
        try:
            self._home_lock.acquire(blocking=False)
        except Timeout as error:
            raise ConfigError(f"--home {home}: another server uses it; name another") from error
        try:
            self._open(engine, settings)
        except BaseException:
            self._home_lock.release()
            raise

    def _open(self, engine: Engine, settings: Settings) -> None:
        home = settings.home
        self._store = Store(home / "server.sqlite")
        fingerprint = model_fingerprint(engine.model, revision=engine.revision)
        known = self._store.meta("model", fingerprint)
        if known != fingerprint:
            raise ConfigError(
                f"--home {home}: is of another model ({known}, {engine.model} is {fingerprint}); "
                "name another home"
            )
        self._settings = settings
        self._payloads = Payloads(home, self._store)
        self._payloads.clean_up()
        self.state = State(settings, self._store, *_shape_of(engine))
        self.on_failure: Callable[[], None] = lambda: None
        """Called when the server cannot go on."""
        self._worker = Worker(
            self.state, self._payloads, engine.new_backend, lambda: self.on_failure()
        )
        downloads = Downloads(
            self.state,
            self._payloads,
            {
                "model_name": engine.model,
                "dtype": "float32",
                "revision": engine.revision,
                "trust_remote_code": engine.trust_remote_code,
                "allow_pickle": engine.allow_pickle,
            },
        )
        app = Starlette(
            routes=Routes(self.state, self._payloads, downloads, lambda: self._worker.alive).all(),
            lifespan=self._lifespan,
            exception_handlers={HTTPException: _http_error},
        )
        # The outermost: it drops connections of uvicorn itself.
        self.app = FaultyApp(app, settings.faults, log) if settings.faults.rules else app

    @property
    def failed(self) -> bool:
        """Whether it ended by a fault of its own."""
        return self._worker.failed

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        del app
        self.state.waiters.begin(asyncio.get_running_loop())
        self._worker.start()
        clock = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            clock.cancel()
            await asyncio.to_thread(self._worker.stop)
            self.close()

    def close(self) -> None:
        """Lets go of the home."""
        self._store.close()
        self._home_lock.release()

    async def _tick(self) -> None:
        state = self.state
        next_pruning = 0.0
        while True:
            try:
                advance(state)
                resources.expire(state)
                with state.work:
                    state.work.notify_all()  # A session may have become due.
                if time.monotonic() > next_pruning:
                    before = state.settings.now() - state.settings.keep_s
                    self._payloads.forget(before=before)
                    self._store.forget_outputs(before=before)
                    next_pruning = time.monotonic() + PRUNE_S
            except Exception as error:
                # The next tick tries again; a server whose clock stands still never expires.
                log_failure("the clock failed", error)
            await asyncio.sleep(TICK_S)


def _shape_of(engine: Engine) -> tuple[Limits, tuple[str, ...]]:
    """What requests may hold, and the target modules of an adapter with the output head."""
    known: dict[str, Any] = {
        "revision": engine.revision,
        "trust_remote_code": engine.trust_remote_code,
    }
    config = read_config(engine.model, **known).get_text_config()
    limits = Limits(
        vocab_size=config.vocab_size,
        max_seq_len=getattr(config, "max_position_embeddings", None),
    )
    architecture = read_architecture(engine.model, **known)
    if architecture is None:
        return limits, ()
    targets = adapter_targets(architecture.model, architecture.head, "all-linear")
    head = next(
        name
        for name, module in linear_modules(architecture.model).items()
        if module is architecture.head
    )
    return limits, (*targets, head)


def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (no such address, no such method) as JSON."""
    del request
    assert isinstance(error, HTTPException)
    return error_answer(
        ApiError(error.status_code, error.detail, code="not_found", headers=error.headers)
    )
