"""An event loop in a thread of its own, so that plain functions can be called from async code."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
CLEAN_UP_S = 10.0


class LoopThread:
    """Runs coroutines for threads that wait."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="tunebook-remote", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """The result of a coroutine that runs from now on."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The value of a coroutine, or what it raised.

        An interrupt cancels it, and goes on once the coroutine has cleaned up behind itself.
        """
        ended = threading.Event()
        future = self.start(_ending(work, ended))
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                ended.wait(CLEAN_UP_S)
            raise

    def call_soon(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Calls a function in the thread of the loop, in the order of these calls."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """Ends the thread; coroutines that still run are cancelled."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()


async def _ending(work: Coroutine[Any, Any, T], ended: threading.Event) -> T:
    try:
        return await work
    finally:
        ended.set()
