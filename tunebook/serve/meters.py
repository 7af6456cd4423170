"""Counters, gauges and histograms, and their Prometheus text; safe from several threads."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from threading import Lock

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LATENCY_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

Labels = tuple[str, ...]


class Meter:
    """One named quantity, with a value for each combination of its labels."""

    kind = "untyped"

    def __init__(self, name: str, meaning: str, labels: Sequence[str] = ()) -> None:
        self.name = name
        self.meaning = meaning
        self.labels = tuple(labels)
        self._lock = Lock()

    def _key(self, labels: dict[str, str]) -> Labels:
        assert set(labels) == set(self.labels), f"{self.name} has the labels {self.labels}"
        return tuple(labels[label] for label in self.labels)

    def lines(self) -> Iterator[str]:
        """The meter in the text format."""
        meaning = self.meaning.replace("\\", "\\\\").replace("\n", "\\n")
        yield f"# HELP {self.name} {meaning}"
        yield f"# TYPE {self.name} {self.kind}"
        with self._lock:
            samples = list(self._samples())
        for suffix, labels, value in samples:
            inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels)
            braces = f"{{{inside}}}" if inside else ""
            yield f"{self.name}{suffix}{braces} {_shown(value)}"

    def _samples(self) -> Iterator[tuple[str, list[tuple[str, str]], float]]:
        """Suffix of the name, labels, value; called under the lock."""
        raise NotImplementedError

    def _named(self, key: Labels) -> list[tuple[str, str]]:
        return list(zip(self.labels, key, strict=True))


class Counter(Meter):
    """A number that only grows."""

    kind = "counter"

    def __init__(self, name: str, meaning: str, labels: Sequence[str] = ()) -> None:
        super().__init__(name, meaning, labels)
        self._values: dict[Labels, float] = {} if self.labels else {(): 0.0}

    def add(self, amount: float = 1, **labels: str) -> None:
        assert amount >= 0, f"{self.name} is a counter"
        key = self._key(labels)
        with self._lock:
            self._values[key] = self._values.get(key, 0.0) + amount

    def _samples(self) -> Iterator[tuple[str, list[tuple[str, str]], float]]:
        for key, value in sorted(self._values.items()):
            yield "", self._named(key), value


class Gauge(Meter):
    """A number that goes up and down."""

    kind = "gauge"

    def __init__(self, name: str, meaning: str, labels: Sequence[str] = ()) -> None:
        super().__init__(name, meaning, labels)
        self._values: dict[Labels, float] = {}

    def set(self, value: float, **labels: str) -> None:
        key = self._key(labels)
        with self._lock:
            self._values[key] = value

    def _samples(self) -> Iterator[tuple[str, list[tuple[str, str]], float]]:
        for key, value in sorted(self._values.items()):
            yield "", self._named(key), value


class Histogram(Meter):
    """How often a value fell below each of some bounds, with the sum of all values."""

    kind = "histogram"

    def __init__(
        self,
        name: str,
        meaning: str,
        labels: Sequence[str] = (),
        *,
        bounds: Sequence[float] = LATENCY_BOUNDS_S,
    ) -> None:
        super().__init__(name, meaning, labels)
        assert list(bounds) == sorted(set(bounds)), f"{name}: bounds have to rise"
        self.bounds = tuple(bounds)
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}

    def observe(self, value: float, **labels: str) -> None:
        key = self._key(labels)
        with self._lock:
            counts = self._counts.setdefault(key, [0] * (len(self.bounds) + 1))
            counts[bisect_left(self.bounds, value)] += 1
            self._sums[key] = self._sums.get(key, 0.0) + value

    def _samples(self) -> Iterator[tuple[str, list[tuple[str, str]], float]]:
        for key, counts in sorted(self._counts.items()):
            below = 0
            for bound, count in zip((*self.bounds, None), counts, strict=True):
                below += count
                shown = "+Inf" if bound is None else f"{bound:g}"
                yield "_bucket", [*self._named(key), ("le", shown)], below
            yield "_sum", self._named(key), self._sums[key]
            yield "_count", self._named(key), below


def prometheus_text(meters: Sequence[Meter]) -> str:
    """What a Prometheus server reads, of the content type `CONTENT_TYPE`."""
    return "".join(f"{line}\n" for meter in meters for line in meter.lines())


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _shown(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return f"{value:.17g}"
