"""A server in a process of its own, for tests that talk to it as clients do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import yaml

TINY = "pkg://tunebook/assets/tiny_model"
START_S = 120.0


class ServerProcess:
    """`tunebook serve` over the tiny model; can be killed, and started again where it was."""

    module: Sequence[str] = ("tunebook.cli", "serve")
    """What runs, and the arguments before those of every server."""

    def __init__(
        self,
        home: Path,
        *,
        model: str = TINY,
        port: int = 0,
        faults: dict | None = None,
        rates: str | None = None,
        extra: Sequence[str] = (),
        env: dict[str, str] | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            home: folder of its state; made if need be.
            model: that it serves.
            port: 0 = a free one, which it then keeps.
            faults: a plan of faults; None = none.
            rates: hosted or none; None = as the server has it.
            extra: more arguments.
            env: variables beside those of this process.
        """
        self.home = Path(home)
        self.model = model
        self.port = port
        self._faults = faults
        self._rates = rates
        self._extra = list(extra)
        self._env = env or {}
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        """What it has written to standard error, of all its lives."""
        path = self.home / "server.log"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> ServerProcess:
        """Returns when it accepts requests."""
        assert not self.alive
        self.home.mkdir(parents=True, exist_ok=True)
        arguments = ["--model", self.model, "--port", str(self.port), "--home", str(self.home)]
        if self._faults is not None:
            plan = self.home / "faults.yaml"
            plan.write_text(yaml.safe_dump(self._faults), encoding="utf-8")
            arguments += ["--faults", str(plan)]
        if self._rates is not None:
            arguments += ["--rates", self._rates]
        with (self.home / "server.log").open("a", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *self.module, *arguments, *self._extra],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **self._env},
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("listening on http://"):
            self._process.wait(timeout=START_S)
            raise RuntimeError(f"the server did not start: {line!r}\n{self.log}")
        self.port = int(line.rsplit(":", 1)[1])
        return self

    def kill(self) -> None:
        """Ends it at once, as `kill -9` does."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """Asks it to end; its exit code."""
        return self._end(signal.SIGTERM)

    def _end(self, number: int) -> int:
        if self._process is None:
            return 0
        process = self._process
        if process.poll() is None:
            process.send_signal(number)
        code = process.wait(timeout=START_S)
        assert process.stdout is not None
        process.stdout.close()
        self._process = None
        return code

    def __enter__(self) -> ServerProcess:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.kill()


def wait_until(reached, *, timeout: float = 30.0) -> None:
    """Returns when `reached()` is true; fails after a time."""
    deadline = time.monotonic() + timeout
    while not reached():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.01)
