"""Rewards as a user writes them, good and bad, for processes to import."""

import asyncio
import os
import re
import sys
import time
from pathlib import Path

from tunebook.reward_values import NotedReward, Unscored

running = 0


def length(completion):
    return float(len(completion))


def matches(completion, *, answer):
    return completion == answer


def scaled(completion, *, answer, factor):
    return factor * (completion == answer)


def by_position(completion, answer):
    return completion == answer


def everything(completion, **columns):
    return float(len(columns))


def needs_and_takes_everything(completion, *, answer, **columns):
    return float(len(columns))


def optional(completion, *, bonus=1.0):
    return bonus


async def awaited(completion, *, answer):
    await asyncio.sleep(0)
    return completion == answer


class Same:
    """Called like a function, with a setting."""

    def __init__(self, *, value):
        if value < 0:
            raise ValueError(f"value={value}: must be at least 0")
        self.value = value

    def __call__(self, completion, *, answer):
        return self.value * (completion == answer)


class SameAwaited(Same):
    async def __call__(self, completion, *, answer):
        await asyncio.sleep(0)
        return self.value * (completion == answer)


class NotCallable:
    pass


def many(completions, **columns):
    return [1.0 for _ in completions]


def no_completion(*, answer):
    return 1.0


def with_weight(completion, *, weight):
    return weight


def odd(completion):
    """Does what the completion says."""
    match completion:
        case "raise":
            raise ValueError("the reward is broken")
        case "exit":
            sys.exit(3)
        case "die":
            os._exit(3)
        case "none":
            return None
        case "nan":
            return float("nan")
        case "inf":
            return float("-inf")
        case "text":
            return "1.0"
        case "list":
            return [1.0]
        case "huge":
            return 10**400
        case "unscored":
            raise Unscored("no_paper", "the printer is empty")
        case "noted":
            return NotedReward(0.25, "noticed")
        case "coroutine":
            return awaited(completion, answer="")
        case "true":
            return True
        case "print":
            print("a line on standard output")
            sys.stdin.read()
            return 1.0
        case "secret":
            raise ValueError(f"key {os.environ['JUDGE_API_KEY']}")
    return 1.0


async def odd_awaited(completion):
    await asyncio.sleep(0)
    return odd(completion)


def endless(completion):
    while completion == "endless":
        pass
    return 1.0


def endless_in_c(completion):
    """Holds the interpreter lock, so that no thread of the process runs."""
    if completion == "endless":
        re.match(r"(a+)+$", "a" * 64 + "b")
    return 1.0


async def endless_blocking(completion):
    """Never gives the event loop back."""
    while completion == "endless":
        pass
    await asyncio.sleep(0)
    return 1.0


async def endless_awaiting(completion):
    if completion == "endless":
        await asyncio.Event().wait()
    return 1.0


async def never_cancelled(completion):
    while completion == "endless":
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            continue
    return 1.0


async def num_running(completion, *, wanted):
    """Calls that run together, waited for until there are as many as wanted."""
    global running
    running += 1
    most = 0
    try:
        while most < wanted:
            most = max(most, running)
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        return max(most, running)
    finally:
        running -= 1


def meets_others(completion, *, folder, wanted):
    """1 once so many processes have been here; the same process counts once."""
    Path(folder, str(os.getpid())).touch()
    while len(os.listdir(folder)) < wanted:
        time.sleep(0.01)
    return 1.0


def writes_pid(completion, *, folder):
    """Leaves its process id, and one of a child, and stays."""
    import subprocess

    child = subprocess.Popen(["sleep", "1000"])
    Path(folder, "pids").write_text(f"{os.getpid()} {child.pid}")
    while True:
        time.sleep(0.01)


def raises_when_there(completion, *, file):
    while not os.path.exists(file):
        time.sleep(0.01)
    raise ValueError("the other one runs")
