"""The child's side of a contest: it computes only when it is told to, and times itself."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch


class Turns:
    """Messages to and from the parent, one JSON object a line.

    The parent's pipe is the standard output that this process was started with; whatever libraries
    print goes to standard error instead.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._replies: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._started = 0.0

    def wait(self) -> bool:
        """Whether there is a turn: says that it is ready, waits, and starts the clock."""
        self._send({"event": "ready"})
        go = sys.stdin.readline().strip() == "go"
        self._synchronize()
        self._started = time.perf_counter()
        return go

    def seconds(self) -> float:
        """Seconds since the turn began, with everything computed that was launched."""
        self._synchronize()
        return time.perf_counter() - self._started

    def report(self, *, seconds: float, loss: list[float], **values: Any) -> None:
        """Ends a turn.

        Args:
            seconds: that the step took.
            loss: of the step, one for each adapter.
            values: whatever else was measured.
        """
        message = {
            "event": "step",
            "seconds": seconds,
            "loss": loss,
            "memory": memory(self._device),
            "peak_memory": peak_memory(self._device),
        }
        self._send({**message, **values})

    def facts(self, **values: Any) -> None:
        """Tells the parent what goes into the record beside the steps."""
        self._send({"event": "facts", **values})

    def _send(self, message: dict[str, Any]) -> None:
        self._replies.write(json.dumps(message) + "\n")
        self._replies.flush()

    def _synchronize(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


def peak_memory(device: str) -> int:
    """The most bytes this process has held: of the GPU, or resident (Linux only, else 0)."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return status_bytes("VmHWM")


def memory(device: str) -> int:
    """The bytes this process holds now: of the GPU, or resident (Linux only, else 0)."""
    if device == "cuda":
        return torch.cuda.memory_allocated()
    return status_bytes("VmRSS")


def status_bytes(field: str) -> int:
    """A field of `/proc/self/status` in bytes; 0 where there is no such file."""
    path = Path("/proc/self/status")
    if not path.exists():
        return 0
    for line in path.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


# glibc's names for the settings below (malloc.h).
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4


def keep_freed_memory() -> bool:
    """Makes glibc keep what is freed instead of giving it back; returns whether it did.

    Otherwise every large temporary is a fresh mapping, whose pages the kernel zeroes one by one.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    settings = {
        M_MMAP_MAX: 0,
        M_MMAP_THRESHOLD: 1 << 30,
        M_TRIM_THRESHOLD: (1 << 31) - 1,
        M_TOP_PAD: 1 << 28,
    }
    return all(libc.mallopt(name, value) == 1 for name, value in settings.items())
