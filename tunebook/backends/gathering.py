"""Threads whose waits meet: one leader runs at once what all the others wait for.

A sweep drives each of its trials in a thread of its own, a member of one gathering. A backend that
computes on this machine asks `current_gathering()` where somebody waits for an operation; a thread
that is no member waits as ever. All computing is done by the leader's thread, so it is the one that
an interrupt reaches, and no other starts threads of torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

SHORTEST_PATIENCE_S = 0.05


@dataclass(slots=True)
class _Want:
    work: Callable[[], None]
    phase: int
    over: bool = False
    error: BaseException | None = None


class Gathering:
    """Member threads, and the leader that serves them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._members = 0
        self._wants: list[_Want] = []
        self._interrupted = False
        self._patience_s = SHORTEST_PATIENCE_S

    @property
    def num_members(self) -> int:
        """Member threads that have not ended."""
        with self._changed:
            return self._members

    def start(self, target: Callable[[], None], *, name: str) -> threading.Thread:
        """A running thread that is a member until `target` returns."""

        def run() -> None:
            _current.gathering = self
            try:
                target()
            finally:
                with self._changed:
                    self._members -= 1
                    self._changed.notify_all()

        with self._changed:
            self._members += 1
        # A daemon: a trial that hangs must not keep an interrupted process from ending.
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def wait_for(self, work: Callable[[], None], *, phase: int = 0) -> None:
        """Returns once the leader has computed `work`; called by members.

        Args:
            work: called on the leader's thread.
            phase: of a step. A member in a later phase waits for those in an earlier one, so that
                all come to the same phase again and what they want can be computed together.

        Raises:
            KeyboardInterrupt: the gathering was interrupted.
        """
        want = _Want(work, phase)
        with self._changed:
            if self._interrupted:
                raise KeyboardInterrupt
            self._wants.append(want)
            self._changed.notify_all()
            while not want.over:
                self._changed.wait()
        if want.error is not None:
            raise want.error

    def serve(self) -> None:
        """One round of the leader: waits until all members wait, then computes the earliest phase.

        Members that are busy with something else are waited for no longer than the last round took,
        so a trial that scores rewards for long costs the others half of their speed at most.
        Returns without computing when a member has ended.
        """
        wants = self._await_wants()
        started = time.monotonic()
        try:
            for want in wants:
                try:
                    want.work()
                except Exception as error:
                    want.error = error
                want.over = True
        except BaseException:
            self.interrupt()
            raise
        finally:
            with self._changed:
                for want in wants:
                    if not want.over:
                        want.over, want.error = True, KeyboardInterrupt()
                self._changed.notify_all()
        if wants:
            self._patience_s = max(time.monotonic() - started, SHORTEST_PATIENCE_S)

    def interrupt(self) -> None:
        """Makes every wait of a member raise KeyboardInterrupt, now and later."""
        with self._changed:
            self._interrupted = True
            for want in self._wants:
                want.over, want.error = True, KeyboardInterrupt()
            self._wants = []
            self._changed.notify_all()

    def _await_wants(self) -> list[_Want]:
        with self._changed:
            before = self._members
            first_at: float | None = None
            while self._members == before and len(self._wants) < before:
                if not self._wants:
                    self._changed.wait()
                    continue
                first_at = time.monotonic() if first_at is None else first_at
                left_s = first_at + self._patience_s - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            if self._members < before or not self._wants:
                return []
            earliest = min(want.phase for want in self._wants)
            chosen = [want for want in self._wants if want.phase == earliest]
            self._wants = [want for want in self._wants if want.phase != earliest]
            return chosen


class _Current(threading.local):
    gathering: Gathering | None = None


_current = _Current()


def current_gathering() -> Gathering | None:
    """The gathering that this thread is a member of; None = of none."""
    return _current.gathering
