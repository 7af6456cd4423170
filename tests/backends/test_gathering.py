"""Threads whose waits meet: who runs what, and when."""

import threading
import time

import pytest

from tunebook.backends.gathering import Gathering, current_gathering
from tunebook.backends.local.queue import Joint, Lane, OperationQueue


class Batches:
    """Operations on a queue, and which of them ran together on which thread."""

    def __init__(self):
        self.queue = OperationQueue()
        self.batches = []
        self.threads = set()

    def submit(self, lane, value, kind="work"):
        def run(states):
            self.batches.append(sorted(states))
            self.threads.add(threading.current_thread())
            if "interrupt" in states:
                raise KeyboardInterrupt

        joint = Joint(
            kind=kind, begin=lambda: value, run=run, finish=lambda state: state * 2,
            drop=lambda: None,
        )  # fmt: skip
        return self.queue.submit(lane, kind, joint)


def lead(gathering):
    while gathering.num_members:
        gathering.serve()


def test_waits_of_all_members_meet_on_the_thread_of_the_leader():
    work, gathering, results = Batches(), Gathering(), {}

    def member(name):
        lane = Lane(name)
        assert current_gathering() is gathering
        results[name] = [work.submit(lane, f"{name}{step}").result() for step in range(3)]

    for name in "abc":
        gathering.start(lambda name=name: member(name), name=name)
    lead(gathering)
    assert results["b"] == ["b0b0", "b1b1", "b2b2"]
    assert work.batches == [["a0", "b0", "c0"], ["a1", "b1", "c1"], ["a2", "b2", "c2"]]
    assert work.threads == {threading.current_thread()}
    assert current_gathering() is None


def test_what_is_queued_behind_runs_in_the_same_round():
    """A step is one round: its update is computed before anybody has waited for it."""
    work, gathering, rounds = Batches(), Gathering(), []

    def member(name):
        lane = Lane(name)
        first, second = work.submit(lane, name), work.submit(lane, name, kind="update")
        first.result()
        rounds.append(second.done)
        second.result()

    for name in "ab":
        gathering.start(lambda name=name: member(name), name=name)
    lead(gathering)
    assert rounds == [True, True]
    assert work.batches == [["a", "b"], ["a", "b"]]


def test_those_who_are_ahead_wait_for_those_behind():
    """One has another turn to sample; then both train together, and stay together."""
    work, gathering = Batches(), Gathering()

    def member(name, turns):
        lane = Lane(name)
        for _ in range(turns):
            work.submit(lane, name, kind="sample").result()
        for kind in ("forward_backward", "sample", "forward_backward"):
            work.submit(lane, name, kind=kind).result()

    gathering.start(lambda: member("a", 1), name="a")
    gathering.start(lambda: member("b", 2), name="b")
    lead(gathering)
    assert work.batches == [["a", "b"], ["b"], ["a", "b"], ["a", "b"], ["a", "b"]]


def test_a_busy_member_is_not_waited_for_long():
    work, gathering, release = Batches(), Gathering(), threading.Event()

    def busy():
        release.wait(10)
        work.submit(Lane("busy"), "busy").result()

    def quick():
        for step in range(3):
            work.submit(Lane("quick"), f"quick{step}").result()
        release.set()

    gathering.start(busy, name="busy")
    gathering.start(quick, name="quick")
    started = time.monotonic()
    lead(gathering)
    assert time.monotonic() - started < 5
    assert work.batches == [["quick0"], ["quick1"], ["quick2"], ["busy"]]


def test_an_error_stays_with_its_member():
    gathering, seen = Gathering(), []

    def fails():
        raise ZeroDivisionError("mine")

    def member(work):
        try:
            gathering.wait_for(work)
            seen.append("well")
        except ZeroDivisionError as error:
            seen.append(str(error))

    gathering.start(lambda: member(fails), name="bad")
    gathering.start(lambda: member(lambda: None), name="good")
    lead(gathering)
    assert sorted(seen) == ["mine", "well"]


def test_an_interrupt_of_the_leader_reaches_all_members():
    work, gathering, seen, release = Batches(), Gathering(), [], threading.Event()

    def member(value, lane):
        try:
            if value == "late":
                release.wait(10)
            work.submit(lane, value).result()
            work.submit(lane, value).result()
        except KeyboardInterrupt:
            seen.append(value)

    threads = [
        gathering.start(lambda value=value: member(value, Lane(value)), name=value)
        for value in ("interrupt", "other", "late")
    ]
    with pytest.raises(KeyboardInterrupt):
        lead(gathering)
    release.set()
    for thread in threads:
        thread.join(10)
    assert sorted(seen) == ["interrupt", "late", "other"]
    assert gathering.num_members == 0
