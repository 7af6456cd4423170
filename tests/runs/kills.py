"""Kills runs at seeded moments, goes on with them, and compares with a run that nobody killed.

    python -m tests.runs.kills --moments 50
    python -m tests.runs.kills --moments 50 --by full-disk

Half of the moments are file operations (the n-th one that touches the run directory does not
happen), half are times. With a full disk, no file can grow from a file operation on; the run then
has to fail by an error that says so, and to go on when there is room again. Every process is a fork of this one, which has imported everything and trained
nothing, so that a start costs no imports. What is compared: weights and samples bit for bit, metrics,
outcome and evaluation; and that metrics and events have no gap and no duplicate.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers  # noqa: F401  (before the forks)

from recipes import dpo, grpo, sft
from tests.running import train_all
from tunebook.backends.local import LocalBackend  # noqa: F401
from tunebook.compose import compose
from tunebook.errors import RunError, TunebookError
from tunebook.runs import Preparation, RunDir, RunState, list_runs
from tunebook.runs.starting import lease_retry

RECIPES = {"sft": sft, "dpo": dpo, "grpo": grpo}
COMMON = {
    "data.limit": 40,
    "eval.fraction": 0.2,
    "eval.min_rows": 1,
    "plan.epochs": None,
    "plan.max_steps": 5,
    "plan.checkpoint_every": 2,
    "checkpoints.keep": 2,
    "optimizer.learning_rate": 1e-3,
    "samples.num_prompts": 1,
    "plan.batch_size": 4,
}
SETTINGS = {
    "sft": {**COMMON, "lora.dropout": 0.2, "samples.max_tokens": 4},
    "dpo": {**COMMON, "samples.max_tokens": 4},
    "grpo": {**COMMON, "rollout.group_size": 2, "rollout.max_new_tokens": 6},
}
FILE_OPERATIONS = frozenset(
    {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.listdir"}
)
KILLED = -signal.SIGKILL
REFUSED = 3
"""Exit code of a run that could not write, and said so."""


@dataclass(frozen=True)
class Moment:
    """When a run is killed, or its disk is full: before a file operation, or after some seconds."""

    operation: int | None = None
    seconds: float | None = None
    full_disk: bool = False

    def __str__(self) -> str:
        if self.operation is not None:
            return f"{'a disk full from ' if self.full_disk else ''}file operation {self.operation}"
        return f"{self.seconds:.3f} s" if self.seconds is not None else "never"


NEVER = Moment()


def forked(act: Callable[[], None], moment: Moment, folder: Path) -> tuple[int, int]:
    """Runs `act` in a forked process; returns its exit status and its file operations in `folder`."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            torch.set_num_threads(1)  # here: a pool of threads made before does not survive a fork
            count = counted(folder, moment)
            act()
            os.write(writing, str(count[0]).encode())
            code = 0
        except TunebookError as error:
            code = REFUSED if moment.full_disk and "written" in str(error) else 1
            if code == 1:
                traceback.print_exc()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.close(writing)
    if moment.seconds is not None:
        time.sleep(moment.seconds)
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with os.fdopen(reading, "rb") as told:
        return status, int(told.read() or 0)


def counted(folder: Path, moment: Moment) -> list[int]:
    """A counter of file operations in a folder; it all ends before the one of the moment."""
    count = [0]
    start = str(folder)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in FILE_OPERATIONS:
            return
        what = arguments[0] if arguments else None
        path = os.fspath(what) if isinstance(what, str | os.PathLike) else None
        if event == "os.truncate" or (isinstance(path, str) and path.startswith(start)):
            count[0] += 1
            if count[0] == moment.operation:
                if moment.full_disk:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
                else:
                    os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    return count


def begin(recipe: str, root: Path) -> None:
    """Trains a new run to its end."""
    train_all(compose(recipe, {**SETTINGS[recipe], "runs_dir": str(root)}))


def go_on(run: RunDir) -> None:
    """Trains an interrupted run to its end."""
    train_all(compose(run.record.recipe, {"resume": str(run.path)}))


def without_time(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics but for seconds, which no two runs share."""
    return [{key: row[key] for key in row if not key.startswith("time/")} for row in rows]


def weights_of(run: RunDir) -> dict[str, bytes]:
    """Every tensor file of the model and of the newest checkpoint."""
    newest = run.checkpoints()[-1].ref.path
    files = [*run.model_dir.glob("*.safetensors"), *newest.glob("*.safetensors")]
    return {f"{file.parent.name}/{file.name}": file.read_bytes() for file in files}


def assert_whole(run: RunDir) -> None:
    """A finished record: no gap, no duplicate, nothing left over."""
    record = run.record
    assert record.state is RunState.SUCCEEDED and record.model_available, record
    steps = [row["step"] for row in run.metrics() if row["step"] > 0]
    assert steps == list(range(1, record.outcome.steps + 1)), steps
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    keys = Counter((line["step"], key) for line in lines for key in line if key != "step")
    assert max(keys.values()) == 1, keys.most_common(3)
    seqs = [event["seq"] for event in run.events()]
    assert seqs == list(range(1, len(seqs) + 1)), seqs
    states = {one.state for one in record.attempts}
    assert states <= {"expired", "failed", "succeeded"}, states
    ends = [event["attempt"] for event in run.events() if event["type"] == "attempt_ended"]
    assert ends == [one.number for one in record.attempts if one.state != "expired"], ends
    left = [path for path in run.path.rglob(".*") if ".tmp" in path.name]
    left += run.path.glob(".cancel*")
    assert not left, left


def assert_same(run: RunDir, unbroken: RunDir) -> None:
    """Two runs made the same thing, bit for bit."""
    ours, theirs = weights_of(run), weights_of(unbroken)
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if ours[name] != theirs[name]]
    assert not different, different
    assert without_time(run.metrics()) == without_time(unbroken.metrics())
    assert_same_samples(run.samples(), unbroken.samples())
    for part in ("outcome", "evaluation", "failure", "plan_hash"):
        assert getattr(run.record, part) == getattr(unbroken.record, part), part


def assert_same_samples(ours: dict[int, Any], theirs: dict[int, Any]) -> None:
    """The same answers at the same steps; `versions` count the publishes of one session."""
    assert list(ours) == list(theirs), (list(ours), list(theirs))
    for step in ours:
        for one, other in zip(ours[step], theirs[step], strict=True):
            assert {**one, "versions": None} == {**other, "versions": None}, (step, one, other)


def prepared_run(root: Path) -> RunDir | None:
    """The run that a killed process has left, if it can be gone on with; else it is refused."""
    runs = list_runs(root) if root.is_dir() else []
    if not runs:
        return None
    [run] = runs
    if run.record.preparation is Preparation.VERIFIED:
        return run
    try:
        RECIPES[run.record.recipe].prepare(compose(run.record.recipe, {"resume": str(run.path)}))
    except TunebookError:
        return None
    raise AssertionError("a run whose preparation was killed can be resumed")


def killed_and_finished(recipe: str, moments: list[Moment], root: Path) -> RunDir:
    """A run that was killed at each moment in turn, and left in peace at the end."""
    for number, moment in enumerate([*moments, NEVER]):
        run = prepared_run(root)
        if run is None:
            root = root / str(number)  # what is left of a killed preparation stays behind
            status, _ = forked(partial(begin, recipe, root), moment, root)
        elif run.record.state is RunState.SUCCEEDED:
            break  # it was faster than the moment
        else:
            status, _ = forked(partial(go_on, run), moment, root)
        expected = (0,) if moment is NEVER else (0, REFUSED if moment.full_disk else KILLED)
        assert status in expected, f"exit status {status}"
    run = prepared_run(root)
    assert run is not None
    refuse_another(run)
    return RunDir.open(run.path)


def refuse_another(run: RunDir) -> None:
    """Asks for one more attempt, as somebody may who knows of the kill only: the run has ended."""
    try:
        lease_retry(run.path)
    except RunError as error:
        assert "has succeeded" in str(error), error
    else:
        raise AssertionError("a run that has succeeded was given another attempt")


def full_disk_moments(
    random_: random.Random, *, number: int, operations: int, seconds: float
) -> list[Moment]:
    """The moment from which one run has no room."""
    return [Moment(operation=random_.randint(1, operations), full_disk=True)]


def kill_moments(
    random_: random.Random, *, number: int, operations: int, seconds: float
) -> list[Moment]:
    """The moments at which one run is killed: file operations and times in turn, at times two."""
    first = Moment(operation=random_.randint(1, operations))
    if number % 2:
        first = Moment(seconds=random_.uniform(0, seconds))
    second = [Moment(operation=random_.randint(1, operations))] if number % 3 == 2 else []
    return [first, *second]


def check(recipe: str, *, by: str, moments: int, seed: int, root: Path) -> list[str]:
    """Ends `moments` runs of a recipe; returns what went wrong, nothing if all is well."""
    forked(partial(begin, recipe, root / "warm"), NEVER, root / "warm")  # fills the caches
    started = time.monotonic()
    status, operations = forked(partial(begin, recipe, root / "whole"), NEVER, root / "whole")
    seconds = time.monotonic() - started
    assert status == 0, f"the run that nobody kills ended with {status}"
    [unbroken] = list_runs(root / "whole")
    assert_whole(unbroken)
    print(f"{recipe}: {operations} file operations in {seconds:.1f} s", flush=True)
    problems = []
    for number in range(moments):
        random_ = random.Random(f"{recipe} {seed} {number}")
        at = MOMENTS_OF[by](random_, number=number, operations=operations, seconds=seconds)
        name = f"{recipe} {number} ended at {', '.join(map(str, at))}"
        try:
            run = killed_and_finished(recipe, at, root / str(number))
            assert_whole(run)
            assert_same(run, unbroken)
        except Exception as error:
            problems.append(f"{name}: {type(error).__name__}: {error}")
            traceback.print_exc()
        print(f"{name}: {'differs' if problems[-1:] and name in problems[-1] else 'the same'}")
    return problems


MOMENTS_OF = {"kill": kill_moments, "full-disk": full_disk_moments}


def main() -> int:
    """Returns 1 if a killed run was not in the end what an unbroken one is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--moments", type=int, default=50, help="over all recipes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--by", choices=list(MOMENTS_OF), default="kill")
    arguments = parser.parse_args()
    shares = Counter(
        arguments.recipes[number % len(arguments.recipes)] for number in range(arguments.moments)
    )
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TUNEBOOK_HOME"] = str(Path(folder) / "home")
        for recipe, moments in shares.items():
            root = Path(folder) / recipe
            problems += check(
                recipe, by=arguments.by, moments=moments, seed=arguments.seed, root=root
            )
    print(f"{arguments.moments} moments, {len(problems)} problems", *problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
