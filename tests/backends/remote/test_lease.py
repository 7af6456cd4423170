"""Checkpoints that expire are renewed while a run has them."""

import threading

from tunebook.backends.remote.lease import Leases
from tunebook.backends.remote.loop import LoopThread


def test_they_are_renewed_where_a_run_saves_seldom() -> None:
    """By a thread of their own, until they are let go."""
    renewed, twice = [], threading.Event()

    def renew(place):
        renewed.append(place)
        if renewed.count("kept") == 2:
            twice.set()

    leases = Leases(0.2, renew)  # pyright: ignore[reportArgumentType]
    leases.begin("kept")
    leases.begin("discarded")
    leases.end("discarded")
    loop = LoopThread()
    keeping = loop.start(leases.keep(loop))
    assert twice.wait(10)
    keeping.cancel()
    loop.close()
    assert set(renewed) == {"kept"}


def test_what_does_not_expire_is_not_renewed() -> None:
    renewed = []
    leases = Leases(None, renewed.append)
    leases.begin("kept")
    loop = LoopThread()
    loop.run(leases.keep(loop))
    loop.close()
    assert renewed == []
