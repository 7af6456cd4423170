"""What the way through HTTP costs: the same steps in this process, and on `tunebook serve`."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.cases import LEARNING_RATE, Options
from benchmarks.contest import BOUNDS, ROOT
from benchmarks.ours import DTYPES
from benchmarks.spec import ADAM, LORA
from loss_fns.cross_entropy import cross_entropy
from tunebook.backends.base import Session
from tunebook.backends.local import LocalBackend
from tunebook.backends.together import TogetherBackend
from tunebook.types import AdamParams, Datum

ROWS, TOKENS = 8, 256
TIMED_STEPS = 10


def served(options: Options) -> dict[str, Any]:
    """A step of 8 rows of 256 tokens, of which all carry loss, in turn on both backends."""
    steps = TIMED_STEPS if options.steps is None else options.steps
    seconds: dict[str, list[float]] = {"local": [], "served": []}
    losses: dict[str, list[float]] = {"local": [], "served": []}
    lora = replace(LORA, target_modules="all-linear")  # the way that a service knows
    with ExitStack() as stack:
        url = stack.enter_context(server(options))
        local = stack.enter_context(
            LocalBackend(model=options.model, device=options.device, dtype=DTYPES[options.dtype])
        )
        remote = stack.enter_context(
            TogetherBackend(service_model=options.model, model=options.model, base_url=url)
        )
        sessions: dict[str, Session] = {
            name: stack.enter_context(
                closing(backend.open_session(name, lora, directory=options.work / name))
            )
            for name, backend in (("local", local), ("served", remote))
        }
        for number in range(steps + 1):
            data = rows_of(number, options.seed)
            for name, session in sessions.items():
                started = time.perf_counter()
                loss = session.forward_backward(data, cross_entropy)
                update = session.optim_step(AdamParams(learning_rate=LEARNING_RATE, **ADAM))
                losses[name].append(loss.result()["loss"])
                update.result()
                seconds[name].append(time.perf_counter() - started)
                options.tell(f"step {number}: {name} {seconds[name][-1]:.2f} s")
    error = max(abs(a - b) / abs(a) for a, b in zip(*losses.values(), strict=True))
    same = error <= BOUNDS[options.dtype].loss
    rounds = zip(seconds["served"][1:], seconds["local"][1:], strict=True)
    return {
        "case": "served",
        "device": options.device,
        "dtype": options.dtype,
        "model": options.model,
        "described": {
            "rows per step": ROWS,
            "tokens per row": TOKENS,
            "timed steps": steps,
            "largest difference of a loss": f"{error:.1e}",
        },
        "times": {
            name: {
                "median_s": median(values[1:]),
                "first_s": values[0],
                "unit": f"{1 / median(values[1:]):.3f} steps/s",
            }
            for name, values in seconds.items()
        },
        "ratios": {"step": {"served / local": median(a / b for a, b in rounds) if same else None}},
    }


def rows_of(number: int, seed: int) -> list[Datum]:
    """The rows of a step: tokens drawn evenly from ids that the smallest model has, too."""
    generator = np.random.default_rng((seed, number))
    weights = np.full(TOKENS - 1, 1 / (ROWS * (TOKENS - 1)), np.float32)
    return [
        Datum(generator.integers(3, 500, TOKENS).astype(np.int32), {"token_weights": weights})
        for _ in range(ROWS)
    ]


@contextmanager
def server(options: Options) -> Iterator[str]:
    """The address of a `tunebook serve` that lives inside the block."""
    home = Path(options.work) / "server"
    home.mkdir(parents=True)
    arguments = ["--model", options.model, "--port", "0", "--home", str(home)]
    arguments += ["--device", options.device, "--dtype", DTYPES[options.dtype]]
    with (home / "log.txt").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tunebook.cli", "serve", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("listening on "):
            raise RuntimeError(f"the server did not start:\n{(home / 'log.txt').read_text()}")
        yield line.split()[-1]
    finally:
        process.terminate()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
