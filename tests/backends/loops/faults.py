"""Faults that a test asks a running server for."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

BEFORE, AFTER = "before", "after"


@dataclass
class Fault:
    """What becomes of the next requests that fit."""

    path: str
    """A shell pattern."""
    times: int = 1
    method: str = "POST"
    status: int | None = None
    """Answered instead of doing it."""
    headers: dict[str, str] = field(default_factory=dict)
    body: Any = None
    drop: str | None = None
    """The connection is cut before or after the request takes effect."""
    error: str | None = None
    """The operation is accepted and fails, with this text."""
    error_class: str | None = None


class Faults:
    """An ASGI application around another one; the outermost under uvicorn."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.waiting: list[Fault] = []
        self.requests: list[dict[str, Any]] = []
        """Method, path and status of every request but those of the tests themselves; the status of
        one whose connection was cut is None."""

    def take(self, method: str, path: str, *, of_operation: bool) -> Fault | None:
        """The fault of a request, which is then used up."""
        for fault in self.waiting:
            fits = fault.method == method and fnmatch.fnmatchcase(path, fault.path)
            if fits and (fault.error is not None) == of_operation:
                fault.times -= 1
                if fault.times == 0:
                    self.waiting.remove(fault)
                return fault
        return None

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/test/"):
            await self._app(scope, receive, send)
            return
        entry: dict[str, Any] = {"method": scope["method"], "path": scope["path"], "status": None}
        self.requests.append(entry)
        fault = self.take(scope["method"], scope["path"], of_operation=False)
        if fault is None:

            async def noting(message: Any) -> None:
                if message["type"] == "http.response.start":
                    entry["status"] = message["status"]
                await send(message)

            await self._app(scope, receive, noting)
        elif fault.status is not None:
            entry["status"] = fault.status
            await _answer(send, fault)
        else:
            if fault.drop == AFTER:
                await self._app(scope, receive, _nowhere)
            # The protocol has no message for it.
            send.__self__.transport.abort()


async def _answer(send: Any, fault: Fault) -> None:
    headers = {"content-type": "application/json", **fault.headers}
    encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": fault.status, "headers": encoded})
    await send({"type": "http.response.body", "body": json.dumps(fault.body).encode()})


async def _nowhere(message: Any) -> None:
    del message
