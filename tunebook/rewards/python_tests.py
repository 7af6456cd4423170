"""Unit tests of the Python code in a completion, run in a process with limits."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import sys
from pathlib import Path

from tunebook.errors import ConfigError
from tunebook.reward_values import NotedReward, no_answer

RUNNER = Path(__file__).parent.parent / "code_runner.py"
READY = b"ready\n"
TIME_LIMIT = "time_limit"
"""Note of code that was ended by a limit of time."""

WARNING = (
    "it runs code that a model wrote, as you and on this machine, in a process with limits on "
    "time, memory and file sizes, without your environment variables, in a folder that is removed. "
    "That is no sandbox: the code can use the network, read and delete files that you can, and "
    "signal your processes. Use it only where that is acceptable, in a container for example"
)

_FENCED = re.compile(r"^```(?:python|py)?[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


class PythonTests:
    """1 where the code of the completion passes all tests of the row, else 0.

    The code is the last fenced block, or the whole completion where there is none. Code and then
    tests run in one fresh namespace in which `__name__` is not `__main__`; tests pass if they raise
    nothing. Leaving the process early (`sys.exit(0)`) is no pass. Code that exceeds `cpu_s` or
    `wall_s` is wrong, and noted as `time_limit`; a completion without code as `no_answer`. Keep
    `wall_s` below `reward.timeout_s`, beyond which a completion is unscored.

    Known hacks that it does not stop: objects that equal everything, and code that takes the tests
    apart from inside; look at what scores. Limits: address space (not on macOS), processor time,
    file size, 64 open files, no core dumps, and no child processes unless you are root.
    """

    def __init__(
        self, *, allow_running_code: bool, cpu_s: float, wall_s: float, memory_mb: int, file_mb: int
    ) -> None:
        """
        Args:
            allow_running_code: has to be set, because of what it does not protect from.
            cpu_s: seconds of processor time.
            wall_s: seconds from start to end; more than `cpu_s`, since others run beside it.
            memory_mb: megabytes of address space.
            file_mb: megabytes of the largest file it may write.

        Raises:
            ConfigError: it was not allowed, or a limit is not above 0.
        """
        if allow_running_code is not True:
            raise ConfigError(
                f"allow_running_code is not true: {WARNING}, and set it to true there"
            )
        limits = {"cpu_s": cpu_s, "wall_s": wall_s, "memory_mb": memory_mb, "file_mb": file_mb}
        for name, value in limits.items():
            if not 0 < value < math.inf:
                raise ConfigError(f"{name}={value}: must be above 0")
        self.limits = limits

    async def __call__(self, completion: str, *, tests: str | list[str]) -> float:
        blocks = _FENCED.findall(completion)
        code = blocks[-1] if blocks else completion
        if not code.strip():
            return no_answer()
        source = tests if isinstance(tests, str) else "\n".join(tests)
        if not source.strip():
            raise ValueError("the row's tests are empty, so that any code would pass")
        import tempfile

        # What the folder keeps in spite of being removed is left to the system's own cleaning.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            return await self._run(code, source, folder)

    async def _run(self, code: str, tests: str, folder: str) -> float:
        import asyncio
        import secrets

        token = secrets.token_hex(16).encode()
        task = json.dumps({"code": code, "tests": tests, **self.limits}).encode()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-B", str(RUNNER),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            cwd=folder,
            env={
                "PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8",
                "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
            },
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        said = b""
        limit = asyncio.timeout(self.limits["wall_s"])
        try:
            async with limit:
                # The token stays in the pipe until the tests have passed.
                process.stdin.write(b"%d\n" % len(task) + task + token)
                with contextlib.suppress(ConnectionError):  # it ended before it read all
                    await process.stdin.drain()
                while chunk := await process.stdout.read(len(READY) + len(token) + 1 - len(said)):
                    said += chunk
                code_of_exit = await process.wait()
        except TimeoutError:
            if not limit.expired():
                raise
            code_of_exit = None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left
                os.killpg(process.pid, signal.SIGKILL)
            process.stdin.close()
            await process.wait()
        if not said.startswith(READY):
            raise RuntimeError(
                f"the process for the tests did not get ready (exit code {code_of_exit}, it said "
                f"{said!r})"
            )
        if said == READY + token and code_of_exit == 0:
            return 1.0
        ended = code_of_exit in (None, -signal.SIGXCPU, -signal.SIGKILL)
        return NotedReward(0.0, TIME_LIMIT) if ended else 0.0
