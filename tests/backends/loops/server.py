"""The server in a process of its own, and what a test asks of it."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from tests.serve.server import ServerProcess


class LoopsServer(ServerProcess):
    """A Loops service over the tiny model; see `tests.backends.loops.service`."""

    module = ("tests.backends.loops.service",)

    def fault(self, path: str, **settings: Any) -> None:
        """Asks for a fault; see `tests.backends.loops.faults.Fault`."""
        self._post("faults", {"path": path, **settings})

    def clear_faults(self) -> None:
        """Forgets those that have not come yet."""
        self._post("faults/clear", {})

    def state(self) -> dict[str, Any]:
        """Sessions, runs, operations, requests and checkpoints."""
        with urllib.request.urlopen(f"{self.url}/test/state") as answer:
            return json.load(answer)

    def operations(self, run_id: str | None = None) -> list[dict[str, Any]]:
        """Those that took effect, in order, perhaps of one run."""
        return [each for each in self.state()["operations"] if run_id in (None, each["run"])]

    def requests(self, path: str) -> list[int | None]:
        """Statuses of the requests to a path that ends so."""
        found = self.state()["requests"]
        return [each["status"] for each in found if each["path"].endswith(path)]

    def active_runs(self) -> list[str]:
        """Ids of the runs that are not deactivated."""
        runs = self.state()["runs"]
        return [each["id"] for each in runs if each["status"]["name"] == "ACTIVE"]

    def _post(self, path: str, body: dict[str, Any]) -> None:
        request = urllib.request.Request(f"{self.url}/test/{path}", json.dumps(body).encode())
        urllib.request.urlopen(request).close()
