"""What processes there are, for tests that none is left."""

import os
import subprocess
import time


def children():
    """Ids and commands of the processes that this one started, zombies included."""
    done = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,command="], capture_output=True, text=True, check=True
    )
    rows = [line.split(None, 2) for line in done.stdout.splitlines()]
    return [
        (int(row[0]), row[2])
        for row in rows
        if int(row[1]) == os.getpid() and "ps -A" not in row[2]
    ]


def is_alive(pid):
    done = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()[:1] not in ("", "Z")


def wait_until(condition, *, seconds=20):
    """Whether the condition came true in time."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True
