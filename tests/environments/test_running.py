"""Environments side by side: plain and asynchronous, with limits, and whatever they raise."""

import asyncio
import sys
import threading
import time

import pytest

from tunebook.environments import Environment, Environments, Failure, Start, Step, Turn, running
from tunebook.errors import ConfigError
from tunebook.types import StopReason

START = Start(messages=[{"role": "user", "content": "hi"}], columns={}, seed=0)
TURN = Turn(
    number=1, is_last=False, text="ok", calls=(), call_errors=(), stop_reason=StopReason.STOP
)
DONE = Step(messages=(), done=True, reward=1.0)


class Plain(Environment):
    def reset(self, start):
        return start.messages

    def step(self, turn):
        return DONE


class Asynchronous(Environment):
    async def reset(self, start):
        return start.messages

    async def step(self, turn):
        return DONE


@pytest.fixture
def environments():
    """A function that opens environments of a kind, closed after the test."""
    opened = []

    def make(kind, **changes):
        limits = {"max_turns": 4, "timeout_s": 5.0, "max_concurrency": 4, **changes}
        opened.append(Environments(kind, name="test", **limits))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def stepped(environments, count=1):
    made = environments.start(count)
    return environments.step(made, [TURN] * count)


@pytest.mark.parametrize("kind", [Plain, Asynchronous])
def test_both_kinds(environments, kind):
    opened = environments(kind)
    made = opened.start(3)
    assert opened.reset(made, [START] * 3) == [START.messages] * 3
    assert opened.step(made, [TURN] * 3) == [DONE] * 3
    opened.finish(made)
    opened.close()
    opened.close()


def test_a_plain_method_that_returns_an_awaitable(environments):
    class Mixed(Plain):
        def step(self, turn):
            return asyncio.sleep(0, DONE)

    assert stepped(environments(Mixed)) == [DONE]


@pytest.mark.parametrize("kind", [Plain, Asynchronous])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("no  such\nroom"), "ValueError: no such room"),
        (KeyError(), "KeyError"),
        (TimeoutError("upstream"), "TimeoutError: upstream"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_whatever_is_raised_is_a_failure_of_that_one(environments, kind, error, reason):
    class Raises(kind):
        number = 0

        def __init__(self):
            Raises.number += 1
            self.fails = Raises.number == 3

        if kind is Plain:

            def step(self, turn):
                if self.fails:
                    raise error
                return DONE

        else:

            async def step(self, turn):
                if self.fails:
                    raise error
                return DONE

    opened = environments(Raises)
    assert stepped(opened, 3) == [DONE, Failure(reason), DONE]
    # The loop goes on.
    assert stepped(opened) == [DONE]


def test_what_takes_too_long_is_a_failure(environments):
    """Neither a thread that never returns nor a coroutine that refuses to be cancelled hangs."""
    never = threading.Event()

    class Hangs(Plain):
        def step(self, turn):
            never.wait()

    class Refuses(Asynchronous):
        async def step(self, turn):
            while not never.is_set():
                try:
                    await asyncio.sleep(0.05)
                except asyncio.CancelledError:
                    continue

    for kind in (Hangs, Refuses):
        (found,) = stepped(environments(kind, timeout_s=0.05))
        assert found == Failure("took longer than environment.timeout_s=0.05")
    never.set()


def test_a_blocked_event_loop_is_told(environments, monkeypatch):
    monkeypatch.setattr(running, "GRACE_S", 0.2)
    released = threading.Event()

    class Blocks(Asynchronous):
        async def step(self, turn):
            released.wait(20)
            return DONE

    with pytest.raises(ConfigError, match="blocks the event loop"):
        stepped(environments(Blocks, timeout_s=0.1))
    released.set()


def test_calls_run_side_by_side_up_to_the_limit(environments):
    for kind in (Plain, Asynchronous):
        running_now, most = [], []

        def enter(running_now=running_now, most=most):
            running_now.append(1)
            most.append(len(running_now))

        class Counts(kind):
            if kind is Plain:

                def step(self, turn, enter=enter, running_now=running_now):
                    enter()
                    time.sleep(0.02)
                    running_now.pop()
                    return DONE

            else:

                async def step(self, turn, enter=enter, running_now=running_now):
                    enter()
                    await asyncio.sleep(0.02)
                    running_now.pop()
                    return DONE

        assert stepped(environments(Counts, max_concurrency=3), 9) == [DONE] * 9
        assert max(most) == 3


def test_one_event_loop_for_all_of_a_run(environments):
    """What belongs to a loop, such as an HTTP client, can be kept from call to call."""
    loops = set()

    class Keeps(Asynchronous):
        async def reset(self, start):
            loops.add(asyncio.get_running_loop())
            return start.messages

        async def step(self, turn):
            loops.add(asyncio.get_running_loop())
            return DONE

    opened = environments(Keeps)
    for _ in range(2):
        made = opened.start(2)
        opened.reset(made, [START] * 2)
        opened.step(made, [TURN] * 2)
    assert len(loops) == 1


def test_it_works_where_a_loop_runs_already(environments):
    """In a notebook, say."""
    opened = environments(Asynchronous)

    async def main():
        return stepped(opened, 2)

    assert asyncio.run(main()) == [DONE] * 2


def test_closing_closes_what_is_open_once(environments, caplog):
    closed = []

    class Closes(Plain):
        def close(self):
            closed.append(self)
            if len(closed) == 2:
                raise OSError("gone already")

    opened = environments(Closes)
    made = opened.start(3)
    opened.finish(made[:1])
    opened.finish(made[:1])
    assert closed == made[:1]
    opened.close()
    assert sorted(map(id, closed)) == sorted(map(id, made))
    assert "close failed: OSError: gone already" in caplog.text


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"done": True}, "step returned a dict"),
        (None, "step returned a NoneType"),
        (Step(messages=[], done=False), "as messages"),
        (Step(messages=["hi"], done=False), "as messages"),
        (Step(messages=[{"role": "user"}], done=False), "as messages"),
        (Step(messages="hi", done=False), "as messages"),
        (Step(messages=[{"role": "assistant", "content": "x"}], done=False), "assistant message"),
        (Step(messages=(), done=True, reward=float("nan")), "gave nan as reward"),
        (Step(messages=(), done=True, reward="1"), "gave '1' as reward"),
        (Step(messages=(), done=True, metrics={"hits": None}), "gave None as hits"),
    ],
)
def test_a_wrong_answer_is_a_mistake_and_no_failure(environments, returned, message):
    class Wrong(Plain):
        def step(self, turn):
            return returned

    with pytest.raises(ConfigError, match=message):
        stepped(environments(Wrong))


def test_a_wrong_beginning_is_a_mistake(environments):
    class Wrong(Plain):
        def reset(self, start):
            return []

    opened = environments(Wrong)
    with pytest.raises(ConfigError, match="reset gave"):
        opened.reset(opened.start(1), [START])


def test_what_is_no_environment_is_refused(environments):
    class Nothing:
        tools = None

    with pytest.raises(ConfigError, match="has no reset"):
        environments(Nothing)


def test_a_hanging_environment_does_not_keep_the_program_alive(tmp_path):
    import subprocess

    code = """
import threading
from tunebook.environments import Environments
from tests.environments.test_running import Plain, stepped

class Hangs(Plain):
    def step(self, turn):
        threading.Event().wait()

environments = Environments(Hangs, name="x", max_turns=1, timeout_s=0.05, max_concurrency=1)
print(stepped(environments))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "took longer" in done.stdout
