"""`tunebook serve`: checks what was asked for, then serves until it is told to stop."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.errors import BackendError, ConfigError
from tunebook.models import packaged_path, tunebook_home
from tunebook.runs.files import check_writable
from tunebook.serve.faults import NO_FAULTS, read_faults
from tunebook.serve.rates import PRESETS

if TYPE_CHECKING:
    from tunebook.serve.app import Server

MAX_HEADER_BYTES = 64 * 1024
DRAIN_S = 10
"""Time that answers under way have to end."""


def serve(
    *,
    model: str,
    name: str | None,
    host: str,
    port: int,
    home: Path | None,
    token_env: str,
    max_sessions: int,
    price_per_hour: float,
    faults: Path | None,
    rates: str,
    engine: dict[str, Any],
) -> None:
    """Serves until SIGTERM or SIGINT; an operation that is running is finished.

    Args:
        model: as in `tunebook.models.resolve_model`.
        name: what clients call it; None = the same.
        host: address to listen on.
        port: 0 = any that is free.
        home: where state is kept; None = in tunebook's own folder.
        token_env: variable that holds the token; without one only loopback is listened on.
        max_sessions: LoRA sessions of a resource at a time.
        price_per_hour: US dollars that estimates name.
        faults: plan of faults, see `tunebook.serve.faults`; None = none.
        rates: limits on how often clients may call: none, or those of the hosted service.
        engine: device, dtype and the like, as in `tunebook.serve.app.Engine`.

    Raises:
        ConfigError: a setting that is not allowed, or an address that is taken.
    """
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "tunebook serve needs the extra `serve`: pip install 'tunebook[serve]'"
        ) from error
    token = os.environ.get(token_env) or None
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"--host {host}: others could reach the server, so it needs a token; set {token_env}"
        )
    if max_sessions < 1:
        raise ConfigError(f"--max-sessions {max_sessions}: must be at least 1")
    if rates not in PRESETS:
        raise ConfigError(f"--rates {rates}: must be one of {', '.join(PRESETS)}")
    plan = NO_FAULTS if faults is None else read_faults(faults)
    model = named_model(model)
    home = (home or tunebook_home() / "serve").expanduser().absolute()
    check_writable(home, f"--home {home}")
    from tunebook.serve.app import Engine, Server
    from tunebook.serve.state import Settings

    settings = Settings(
        model=name or model,
        home=home,
        token=token,
        max_sessions=max_sessions,
        price_per_hour=price_per_hour,
        faults=plan,
        rates=PRESETS[rates],
    )
    with bound_socket(host, port) as bound:
        run(Server(Engine(model=model, **engine), settings), bound, host)


def named_model(model: str) -> str:
    """The model that `model=<name>` of a recipe trains; anything else is a model already."""
    file = packaged_path("pkg://configs/model") / f"{model}.yaml"
    if not model.isidentifier() or not file.is_file() or Path(model).is_dir():
        return model
    from omegaconf import OmegaConf

    return OmegaConf.select(OmegaConf.load(file), "name") or model


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        ConfigError: the address is taken, or not one of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A server that was killed can be started again at once.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(1024)
    except (OSError, OverflowError) as error:
        bound.close()
        raise ConfigError(f"--host {host} --port {port}: cannot listen there: {error}") from error
    return bound


def run(server: Server, bound: socket.socket, host: str) -> None:
    """Answers requests until a signal comes.

    Args:
        server: its parts.
        bound: what to listen on.
        host: its address, to be said.
    """
    import uvicorn

    class Listener(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                shown = f"[{host}]" if ":" in host else host
                print(f"listening on http://{shown}:{bound.getsockname()[1]}", flush=True)

        def handle_exit(self, sig: int, frame: Any) -> None:
            # Not uvicorn's own: it would raise the signal again, and end in another code than 0.
            del sig, frame
            self.end()

        def end(self) -> None:
            server.state.waiters.end()
            self.should_exit = True

    config = uvicorn.Config(
        server.app,
        log_level="warning",
        access_log=False,
        lifespan="on",
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_graceful_shutdown=DRAIN_S,
    )
    listener = Listener(config)
    server.on_failure = listener.end
    listener.run(sockets=[bound])
    if server.failed:
        raise BackendError("the server failed; what it wrote above has the cause")
