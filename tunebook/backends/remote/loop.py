"""An event loop in a thread of its own, so that plain functions can be called from async code."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from tunebook.errors import BackendError

T = TypeVar("T")
CLEAN_UP_S = 10.0


class LoopThread:
    """Runs coroutines for threads that wait."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="tunebook-remote", daemon=True)
        self._started: set[Future[Any]] = set()
        """Results that are not there yet."""
        self._workers: set[threading.Thread] = set()
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """The result of a coroutine that runs from now on.

        Raises:
            BackendError: the loop is closed.
        """
        if self._loop.is_closed():
            work.close()
            raise BackendError("this backend is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._started.add(future)
        future.add_done_callback(self._started.discard)
        if self._loop.is_closed():  # by now
            future.cancel()
        return future

    async def wait_for_thread(self, work: Callable[[], T]) -> T:
        """The value of a function that waits for a service, and so has a thread of its own.

        Where the coroutine is cancelled, the function runs on. It has to look itself whether it is
        wanted still, and neither `close` nor the end of the process waits for it for long.
        """
        outcome: Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                value = work()
            except BaseException as error:
                outcome.set_exception(error)
            else:
                outcome.set_result(value)
            self._workers.discard(thread)

        outcome.set_running_or_notify_cancel()  # that it is cancelled does not end it
        thread = threading.Thread(target=run, name="tunebook-remote-wait", daemon=True)
        self._workers.add(thread)
        thread.start()
        return await asyncio.wrap_future(outcome)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The value of a coroutine, or what it raised.

        An interrupt cancels it, and goes on once the coroutine has cleaned up behind itself.
        """
        ended = threading.Event()
        try:
            future = self.start(_ending(work, ended))
        except BackendError:
            work.close()  # which has not begun
            raise
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
        """Ends the thread; coroutines that still run are cancelled.

        Functions that wait for a service get some time to clean up behind themselves.
        """
        if not self._loop.is_closed():
            give_up_at = time.monotonic() + CLEAN_UP_S
            for worker in list(self._workers):
                worker.join(max(0.0, give_up_at - time.monotonic()))
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
            for future in list(self._started):  # came too late to run
                future.cancel()


async def _ending(work: Coroutine[Any, Any, T], ended: threading.Event) -> T:
    try:
        return await work
    finally:
        ended.set()
