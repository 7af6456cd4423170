"""The metrics of small runs of every recipe on every backend, as a table.

    python -m tests.backends.side_by_side metrics.json local together tinker
    .venv-loops/bin/python -m tests.backends.side_by_side metrics.json baseten

The first argument is a file that results are added to; the table shows all that it holds. Services
are the servers of the tests. Tinker and Loops take a prompt a request, each with a seed of its own,
so what they sample is compared with local torch that draws like this (`local, apart`).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.backends.services import configured, sample_prompts_apart
from tests.running import train_all

RECIPES = {
    "sft": ("train/loss", "train/grad_norm"),
    "dpo": ("train/loss", "train/grad_norm"),
    "grpo": ("train/loss", "train/reward", "train/grad_norm"),
}
ALPHA = 32
APART = "local, apart"
BACKENDS = ("local", "together", APART, "tinker", "baseten")
KEY = "no-key-of-anybody"


@contextmanager
def settings_of(backend: str, home: Path) -> Iterator[dict[str, object]]:
    """Settings of a backend, whose server runs inside the block."""
    if backend == "together":
        from tests.serve.server import ServerProcess

        with ServerProcess(home) as server:
            yield {"backend__base_url": server.url, "backend__generator_replicas": 1}
    elif backend == "tinker":
        from tests.backends.tinker.process import TinkerProcess

        server = TinkerProcess(home)
        try:
            yield {"backend__base_url": server.url}
        finally:
            server.stop()
    elif backend == "baseten":
        from tests.backends.loops.server import LoopsServer

        extra = ["--capacity", "serverless", "--alpha", str(ALPHA), "--key", KEY]
        with LoopsServer(home, extra=extra) as server:
            yield {"backend__base_url": server.url, "backend__sampler": "pinned"}
    else:
        yield {}


def measure(backend: str, folder: Path) -> dict[str, list[dict[str, float]]]:
    """Recipe -> the metrics of each of its steps."""
    found = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        if backend == APART:
            sample_prompts_apart(monkeypatch)
        with settings_of(backend, folder / "server") as settings:
            name = "local" if backend == APART else backend
            for recipe, names in RECIPES.items():
                config = configured(
                    recipe, folder / recipe, backend=name, lora__alpha=ALPHA, **settings
                )
                _, run = train_all(config)
                found[recipe] = [
                    {key: row[key] for key in names} for row in run.metrics() if names[0] in row
                ]
    return found


def table(results: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    """In Markdown: a line a metric and step, a column a backend."""
    shown = [each for each in BACKENDS if each in results]
    lines = [
        f"| recipe | step | metric | {' | '.join(f'`{each}`' for each in shown)} |",
        "| --- | --- | --- |" + " --- |" * len(shown),
    ]
    for recipe, names in RECIPES.items():
        for number in range(len(results[shown[0]][recipe])):
            for name in names:
                cells = [f"{results[each][recipe][number][name]:.6g}" for each in shown]
                lines.append(f"| {recipe} | {number + 1} | `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Measures what is named and prints the table of what is known."""
    path = Path(arguments[0])
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    os.environ.update(BASETEN_API_KEY=KEY, TINKER_API_KEY="tml-" + KEY)
    for backend in arguments[1:]:
        for each in (backend, APART) if backend == "local" else (backend,):
            with tempfile.TemporaryDirectory() as folder:
                os.environ["TUNEBOOK_HOME"] = str(Path(folder) / "home")
                results[each] = measure(each, Path(folder))
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main(sys.argv[1:])
