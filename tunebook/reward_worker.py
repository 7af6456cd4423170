"""A process that runs reward functions, so that a call which never ends can be ended.

`tunebook.reward_pool` starts it and is the only one to talk to it. Commands come in on standard
input as pickles behind their length, answers leave on standard output as lines of JSON; the reward
functions themselves get neither of the two. Nothing heavy is imported here: a worker is up in the
time that Python takes to start.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import os
import pickle
import reprlib
import signal
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import IO, Any

from tunebook.reward_values import NotedReward, Unscored

LENGTH = struct.Struct(">Q")
SHORT = reprlib.Repr()
SHORT.maxother = SHORT.maxstring = 100
ORPHAN_MARGIN_S = 10.0
LAST_S = 1.0
LONGEST_MESSAGE = 2_000
LONGEST_TRACEBACK = 20_000
"""Characters; its end says most."""

Reward = Callable[..., Any]


def main(lifeline: int) -> None:
    """Loads the rewards named by the first command, then answers calls until the input ends.

    Args:
        lifeline: descriptor that ends when the process that started this one does.
    """
    commands, answers = _take_standard_streams()
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
    setup = next(_read_commands(commands))
    rewards: dict[str, Reward] = {}
    for name, spec in setup["rewards"].items():
        try:
            rewards[name] = load_reward(spec)
        except BaseException as error:
            _send(answers, {"failed": name, **_told(error)})
            return
    _send(answers, {"ready": True})
    if setup["concurrent"]:
        import asyncio  # half of the time that a worker takes to start

        asyncio.run(_serve(commands, answers, rewards, timeout_s=setup["timeout_s"]))
        return
    # The kernel's last resort for a worker whose parent was killed while a reward holds the
    # interpreter lock: processor time, so that waiting costs nothing.
    limit_s = setup["timeout_s"] * (os.cpu_count() or 1) + ORPHAN_MARGIN_S
    for call in _read_commands(commands):
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        started, started_cpu = time.perf_counter(), time.process_time()
        try:
            answer = answer_of(rewards[call["reward"]](call["completion"], **call["columns"]))
        except BaseException as error:
            answer = answer_of_error(error)
        cpu_s, wall_s = time.process_time() - started_cpu, time.perf_counter() - started
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(answers, {"call": call["call"], **answer, "cpu_s": cpu_s, "wall_s": wall_s})


async def _serve(
    commands: IO[bytes], answers: IO[bytes], rewards: dict[str, Reward], *, timeout_s: float
) -> None:
    """Answers calls concurrently."""
    import asyncio

    loop = asyncio.get_running_loop()
    inbox: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    def read() -> None:
        for command in _read_commands(commands):
            loop.call_soon_threadsafe(inbox.put_nowait, command)
        loop.call_soon_threadsafe(inbox.put_nowait, None)

    async def answer(call: dict[str, Any]) -> None:
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                reward = await rewards[call["reward"]](call["completion"], **call["columns"])
            result = answer_of(reward)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if isinstance(error, TimeoutError) and limit.expired():
                result = {"kind": "timeout", "message": f"no answer within {timeout_s:g} s"}
            else:
                result = answer_of_error(error)
        _send(answers, {"call": call["call"], **result})

    threading.Thread(target=read, daemon=True).start()
    running: set[asyncio.Task[None]] = set()
    while (call := await inbox.get()) is not None:
        task = asyncio.create_task(answer(call))
        running.add(task)
        task.add_done_callback(running.discard)


def load_reward(spec: dict[str, Any]) -> Reward:
    """The reward function that a spec describes.

    Args:
        spec: `path` (dotted) and `arguments`, or `pickled`: the function by value.
    """
    if "pickled" in spec:
        import dill

        return dill.loads(spec["pickled"])
    found = locate(spec["path"])
    if isinstance(found, type):
        return found(**spec["arguments"])
    return functools.partial(found, **spec["arguments"]) if spec["arguments"] else found


def locate(path: str) -> Any:
    """The object at a dotted path, its modules imported on the way."""
    first, *names = path.split(".")
    found: Any = importlib.import_module(first)
    for count, name in enumerate(names, start=1):
        if not hasattr(found, name) and isinstance(found, ModuleType):
            importlib.import_module(".".join([first, *names[:count]]))
        found = getattr(found, name)
    return found


def answer_of(value: Any) -> dict[str, Any]:
    """What is told about a returned value: the reward, or why it is none."""
    if value is None:
        return {"kind": "none", "message": "returned None"}
    shown = SHORT.repr(value)
    refused = {"kind": "not_a_number", "message": f"returned {shown} ({type(value).__name__})"}
    if not hasattr(type(value), "__float__"):
        if hasattr(value, "close") and hasattr(value, "send"):
            value.close()
            refused["message"] += "; a reward that awaits has to be declared with `async def`"
        return refused
    try:
        reward = float(value)
    except (TypeError, ValueError, OverflowError):
        return refused
    if not math.isfinite(reward):
        return refused
    note = value.note if isinstance(value, NotedReward) else None
    return {"kind": None, "value": reward, "note": note}


def answer_of_error(error: BaseException) -> dict[str, Any]:
    """What is told about an exception that a reward raised."""
    if isinstance(error, Unscored):
        return {"kind": error.kind, "message": str(error)}
    return {"kind": "exception", **_told(error)}


def _told(error: BaseException) -> dict[str, str]:
    inner = error.__traceback__.tb_next if error.__traceback__ else None  # without our own frame
    trace = "".join(traceback.format_exception(type(error), error, inner))
    message = "".join(traceback.format_exception_only(error)).strip()
    return {"message": message[:LONGEST_MESSAGE], "traceback": trace[-LONGEST_TRACEBACK:]}


def _take_standard_streams() -> tuple[IO[bytes], IO[bytes]]:
    """Standard input and output for us alone; rewards read nothing and print to standard error."""
    commands = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return commands, answers


def _end_with_parent(lifeline: int) -> None:
    """Ends this process and what rewards started in it, once whoever started it is gone.

    An event loop first gets the time to cancel its calls, for which it ends when its input does.
    """
    os.read(lifeline, 1)
    time.sleep(LAST_S)
    os.killpg(os.getpid(), signal.SIGKILL)


def _read_commands(commands: IO[bytes]) -> Iterator[dict[str, Any]]:
    while len(head := commands.read(LENGTH.size)) == LENGTH.size:
        yield pickle.loads(commands.read(LENGTH.unpack(head)[0]))


def _send(answers: IO[bytes], message: dict[str, Any]) -> None:
    answers.write(json.dumps(message).encode("utf-8") + b"\n")
    answers.flush()
