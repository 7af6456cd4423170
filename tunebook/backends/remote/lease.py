"""Checkpoints that a service deletes after a time, kept from it while a run still has them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from tunebook.backends.remote.loop import LoopThread


class Leases:
    """The checkpoints of one session that expire, and when they were last renewed."""

    def __init__(self, ttl: int | None, renew: Callable[[str], None]) -> None:
        """
        Args:
            ttl: seconds that a checkpoint is kept; None = it does not expire.
            renew: gives a checkpoint, by its place, that time anew.
        """
        self._ttl = ttl
        self._renew = renew
        self._renewed_at: dict[str, float] = {}
        self._changing = threading.Lock()
        """`keep` renews in a thread of its own."""

    def begin(self, place: str) -> None:
        """Watches over a checkpoint that was saved just now."""
        with self._changing:
            self._renewed_at[place] = time.monotonic()

    def end(self, place: str) -> None:
        """Lets a checkpoint expire."""
        with self._changing:
            self._renewed_at.pop(place, None)

    def renew(self, place: str) -> None:
        """Renews a checkpoint now, such as the one that a run ends with or begins from."""
        if self._ttl is not None:
            self._renew(place)
            self.begin(place)

    def renew_old(self) -> None:
        """Renews those that half of their time has passed of; called where a run saves."""
        if self._ttl is None:
            return
        now = time.monotonic()
        with self._changing:
            old = [place for place, at in self._renewed_at.items() if at <= now - self._ttl / 2]
            self._renewed_at |= dict.fromkeys(old, now)
        for place in old:
            self._renew(place)

    async def keep(self, loop: LoopThread) -> None:
        """Renews in time where a run saves seldom; on the loop, until it is cancelled."""
        while self._ttl is not None:
            await asyncio.sleep(self._ttl / 4)
            await loop.wait_for_thread(self.renew_old)
