"""Runs the environments of many rollouts side by side, each call within a time limit."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future as ThreadFuture
from concurrent.futures import TimeoutError as ThreadTimeoutError
from dataclasses import dataclass
from numbers import Real
from typing import Any

from tunebook.choices import explain_no_choice
from tunebook.compose import build_function
from tunebook.environments.protocol import Environment, Message, Start, Step, Tools, Turn
from tunebook.errors import ConfigError

LOG = logging.getLogger("tunebook")
LIMITS = ("max_turns", "timeout_s", "max_concurrency")
"""Keys of an environment's config that the loop reads; the others are its arguments."""
GRACE_S = 10.0
"""Seconds beyond all time limits after which the event loop counts as blocked."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A call that raised or took too long."""

    reason: str


class Environments:
    """Makes the environments of a run and calls them; close it when the run is over."""

    def __init__(
        self,
        make: Callable[[], Environment],
        *,
        name: str,
        max_turns: int,
        timeout_s: float,
        max_concurrency: int,
    ) -> None:
        """Takes what makes one environment.

        Args:
            make: called for every rollout.
            name: for messages.
            max_turns: of the model in one rollout.
            timeout_s: seconds that one call may take.
            max_concurrency: calls that run at a time.

        Raises:
            ConfigError: a limit that is not allowed, or `make` does not make an environment.
        """
        for key, value, lowest in (
            ("max_turns", max_turns, 1),
            ("timeout_s", timeout_s, 1e-3),
            ("max_concurrency", max_concurrency, 1),
        ):
            if not isinstance(value, int | float) or not value >= lowest:
                raise ConfigError(f"environment.{key}={value}: must be at least {lowest}")
        self.name = name
        self.max_turns = max_turns
        self._make = make
        self._timeout_s = timeout_s
        self._max_concurrency = max_concurrency
        self._open: dict[int, Environment] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self.tools: Tools = self._made().tools
        """Of every rollout."""

    def start(self, count: int) -> list[Environment]:
        """New environments, to be given to `finish` when their conversations are over."""
        made = [self._made() for _ in range(count)]
        self._open.update((id(environment), environment) for environment in made)
        return made

    def reset(
        self, environments: Sequence[Environment], starts: Sequence[Start]
    ) -> list[Sequence[Message] | Failure]:
        """The first messages of each environment.

        Raises:
            ConfigError: one returned something else.
        """
        found = self._call_all(
            [
                (environment.reset, start)
                for environment, start in zip(environments, starts, strict=True)
            ]
        )
        for messages in found:
            if not isinstance(messages, Failure):
                self._check_messages(messages, "reset")
        return found

    def step(
        self, environments: Sequence[Environment], turns: Sequence[Turn]
    ) -> list[Step | Failure]:
        """What follows the turn of each environment.

        Raises:
            ConfigError: one returned something else.
        """
        found = self._call_all(
            [
                (environment.step, turn)
                for environment, turn in zip(environments, turns, strict=True)
            ]
        )
        for step in found:
            if not isinstance(step, Failure):
                self._check_step(step)
        return found

    def finish(self, environments: Sequence[Environment]) -> None:
        """Closes environments; what goes wrong with that is logged, their results stay good."""
        own = [self._open.pop(id(each)) for each in environments if id(each) in self._open]
        failures = self._call_all([(environment.close,) for environment in own])
        for failure in {each.reason for each in failures if isinstance(each, Failure)}:
            LOG.warning("environment %s: close failed: %s", self.name, failure)

    def close(self) -> None:
        """Closes what is open and ends the thread; a second call does nothing."""
        if self._open:
            self.finish(list(self._open.values()))
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(GRACE_S)
            self._loop = self._thread = None

    def _made(self) -> Environment:
        environment = self._make()
        for name in ("tools", "reset", "step", "close"):
            if not hasattr(environment, name):
                raise ConfigError(
                    f"environment {self.name}: has no {name}; derive it from "
                    "tunebook.environments.Environment"
                )
        return environment

    def _check_step(self, step: Any) -> None:
        if not isinstance(step, Step):
            raise ConfigError(
                f"environment {self.name}: step returned a {type(step).__name__}; it must return a "
                "tunebook.environments.Step"
            )
        if not isinstance(step.metrics, Mapping):
            raise ConfigError(
                f"environment {self.name}: step gave {step.metrics!r} as metrics; they are a dict "
                "of numbers"
            )
        numbers = {"reward": 0.0 if step.reward is None else step.reward, **step.metrics}
        for key, value in numbers.items():
            if not isinstance(value, Real) or not math.isfinite(value):
                raise ConfigError(
                    f"environment {self.name}: step gave {value!r} as {key}; it must be a finite "
                    "number"
                )
        if not step.done:
            self._check_messages(step.messages, "step")

    def _check_messages(self, messages: Any, method: str) -> None:
        if not _are_messages(messages):
            raise ConfigError(
                f"environment {self.name}: {method} gave {str(messages)[:80]!r} as messages; they "
                "are a list, not empty, of dicts with the strings `role` and `content`"
            )
        if messages[-1]["role"] == "assistant":
            raise ConfigError(
                f"environment {self.name}: {method} ends with an assistant message; the model's "
                "turn has to follow"
            )

    def _call_all(self, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """What each `(function, *arguments)` returned, or a `Failure`, in order."""
        if not calls:
            return []
        waiting = asyncio.run_coroutine_threadsafe(self._gather(calls), self._running_loop())
        rounds = -(-len(calls) // self._max_concurrency)
        try:
            return waiting.result(rounds * self._timeout_s + GRACE_S)
        except ThreadTimeoutError:
            raise ConfigError(
                f"environment {self.name}: an async method blocks the event loop, so that no time "
                "limit applies; await what takes long, or write a plain method, which gets a thread"
            ) from None

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=_run_loop, args=(self._loop,), name="environments", daemon=True
            )
            self._thread.start()
        return self._loop

    async def _gather(self, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        limit = asyncio.Semaphore(self._max_concurrency)
        return await asyncio.gather(*(self._limited(call, limit) for call in calls))

    async def _limited(self, call: tuple[Any, ...], limit: asyncio.Semaphore) -> Any:
        async with limit:
            task = asyncio.ensure_future(_guarded(*call))
            done, _ = await asyncio.wait({task}, timeout=self._timeout_s)
            if done:
                return task.result()
            # Not waited for: it may hold on to its cancellation, and nobody reads its result.
            task.cancel()
            return Failure(f"took longer than environment.timeout_s={self._timeout_s:g}")


def _are_messages(value: Any) -> bool:
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(
        isinstance(each, dict)
        and isinstance(each.get("role"), str)
        and isinstance(each.get("content"), str)
        for each in value
    )


def build_environments(node: Mapping[str, Any]) -> Environments:
    """What an `environment` section of a config describes.

    Args:
        node: `_target_`, its arguments, and `LIMITS`.

    Raises:
        ConfigError: it cannot be imported, does not take an argument, or lacks a limit.
    """
    if "_target_" not in node and (no_choice := explain_no_choice("environment", node)):
        raise ConfigError(no_choice)
    for key in LIMITS:
        if key not in node:
            raise ConfigError(
                f"environment.{key} is missing: begin the file of an environment with "
                "`defaults: [base]`, which sets it"
            )
    arguments = {key: value for key, value in node.items() if key not in LIMITS}
    make = build_function(arguments, key="environment")
    limits = {key: node[key] for key in LIMITS}
    return Environments(make, name=str(node["_target_"]).rpartition(".")[2], **limits)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


async def _guarded(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a call returns, or a `Failure`; nothing that it raises reaches the event loop."""
    try:
        if inspect.iscoroutinefunction(function):
            return await function(*arguments)
        value = await asyncio.wrap_future(_in_thread(function, arguments))
        return await value if isinstance(value, Awaitable) else value
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # `sys.exit()` in an environment would end the loop
        text = " ".join(str(error).split())
        return Failure(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def _in_thread(function: Callable[..., Any], arguments: tuple[Any, ...]) -> ThreadFuture[Any]:
    """What a function returns, computed in a thread that does not keep the program alive."""
    future: ThreadFuture[Any] = ThreadFuture()
    future.set_running_or_notify_cancel()  # a cancelled one is told so, and could not be settled

    def run() -> None:
        try:
            value = function(*arguments)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(value)

    threading.Thread(target=run, name="environment", daemon=True).start()
    return future
