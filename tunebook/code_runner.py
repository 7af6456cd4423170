"""Runs code and its tests in a process of its own with limits, for `PythonTests`.

Started by its path in Python's isolated mode, so it imports the standard library only. Standard
input holds a length, a task as JSON and a token; the token is read and given back only when the
tests have passed, so that leaving early does not look like a pass.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import sys
from typing import Any

MEGABYTE = 1 << 20
OPEN_FILES = 64
TOKEN = 32
"""Bytes of the token."""
LATE_S = 5
"""Seconds beyond the limit; whoever started this process ends it before, while he lives."""


def main() -> None:
    """Reads a task, sets the limits, runs code and tests, and gives the token back."""
    task_fd, answer_fd = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    head = b""
    while not head.endswith(b"\n"):
        head += _read(task_fd, 1)
    task = json.loads(_read(task_fd, int(head)))
    set_limits(task)
    os.write(answer_fd, b"ready\n")
    namespace: dict[str, Any] = {"__name__": "completion", "__builtins__": __builtins__}
    exec(compile(task["code"], "completion.py", "exec"), namespace)
    exec(compile(task["tests"], "tests.py", "exec"), namespace)
    os.write(answer_fd, _read(task_fd, TOKEN))
    os._exit(0)  # what the code left to run at exit is no part of the tests


def set_limits(task: dict[str, Any]) -> None:
    """Sets the limits of this process, which it cannot raise again."""
    cpu_s = math.ceil(task["cpu_s"])
    limits = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: int(task["file_mb"] * MEGABYTE),
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
    }
    if sys.platform != "darwin":  # which refuses it
        limits[resource.RLIMIT_AS] = int(task["memory_mb"] * MEGABYTE)
    for kind, value in limits.items():
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    signal.alarm(math.ceil(task["wall_s"]) + LATE_S)


def _read(descriptor: int, count: int) -> bytes:
    """Exactly so many bytes; nothing is read ahead."""
    data = b""
    while len(data) < count:
        chunk = os.read(descriptor, min(count - len(data), MEGABYTE))
        if not chunk:
            raise EOFError("the task is incomplete")
        data += chunk
    return data


if __name__ == "__main__":
    main()
