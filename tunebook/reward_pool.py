"""Worker processes that run reward functions, each call within its time.

A thread cannot be ended and a process can, so rewards run in processes of their own (see
`tunebook.reward_worker`): plain functions one at a time in as many as the work needs, all
`async def` ones together in the event loop of a single one. A call that takes too long costs its
process, which is killed with everything it started and replaced; calls that waited behind it are
given to another. The caller's thread does all the waiting here, so no thread is started and it
does not matter whether an event loop runs in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from tunebook.errors import RewardError
from tunebook.reward_worker import LENGTH

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from tunebook.reward_worker import main; main(int(sys.argv[1]))"
)
LOAD_LIMIT_S = 120.0
"""Seconds that a worker may take to start and import the rewards."""
GRACE_S = 2.0
"""Seconds beyond the time limit in which an event loop has to say that it ended a call."""
CLOSE_S = 1.0
"""Seconds that idle workers get to end by themselves."""
GROW_AFTER_S = 0.2
"""Seconds that calls wait for a free worker before the workers are doubled."""
BATCH_S = 0.02
"""Seconds of work that a worker may hold in advance; what is quick then costs no waiting."""
MAX_BATCH = 64
SLOW_S = 1.0
"""Seconds after which a call no longer counts as one that the processor limits."""
KEPT = 0.8
"""Share of an average that stays when a new value comes in."""


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """How a worker process gets at a reward function."""

    name: str
    is_async: bool
    load: dict[str, Any]
    """`path` and `arguments`, or `pickled`; see `tunebook.reward_worker.load_reward`."""


@dataclass(frozen=True, slots=True)
class Call:
    """One completion to be judged by one reward."""

    reward: str
    completion: str
    columns: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a call."""

    reward: float | None
    kind: str | None = None
    """Why there is no reward: exception, timeout, crashed, not_a_number, none, or what the reward
    itself calls it; None = there is one."""
    message: str = ""
    traceback: str | None = None
    note: str | None = None
    """What the reward noticed besides, `no_answer` for example."""


@dataclass(slots=True, eq=False)
class _Worker:
    """One process and what is known of it."""

    process: subprocess.Popen[bytes]
    lifeline: int
    concurrent: bool
    names: list[str]
    started: float
    ready: bool = False
    unsent: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)
    calls: dict[int, float] = field(default_factory=dict[int, float])
    """Calls that it holds, oldest first, and when each was given to it."""
    busy_since: float = 0.0
    """When the oldest of the calls became the one that runs (not of a concurrent worker)."""

    @property
    def commands(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin

    @property
    def answers(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout


class RewardPool:
    """Runs calls in worker processes; not for several threads at a time."""

    def __init__(
        self, specs: Sequence[RewardSpec], *, timeout_s: float, max_concurrency: int
    ) -> None:
        """
        Args:
            specs: rewards with different names.
            timeout_s: seconds that one call may take.
            max_concurrency: calls that run at a time.
        """
        self._specs = {spec.name: spec for spec in specs}
        self._timeout_s = timeout_s
        self._max_concurrency = max_concurrency
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._mean_s: dict[str, float] = {}
        self._cpu_share: float | None = None
        self._num_cpus = _usable_cpus()

    def start(self) -> None:
        """Starts a worker for plain and one for async rewards, and waits until both loaded them.

        Raises:
            RewardError: a reward cannot be imported or built there.
        """
        for concurrent in (False, True):
            if any(spec.is_async == concurrent for spec in self._specs.values()):
                self._spawn(concurrent=concurrent)
        while not all(worker.ready for worker in self._workers):
            for worker, _ in self._wait(self._seconds_left()):
                self._refuse_failed_start(worker)
            for worker in self._overdue():
                self._refuse_slow_start(worker)

    def run(self, calls: Sequence[Call]) -> Generator[tuple[int, Outcome]]:
        """Indices of the calls with what became of each, in the order in which they end.

        Closing the iterator early, or an exception on the way, ends every call that still runs.

        Raises:
            RewardError: a worker that replaces another cannot load the rewards.
        """
        batch = _Batch(calls, self._specs)
        grow_at = time.monotonic() + GROW_AFTER_S
        try:
            while batch.num_open:
                self._dispatch(batch)
                now = time.monotonic()
                if not batch.waiting[False]:
                    grow_at = now + GROW_AFTER_S
                elif now >= grow_at:
                    self._grow()
                    grow_at = now + GROW_AFTER_S
                left = self._seconds_left()
                if batch.waiting[False]:
                    left = min(left, max(0.0, grow_at - now))
                for worker, messages in self._wait(left):
                    self._refuse_failed_start(worker)
                    for message in messages:
                        yield self._settle(batch, worker, message)
                    if worker not in self._workers:
                        yield from self._bury(batch, worker, crashed=True)
                for worker in self._overdue():
                    if not worker.ready:
                        self._refuse_slow_start(worker)
                    self._end(worker)
                    yield from self._bury(batch, worker, crashed=False)
        finally:
            self._dismiss([each for each in self._workers if each.calls or not each.ready])

    def close(self) -> None:
        """Ends all workers."""
        try:
            self._dismiss(list(self._workers))
        finally:
            self._selector.close()

    # Workers.

    def _spawn(self, *, concurrent: bool) -> None:
        specs = [spec for spec in self._specs.values() if spec.is_async == concurrent]
        theirs, ours = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", BOOT, str(theirs), json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                pass_fds=(theirs,),
                start_new_session=True,  # Ctrl-C is for us; and killing takes its children along
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        names = [spec.name for spec in specs]
        worker = _Worker(process, ours, concurrent, names, started=time.monotonic())
        os.set_blocking(worker.commands.fileno(), False)
        os.set_blocking(worker.answers.fileno(), False)
        self._workers.append(worker)
        self._selector.register(worker.answers, selectors.EVENT_READ, worker)
        self._send(
            worker,
            {
                "rewards": {spec.name: spec.load for spec in specs},
                "concurrent": concurrent,
                "timeout_s": self._timeout_s,
            },
        )

    def _grow(self) -> None:
        """Doubles the workers for plain rewards, within what max_concurrency and processors allow.

        More workers than processors help only calls that wait for something.
        """
        now = time.monotonic()
        workers = [worker for worker in self._workers if not worker.concurrent]
        if not all(worker.ready for worker in workers):
            return
        room = self._max_concurrency - self._num_running()
        if self._cpu_share is not None and self._cpu_share > 0.5:
            computing = [each for each in workers if now - each.busy_since < SLOW_S]
            room = min(room, self._num_cpus - len(computing))
        for _ in range(min(room, max(1, len(workers)))):
            self._spawn(concurrent=False)

    def _dismiss(self, workers: list[_Worker]) -> None:
        """Ends workers: those that can listen by themselves within a second, others at once.

        An event loop listens while calls run in it. They are cancelled, and end what they started
        even where that has left the process group, as tests of code have.
        """
        listening = [each for each in workers if each.ready and (each.concurrent or not each.calls)]
        try:
            for worker in set(workers).difference(listening):
                self._end(worker)
            for worker in listening:
                self._stop_writing(worker)
                worker.commands.close()
            until = time.monotonic() + CLOSE_S
            while any(worker in self._workers for worker in listening):
                left = until - time.monotonic()
                if left <= 0:
                    break
                for key, _ in self._selector.select(left):
                    worker = key.data
                    if worker in listening and not os.read(worker.answers.fileno(), 1 << 16):
                        self._end(worker)
        finally:
            for worker in workers:
                if worker in self._workers:
                    self._end(worker)

    def _stop_writing(self, worker: _Worker) -> None:
        if worker.unsent:
            self._selector.unregister(worker.commands)
            worker.unsent.clear()

    def _end(self, worker: _Worker) -> None:
        """Kills a worker with what it started, and forgets it."""
        self._workers.remove(worker)
        self._selector.unregister(worker.answers)
        self._stop_writing(worker)
        _kill(worker)
        worker.process.wait()
        worker.commands.close()
        worker.answers.close()
        os.close(worker.lifeline)

    def _refuse_failed_start(self, worker: _Worker) -> None:
        """Raises if the worker ended before it was ready."""
        if worker.ready or worker in self._workers:
            return
        code = worker.process.returncode
        raise RewardError(
            f"the process for reward {', '.join(worker.names)} ended while starting "
            f"({_exit_text(code)}); what it printed stands above"
        )

    def _refuse_slow_start(self, worker: _Worker) -> None:
        raise RewardError(
            f"the process for reward {', '.join(worker.names)} was not up within "
            f"{LOAD_LIMIT_S:g} s: an import, or the making of a reward, does not end"
        )

    # Talking to them.

    def _send(self, worker: _Worker, command: Mapping[str, Any]) -> None:
        data = pickle.dumps(command, protocol=pickle.HIGHEST_PROTOCOL)
        waiting = bool(worker.unsent)
        worker.unsent += LENGTH.pack(len(data)) + data
        if not waiting:
            self._write(worker, registered=False)

    def _write(self, worker: _Worker, *, registered: bool) -> None:
        """Writes what the pipe takes; the selector says when it takes more."""
        try:
            while worker.unsent:
                written = os.write(worker.commands.fileno(), worker.unsent)
                del worker.unsent[:written]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            worker.unsent.clear()  # it ended; reading from it says so
        if worker.unsent and not registered:
            self._selector.register(worker.commands, selectors.EVENT_WRITE, worker)
        elif registered and not worker.unsent:
            self._selector.unregister(worker.commands)

    def _wait(self, seconds: float) -> list[tuple[_Worker, list[dict[str, Any]]]]:
        """Messages of the workers that said something; those that ended are no longer ours."""
        heard: list[tuple[_Worker, list[dict[str, Any]]]] = []
        for key, events in self._selector.select(seconds):
            worker = key.data
            if events & selectors.EVENT_WRITE:
                if worker in self._workers:  # not ended by what was read from it just now
                    self._write(worker, registered=True)
                continue
            data = os.read(worker.answers.fileno(), 1 << 16)
            worker.received += data
            *lines, rest = bytes(worker.received).split(b"\n")
            worker.received[:] = rest
            messages = [json.loads(line) for line in lines]
            for message in messages[:]:
                if "failed" in message:
                    raise RewardError(
                        f"reward {message['failed']!r} cannot be loaded in a process of its own: "
                        f"{message['message']}\n{message['traceback']}"
                    )
                if "ready" in message:
                    worker.ready = True
                    messages.remove(message)
            if not data:
                self._end(worker)
            heard.append((worker, messages))
        return heard

    # Calls.

    def _num_running(self) -> int:
        return sum(
            len(worker.calls) if worker.concurrent else bool(worker.calls)
            for worker in self._workers
        )

    def _dispatch(self, batch: _Batch) -> None:
        """Gives calls to workers that can take them."""
        for concurrent in (True, False):
            if batch.waiting[concurrent] and not any(
                worker.concurrent == concurrent for worker in self._workers
            ):
                self._spawn(concurrent=concurrent)
        for worker in self._workers:
            waiting = batch.waiting[worker.concurrent]
            while worker.ready and waiting and self._takes(worker, batch, waiting[0]):
                self._give(worker, batch, waiting.popleft())

    def _takes(self, worker: _Worker, batch: _Batch, index: int) -> bool:
        """Whether the worker may be given this call now."""
        if worker.concurrent:
            if worker.calls and (index in batch.alone or not batch.alone.isdisjoint(worker.calls)):
                return False
            return self._num_running() < self._max_concurrency
        if not worker.calls:
            return self._num_running() < self._max_concurrency
        held_s = sum(self._expected_s(batch.calls[each]) for each in (*worker.calls, index))
        return len(worker.calls) < MAX_BATCH and held_s <= BATCH_S

    def _expected_s(self, call: Call) -> float:
        return self._mean_s.get(call.reward, float("inf"))

    def _give(self, worker: _Worker, batch: _Batch, index: int) -> None:
        now = time.monotonic()
        if not worker.calls:
            worker.busy_since = now
        worker.calls[index] = now
        call = batch.calls[index]
        self._send(
            worker,
            {
                "call": index,
                "reward": call.reward,
                "completion": call.completion,
                "columns": dict(call.columns),
            },
        )

    def _settle(
        self, batch: _Batch, worker: _Worker, message: dict[str, Any]
    ) -> tuple[int, Outcome]:
        index = message["call"]
        del worker.calls[index]
        worker.busy_since = time.monotonic()
        batch.num_open -= 1
        if "wall_s" in message:
            self._learn(batch.calls[index].reward, message["wall_s"])
            self._learn_share(message["wall_s"], message["cpu_s"])
        return index, Outcome(
            reward=message.get("value"),
            kind=message["kind"],
            message=message.get("message", ""),
            traceback=message.get("traceback"),
            note=message.get("note"),
        )

    def _learn(self, reward: str, wall_s: float) -> None:
        before = self._mean_s.get(reward, wall_s)
        self._mean_s[reward] = KEPT * before + (1 - KEPT) * wall_s

    def _learn_share(self, wall_s: float, cpu_s: float) -> None:
        """Whether calls compute or wait; what is too short to tell says nothing."""
        if wall_s > 0.001:
            share = min(1.0, cpu_s / wall_s)
            kept = self._cpu_share if self._cpu_share is not None else share
            self._cpu_share = KEPT * kept + (1 - KEPT) * share

    def _seconds_left(self) -> float:
        """Seconds until the next limit of a worker or a call is reached."""
        limits = [self._limit(worker) for worker in self._workers]
        return max(0.0, min([*limits, time.monotonic() + LOAD_LIMIT_S]) - time.monotonic())

    def _limit(self, worker: _Worker) -> float:
        """When the worker has to have said something."""
        if not worker.ready:
            return worker.started + LOAD_LIMIT_S
        if not worker.calls:
            return float("inf")
        if worker.concurrent:
            return min(worker.calls.values()) + self._timeout_s + GRACE_S
        return worker.busy_since + self._timeout_s

    def _overdue(self) -> list[_Worker]:
        now = time.monotonic()
        return [worker for worker in self._workers if self._limit(worker) <= now]

    def _bury(
        self, batch: _Batch, worker: _Worker, *, crashed: bool
    ) -> Iterator[tuple[int, Outcome]]:
        """Settles the call that cost a worker; the others of that worker wait for another.

        In an event loop it is not known which of several calls it was: each is then run alone.
        """
        calls, worker.calls = list(worker.calls), {}
        guilty = calls[:1] if not worker.concurrent or len(calls) == 1 else []
        others = calls[len(guilty) :]
        if worker.concurrent:
            batch.alone.update(others)
        batch.waiting[worker.concurrent].extendleft(reversed(others))
        for index in guilty:
            batch.num_open -= 1
            if crashed:
                text = _exit_text(worker.process.returncode)
                yield index, Outcome(None, "crashed", f"its process ended ({text})")
            else:
                self._learn(batch.calls[index].reward, self._timeout_s)
                yield index, Outcome(None, "timeout", f"no answer within {self._timeout_s:g} s")


class _Batch:
    """The calls of one run and where they stand."""

    def __init__(self, calls: Sequence[Call], specs: Mapping[str, RewardSpec]) -> None:
        self.calls = calls
        self.num_open = len(calls)
        self.waiting: dict[bool, deque[int]] = {False: deque(), True: deque()}
        """Calls that no worker holds: those of plain rewards, and those of async ones."""
        self.alone: set[int] = set()
        """Calls in an event loop that share it with no other."""
        for index, call in enumerate(calls):
            self.waiting[specs[call.reward].is_async].append(index)


def _kill(worker: _Worker) -> None:
    """Kills the process and all that it started. It is not waited for yet, so its id is its own."""
    if worker.process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # a group of the dead
            os.killpg(worker.process.pid, signal.SIGKILL)


def _exit_text(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def _usable_cpus() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
