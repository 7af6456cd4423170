"""The parent's side of a contest: one process per contestant, of which one computes at a time.

Every contestant takes a step, then every contestant takes the next one, so a machine that gets
slower or faster does so for all. Step 0 warms up; its gradient is compared and its time is not
counted.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.spec import Spec

ROOT = Path(__file__).parent.parent
LOG_LINES = 30


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest relative errors with which a ratio is reported."""

    gradient: float
    loss: float


BOUNDS = {"fp32": Bounds(gradient=2e-3, loss=2e-4), "bf16": Bounds(gradient=0.25, loss=2e-2)}
"""bf16 is compared with float32: its own rounding is part of the error."""
LOSS_FLOOR = 0.1
"""Losses below it are compared in absolute terms: that of GRPO is a mean of centred advantages."""


class ContestError(RuntimeError):
    """A contestant died."""


@dataclass
class Record:
    """What one contestant did."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    """Of each step: `seconds`, `loss`, `peak_memory`, and what else it measured."""
    facts: dict[str, Any] = field(default_factory=dict)

    def seconds(self) -> list[float]:
        """Of the steps that count."""
        return [step["seconds"] for step in self.steps[1:]]


class Child:
    """The process of one contestant."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.record = Record()
        self.finished = False
        path = spec.write()
        self._log = path.with_name("log.txt")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.contestant", str(path)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def get_ready(self) -> None:
        """Waits until it waits for a turn, or has ended.

        Raises:
            ContestError: it ended with an error.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            event = message.pop("event")
            if event == "ready":
                return
            if event == "step":
                self.record.steps.append(message)
            else:
                self.record.facts |= message
        self.finished = True
        if self._process.wait() != 0:
            tail = "\n".join(self._log.read_text().splitlines()[-LOG_LINES:])
            raise ContestError(f"{self.spec.contestant} ended with an error:\n{tail}")

    def take_step(self) -> dict[str, Any]:
        """Gives it turns until it has made a step; returns what it reported.

        Raises:
            ContestError: it ended before.
        """
        done = len(self.record.steps)
        while len(self.record.steps) == done:
            if self.finished:
                raise ContestError(f"{self.spec.contestant} ended after {done} steps")
            self._say("go")
            self.get_ready()
        return self.record.steps[-1]

    def end(self) -> None:
        """Makes it end; a second call does nothing."""
        if self._process.poll() is None:
            if not self.finished:
                self._say("stop")
            try:
                self._process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()


def hold(specs: Sequence[Spec], *, tell: Callable[[str], None]) -> dict[str, Record]:
    """Contestant -> what it did.

    Args:
        specs: one for each contestant.
        tell: shows a line of progress.

    Raises:
        ContestError: one of them died.
    """
    children: list[Child] = []
    try:
        for spec in specs:
            child = Child(spec)
            children.append(child)
            child.get_ready()
            tell(f"{spec.contestant} is ready")
        for number in range(min(spec.steps for spec in specs)):
            for child in children:
                step = child.take_step()
                tell(
                    f"step {number}{' (warm-up)' if number == 0 else ''}: "
                    f"{child.spec.contestant} {step['seconds']:.2f} s, "
                    f"loss {', '.join(f'{loss:.5f}' for loss in step['loss'])}, "
                    f"peak {step['peak_memory'] / 2**30:.1f} GiB"
                )
    finally:
        for child in children:
            child.end()
    return {child.spec.contestant: child.record for child in children}


@dataclass(frozen=True, slots=True)
class Errors:
    """How far a contestant's warm-up step is from the reference."""

    gradient: float
    """Norm of the difference of the whole adapter gradient over the norm of the reference."""
    worst_layer: float
    """The same of the worst single weight."""
    loss: float

    def within(self, bounds: Bounds) -> bool:
        """Whether it computed the same."""
        return self.gradient <= bounds.gradient and self.loss <= bounds.loss


def errors_of(spec: Spec, record: Record, *, reference: Spec, reference_record: Record) -> Errors:
    """The errors of a contestant against another."""
    with np.load(spec.gradients) as ours, np.load(reference.gradients) as theirs:
        if set(ours.files) != set(theirs.files):
            raise ContestError(
                f"{spec.contestant} trains other weights than {reference.contestant}"
            )
        total = squared = 0.0
        worst = 0.0
        for name in theirs.files:
            difference = float(np.square(ours[name] - theirs[name], dtype=np.float64).sum())
            size = float(np.square(theirs[name], dtype=np.float64).sum())
            total += size
            squared += difference
            worst = max(worst, (difference / size) ** 0.5 if size else 0.0)
    loss, expected = record.steps[0]["loss"][0], reference_record.steps[0]["loss"][0]
    return Errors(
        gradient=(squared / total) ** 0.5,
        worst_layer=worst,
        loss=abs(loss - expected) / max(abs(expected), LOSS_FLOOR),
    )


def ratio(slower: Sequence[float], faster: Sequence[float]) -> float:
    """How many times as long one takes: the median over the rounds of the contest."""
    return median(a / b for a, b in zip(slower, faster, strict=True))


def ratios(
    records: Mapping[str, Record],
    errors: Mapping[str, Errors],
    bounds: Bounds,
    *,
    of: Callable[[Record], list[float]],
) -> dict[str, float | None]:
    """`a / ours` -> ratio of every other contestant, None where one of both is out of bounds.

    Args:
        records: of all contestants.
        errors: of all contestants.
        bounds: that must hold.
        of: seconds that are compared.
    """
    found: dict[str, float | None] = {}
    fastest = "ours" if "ours" in records else next(iter(records))
    for name, record in records.items():
        if name != fastest:
            same = errors[name].within(bounds) and errors[fastest].within(bounds)
            key = f"{name} / {fastest}"
            found[key] = ratio(of(record), of(records[fastest])) if same else None
    return found
