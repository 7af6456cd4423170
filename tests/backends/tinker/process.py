"""The server of the tests as a process, and what tests ask of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from tests.serve.server import TINY


class TinkerProcess:
    """A server over the built-in model, on a free port."""

    def __init__(self, home: Path) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self._log = (home / "server.log").open("w", encoding="utf-8")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.backends.tinker.server", str(home), TINY],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, (home / "server.log").read_text(encoding="utf-8")
        self.url = f"http://127.0.0.1:{int(line)}"

    def fault(self, route: str, *kinds: str) -> None:
        """Makes the next requests of a route fail, one by one as said."""
        httpx.post(f"{self.url}/test/fault", json={"route": route, "kinds": kinds})

    def ask_for_key(self, key: str | None) -> None:
        """Has requests refused that do not carry a key; None = none are."""
        httpx.post(f"{self.url}/test/key", json={"key": key})

    def state(self) -> dict[str, Any]:
        """Steps of models, checkpoints, what optimizers were given, and requests."""
        return httpx.get(f"{self.url}/test/state").json()

    def stop(self) -> None:
        """Ends it."""
        self._process.terminate()
        self._process.wait(timeout=30)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()
