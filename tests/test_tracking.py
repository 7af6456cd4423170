"""Trackers: they see the right things, and can do no harm."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tunebook import tracking
from tunebook.errors import ConfigError
from tunebook.runs import RunDir, StopReason
from tunebook.tracking import TrackedRun, WandbTracker


class Recorder:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.started: list[TrackedRun] = []
        self.points: list[tuple[int, dict]] = []
        self.finished: list[StopReason] = []

    def check(self) -> None:
        pass

    def start(self, run: TrackedRun) -> None:
        self.started.append(run)

    def log(self, metrics: Mapping[str, float | int | None], step: int) -> None:
        self.points.append((step, dict(metrics)))

    def finish(self, stop_reason: StopReason) -> None:
        self.finished.append(stop_reason)


class Raising(Recorder):
    """Raises in one of its methods."""

    def __init__(self, method: str) -> None:
        super().__init__()

        def fail(*_: object, **__: object) -> None:
            raise ConnectionError("api.example: unreachable with key sentinel-value-1")

        setattr(self, method, fail)


class Sleeping(Recorder):
    """Blocks for a minute in one of its methods."""

    def __init__(self, method: str) -> None:
        super().__init__()
        setattr(self, method, lambda *_, **__: time.sleep(60))


def prepared(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path, "sft", "tracked")
    run.write_config({"optimizer": {"learning_rate": 1e-4}, "backend": {"api_key": "plain-key"}})
    return run


def train(
    run: RunDir, tracker: tracking.Tracker, warnings: list[str], *, first: int = 1, last: int = 5
) -> None:
    with run.attempt(planned_steps=last):
        if first > 1:
            run.rewind(first - 1)
        with tracking.tracking(tracker, run, warn=warnings.append) as feed:
            for step in range(first, last + 1):
                metrics = {"train/loss": 1.0 / step}
                run.log_metrics(step, metrics)
                feed.log(step, metrics)
                if step == last:
                    run.log_metrics(step, {"eval/loss": 0.5})
                    feed.log(step, {"eval/loss": 0.5})
            run.finish(StopReason.COMPLETED, steps=last)


def test_a_tracker_sees_the_run(tmp_path: Path) -> None:
    run, tracker, warnings = prepared(tmp_path), Recorder(), []
    train(run, tracker, warnings)
    (started,) = tracker.started
    assert started.config == {
        "optimizer": {"learning_rate": 1e-4},
        "backend": {"api_key": "[redacted]"},
    }
    assert started.name == run.path.name
    assert started.tracker_id == f"sft-{run.record.id}"
    assert tracker.points == [
        *((step, {"train/loss": 1.0 / step}) for step in range(1, 6)),
        (5, {"eval/loss": 0.5}),
    ]
    assert tracker.finished == [StopReason.COMPLETED]
    assert warnings == []


def test_a_resumed_run_goes_on_as_one_with_steps_that_never_go_back(tmp_path: Path) -> None:
    """Case 120."""
    run, tracker = prepared(tmp_path), Recorder()
    with (
        pytest.raises(RuntimeError),
        run.attempt(planned_steps=10),
        tracking.tracking(tracker, run, warn=pytest.fail) as feed,
    ):
        for step in range(1, 8):
            run.log_metrics(step, {"train/loss": 1.0})
            feed.log(step, {"train/loss": 1.0})
        raise RuntimeError("crash at 7")
    train(RunDir.open(run.path), tracker, [], first=6, last=10)
    steps = [step for step, _ in tracker.points]
    assert steps == [*range(1, 11), 10]
    assert [one.attempt for one in tracker.started] == [1, 2]
    assert len({one.tracker_id for one in tracker.started}) == 1
    assert tracker.finished == [StopReason.FAILED, StopReason.COMPLETED]


@pytest.mark.parametrize("method", ["start", "log", "finish"])
def test_a_tracker_that_raises_costs_one_warning(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 118."""
    monkeypatch.setenv("SOME_API_KEY", "sentinel-value-1")
    run, warnings = prepared(tmp_path), []
    train(run, Raising(method), warnings)
    assert len(warnings) == 1
    assert "Raising failed" in warnings[0] and "metrics.jsonl" in warnings[0]
    assert "sentinel-value-1" not in warnings[0]
    assert run.record.state == "succeeded"
    assert [row["step"] for row in run.metrics()] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("method", ["start", "log", "finish"])
def test_a_tracker_that_hangs_costs_one_warning_and_no_time(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 118."""
    monkeypatch.setattr(tracking, "FINISH_WAIT_S", 0.3)
    run, warnings = prepared(tmp_path), []
    start = time.monotonic()
    train(run, Sleeping(method), warnings)
    assert time.monotonic() - start < 30  # the tracker sleeps for 60 s
    assert len(warnings) == 1
    assert "did not finish" in warnings[0]
    assert run.record.state == "succeeded"
    assert len(run.metrics()) == 5


def test_a_hanging_call_is_reported_while_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "SLOW_CALL_S", 0.05)
    monkeypatch.setattr(tracking, "FINISH_WAIT_S", 0.1)
    warnings: list[str] = []
    run = prepared(tmp_path)
    with run.attempt(planned_steps=2):
        with tracking.tracking(Sleeping("start"), run, warn=warnings.append) as feed:
            feed.log(1, {"a": 1.0})
            time.sleep(0.2)
            feed.log(2, {"a": 1.0})
            assert len(warnings) == 1 and "has not answered" in warnings[0]
        run.finish(StopReason.COMPLETED, steps=2)
    assert len(warnings) == 1


def test_a_slow_tracker_fills_a_bounded_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "QUEUE_SIZE", 10)
    monkeypatch.setattr(tracking, "FINISH_WAIT_S", 0.1)
    warnings: list[str] = []
    train(prepared(tmp_path), Sleeping("log"), warnings, last=50)
    assert len(warnings) == 1 and "too slow" in warnings[0]


def test_a_process_with_a_hanging_tracker_ends_with_0(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from tests import test_tracking
from tunebook import tracking
tracking.FINISH_WAIT_S = 0.2
run = test_tracking.prepared(Path(sys.argv[1]))
test_tracking.train(run, test_tracking.Sleeping("log"), warnings := [])
print(len(warnings))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_no_tracker_is_fine(tmp_path: Path) -> None:
    run = prepared(tmp_path)
    with tracking.tracking(None, run, warn=pytest.fail) as feed:
        feed.log(1, {"a": 1.0})
    assert run.record.tracker == {}


def test_an_unknown_mode_names_the_allowed_ones() -> None:
    with pytest.raises(ConfigError, match=r"tracker\.mode=of: .*online, offline, disabled"):
        WandbTracker("p", mode="of")


@contextmanager
def local_server(answer: Callable[[socket.socket], None]) -> Iterator[tuple[str, list[int]]]:
    """The address of a server on this machine, and one entry per connection it got."""
    connections: list[int] = []
    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                connections.append(1)
                held.append(connection)
                answer(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", connections
        server.shutdown(socket.SHUT_RDWR)
    for connection in held:
        connection.close()


def refuse(connection: socket.socket) -> None:
    connection.recv(65536)
    body = b'{"errors":[{"message":"user is not logged in"}]}'
    head = f"HTTP/1.1 401 No\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    connection.sendall(head.encode() + body)
    connection.close()


def hang(connection: socket.socket) -> None:
    pass


WANDB_RUN = """
import os
import sys
from pathlib import Path
from tests import test_tracking
from tunebook import tracking
from tunebook.tracking import WandbTracker
tracking.FINISH_WAIT_S = float(sys.argv[4])
for attempt in range(int(sys.argv[3])):
    root = Path(sys.argv[1])
    tags = ["a tag", os.environ["WANDB_API_KEY"]]
    tracker = WandbTracker("tunebook-tests", mode=sys.argv[2], tags=tags)
    run = test_tracking.prepared(root) if attempt == 0 else run
    warnings = []
    test_tracking.train(run, tracker, warnings, first=5 * attempt + 1, last=5 * attempt + 5)
    print(warnings)
"""


def run_wandb(
    tmp_path: Path, mode: str, url: str, *, attempts: int = 1, finish_wait_s: float = 30
) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if "WANDB" not in name}
    environ |= {
        "HOME": str(tmp_path),
        "WANDB_BASE_URL": url,
        "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    arguments = [str(tmp_path / "runs"), mode, str(attempts), str(finish_wait_s)]
    return subprocess.run(
        [sys.executable, "-c", WANDB_RUN, *arguments],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env=environ,
    )


def test_wandb_offline_writes_into_the_run_and_opens_no_connection(tmp_path: Path) -> None:
    with local_server(hang) as (url, connections):
        done = run_wandb(tmp_path, "offline", url, attempts=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n[]\n", done.stdout
    assert connections == []
    (record,) = (tmp_path / "runs").glob("sft/*/run.json")
    run = RunDir.open(record.parent)
    files = list(run.path.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    assert {file.name for file in files} == {f"run-{run.record.tracker['id']}.wandb"}
    logged = b"".join(file.read_bytes() for file in files)
    assert b"train/loss" in logged and b"eval/loss" in logged and b"stop_reason" in logged
    written = [path for path in run.path.rglob("*") if path.is_file()]
    for secret in (b"0123456789abcdef0123456789abcdef01234567", b"plain-key"):
        assert [path for path in written if secret in path.read_bytes()] == []
    assert not (tmp_path / "wandb").exists()


TWO_AT_ONCE = """
import sys
from pathlib import Path
from tests import test_tracking
from tunebook.tracking import Feed, TrackedRun, WandbTracker
feeds = []
for name in ("first", "second"):
    path = Path(sys.argv[1]) / name
    path.mkdir()
    run = TrackedRun(path=path, recipe="sft", name=name, tracker_id=name, attempt=1, config={})
    feeds.append(Feed(WandbTracker("p", mode="offline"), run, after_step=0, warn=print))
for step in (1, 2):
    for number, feed in enumerate(feeds):
        feed.log(step, {f"only/{number}": 1.0})
for feed in feeds:
    feed.finish(test_tracking.StopReason.COMPLETED)
"""


def test_two_runs_of_one_process_are_two_wandb_runs(tmp_path: Path) -> None:
    """As the trials of a sweep are."""
    done = subprocess.run(
        [sys.executable, "-c", TWO_AT_ONCE, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env={**os.environ, "HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    for number, name in enumerate(("first", "second")):
        (file,) = (tmp_path / name).glob(f"wandb/offline-run-*/run-{name}.wandb")
        logged = file.read_bytes()
        assert f"only/{number}".encode() in logged
        assert f"only/{1 - number}".encode() not in logged


def test_wandb_online_with_a_dead_network_costs_one_warning(tmp_path: Path) -> None:
    with local_server(hang) as (url, _):
        done = run_wandb(tmp_path, "online", url, finish_wait_s=0.5)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("WandbTracker did not finish") == 1
    (record,) = (tmp_path / "runs").glob("sft/*/run.json")
    assert len(RunDir.open(record.parent).metrics()) == 5


def check_wandb(tmp_path: Path, key: str | None, url: str) -> str:
    script = """
from tunebook.errors import ConfigError
from tunebook.tracking import WandbTracker
try:
    WandbTracker("p").check()
    print("ready")
except ConfigError as error:
    print(error)
"""
    environ = {name: value for name, value in os.environ.items() if "WANDB" not in name}
    environ |= {"HOME": str(tmp_path), "WANDB_BASE_URL": url}
    environ |= {} if key is None else {"WANDB_API_KEY": key}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.DEVNULL,
    )
    return done.stdout


def test_a_missing_or_refused_login_is_found_while_preparing(tmp_path: Path) -> None:
    with local_server(refuse) as (url, connections):
        assert "no login on this machine. Set WANDB_API_KEY" in check_wandb(tmp_path, None, url)
        assert connections == []
        refused = check_wandb(tmp_path, "0123456789abcdef0123456789abcdef01234567", url)
    assert "W&B refuses the login" in refused and "not logged in" in refused
    assert "tracker.mode=offline" in refused
    assert "0123456789abcdef" not in refused


def test_offline_and_disabled_need_no_login(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "_import_wandb", pytest.fail)
    WandbTracker("p", mode="offline").check()
    WandbTracker("p", mode="disabled").check()
