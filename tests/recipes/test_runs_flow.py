"""Runs from outside: in the background, waited for, cancelled, retried, interrupted, out of space."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes import grpo, sft
from tests.fakes import FakeBackend
from tests.running import train_all
from tunebook.compose import compose
from tunebook.errors import AdmissionError, RunCancelled
from tunebook.launch import admit, execute, start_run
from tunebook.opening import build_backend
from tunebook.runs import (
    AttemptState,
    RunDir,
    RunState,
    StorageError,
    cancel,
    is_being_trained,
    run_status,
    shown_state,
    start,
    wait,
)
from tunebook.runs.starting import lease_retry
from tunebook.types import Estimate

SMALL = {
    "data.limit": 40,
    "eval.fraction": 0.2,
    "eval.min_rows": 1,
    "plan.batch_size": 8,
    "plan.checkpoint_every": 2,
    "samples.num_prompts": 0,
}
LONG = {**SMALL, "plan.epochs": 500, "plan.checkpoint_every": 0}
END_S = 120
"""Seconds within which anything here ends on a busy machine."""


def configured(tmp_path, settings, /, recipe="sft", **overrides):
    values = {**settings, "runs_dir": str(tmp_path / "runs")}
    values.update({key.replace("__", "."): value for key, value in overrides.items()})
    return compose(recipe, values)


def lines(settings, **overrides):
    values = {**settings, **{key.replace("__", "."): value for key, value in overrides.items()}}
    return [f"{key}={value}" for key, value in values.items()]


def command(*arguments, cwd, **environ):
    path = os.pathsep.join(str(Path(each).absolute()) for each in sys.path)
    return {
        "args": [sys.executable, "-m", "tunebook.cli", *arguments],
        "cwd": cwd,
        "text": True,
        "env": {**os.environ, "PYTHONPATH": path, **environ},
    }


def call(*arguments, cwd, **environ):
    given = command(*arguments, cwd=cwd, **environ)
    return subprocess.run(**given, capture_output=True, timeout=END_S, check=False)


def only_run(tmp_path):
    [path] = (tmp_path / "runs").glob("*/*/run.json")
    return RunDir.open(path.parent)


def wait_until(what, *, process=None):
    deadline = time.monotonic() + END_S
    while not what():
        assert time.monotonic() < deadline and (process is None or process.poll() is None)
        time.sleep(0.05)


def assert_complete(run):
    """A record that says everything, whatever ended the run."""
    record = RunDir.open(run.path).record
    assert record.outcome is not None
    assert all(attempt.ended_at is not None for attempt in record.attempts)
    seqs = [event["seq"] for event in run.events()]
    assert seqs == list(range(1, len(seqs) + 1))
    assert run.events()[-1]["type"] == "attempt_ended"
    steps = [row["step"] for row in run.metrics() if row["step"]]
    assert steps == list(range(1, len(steps) + 1))
    assert not is_being_trained(run.path)
    assert "Traceback" not in (run.path / "run.json").read_text()
    return record


# In the background.


def test_a_detached_run_outlives_its_terminal_and_is_waited_for(tmp_path):
    """The starting command has a terminal's session of its own, which is then hung up."""
    begin = command("run", "sft", *lines(SMALL, name="away"), "--detach", cwd=tmp_path)
    starting = subprocess.Popen(**begin, stdout=subprocess.PIPE, start_new_session=True)
    out, _ = starting.communicate(timeout=END_S)
    assert starting.returncode == 0
    run = only_run(tmp_path)
    assert "goes on in the background" in out and str(run.path) in out
    with pytest.raises(ProcessLookupError):
        os.killpg(starting.pid, signal.SIGHUP)  # nothing of it is left in that session
    attempt = run.record.attempts[-1]
    assert attempt.number == 1 and os.getsid(attempt.pid) == attempt.pid
    follow = call("runs", "follow", "1", "--after", "1", "--json", cwd=tmp_path)
    assert follow.returncode == 0, follow.stderr
    seen = [json.loads(line) for line in follow.stdout.splitlines()]
    assert [event["seq"] for event in seen] == list(range(2, 2 + len(seen)))
    assert [event["type"] for event in seen][-1] == "attempt_ended"
    done = call("runs", "wait", "1", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert (shown["state"], shown["steps"], shown["model_available"]) == ("succeeded", 4, True)
    assert [one["state"] for one in shown["attempts"]] == ["succeeded"]
    for phase in ("queued_s", "preparing_s", "training_s", "finalizing_s"):
        assert shown["timing"][phase] > 0, phase
    assert shown["timing"]["post_processing_s"] is None  # no answers were asked for
    assert shown["total_s"] >= sum(value or 0 for value in shown["timing"].values())
    output = (run.path / "output.txt").read_text()
    assert "step 4/4" in output and "\r" not in output
    assert call("runs", "resume", "1", "--detach", cwd=tmp_path).returncode == 2


def test_cancelled_in_the_background_then_resumed_and_retried_once_per_key(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = sft.prepare(configured(tmp_path, LONG, plan__epochs=None, plan__max_steps=4000))
    run = start_run("sft", task)
    started = start(run.path)
    assert (started.attempt.state, started.is_new) == (AttemptState.ACCEPTED, True)
    wait_until(lambda: run_status(run.path).steps > 0)
    late = call("runs", "wait", "1", "--timeout", "0.1", "--poll", "0.05", cwd=tmp_path)
    assert late.returncode == 124 and "It goes on" in late.stderr
    second = call("sft", f"resume={run.path}", cwd=tmp_path)
    assert second.returncode == 2 and "is training this run" in second.stderr
    done = call("runs", "cancel", "1", "--timeout", str(END_S), cwd=tmp_path)
    assert done.returncode == 0 and "is cancelled, with a model" in done.stdout
    record = assert_complete(run)
    assert record.state is RunState.CANCELLED and record.model_available
    assert RunDir.open(run.path).checkpoints()[-1].step == record.outcome.steps
    assert call("runs", "wait", "1", cwd=tmp_path).returncode == 3
    steps = record.outcome.steps
    keyed = ("runs", "retry", "1", "--resume", "--idempotency-key", "k", "--detach")
    said = call(*keyed, cwd=tmp_path).stdout
    assert "attempt 2 (new) goes on from step" in said and "runs follow 1 " in said
    assert "attempt 2 (known by its key" in call(*keyed, cwd=tmp_path).stdout
    wait_until(lambda: run_status(run.path).steps > steps)
    cancel(run.path)
    ended = wait(run.path, poll_s=0.05, timeout_s=END_S)
    assert ended.record.state is RunState.CANCELLED and ended.steps > steps
    assert [one.resumed_from_step for one in ended.record.attempts] == [0, steps]
    assert ended.record.attempts[-1].idempotency_key == "k"
    assert_complete(run)


def test_a_retry_from_the_beginning_is_the_same_run_again(tmp_path):
    """Same arguments, same frozen data, in the foreground; the source of the rows is gone by then."""
    source = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "Say 1."}, {"role": "assistant", "content": "1"}]
    source.write_text((json.dumps({"messages": turns}) + "\n") * 20)
    settings = {**SMALL, "data.path": str(source), "eval.fraction": 0, "plan.epochs": 2}
    _, run = train_all(configured(tmp_path, settings), stop_after=2)
    before = [row["train/loss"] for row in run.metrics()]
    model = (run.model_dir / "adapter_model.safetensors").read_bytes()
    source.unlink()
    done = call("runs", "retry", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "attempt 2 (new) begins at step 0" in done.stdout
    again = RunDir.open(run.path)
    record = assert_complete(again)
    assert record.state is RunState.SUCCEEDED
    assert [row["train/loss"] for row in again.metrics()][:2] == before
    assert len(again.metrics()) == record.outcome.steps == 6
    assert (run.model_dir / "adapter_model.safetensors").read_bytes() != model
    assert call("runs", "retry", "1", cwd=tmp_path).returncode == 2
    longer = call("runs", "resume", "1", "plan.epochs=3", cwd=tmp_path)
    assert longer.returncode == 0, longer.stderr
    assert RunDir.open(run.path).record.outcome.steps == 9


def test_a_retry_that_fails_before_it_begins_says_why_and_keeps_what_there_was(tmp_path):
    _, run = train_all(configured(tmp_path, SMALL), stop_after=2)
    assert lease_retry(run.path).attempt.resumed_from_step == 0
    config = compose("sft", {"resume": str(run.path), "limits.max_seconds": 1e-6})
    with pytest.raises(AdmissionError):
        execute("sft", config, sft.prepare, sft.train)
    record = assert_complete(run)
    assert (record.state, record.failure.code) == (RunState.FAILED, "over_limit")
    assert record.attempts[-1].state is AttemptState.FAILED
    assert record.model_available and [one.step for one in run.checkpoints()] == [2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "sft", "--detach", "--multirun", "seed=1,2"], "starts one run"),
        (["run", "nope"], "no recipe 'nope'"),
        (["run", "sft", "--lr=3"], "no such flag. Settings are given as key=value, for example "),
        (["sft", "--lr=3"], "optimizer.learning_rate=3"),
        (["run", "sft", "--detach", "data.path=nowhere.jsonl"], "nowhere.jsonl"),
        (["runs", "wait", "7", "--root", "."], "neither a run directory"),
        (["runs", "list", "--root", ".", "--limit", "3"], "add --page"),
        (["runs", "list", "--root", ".", "--page", "--cursor", "x"], "no page gave this cursor"),
        (["runs", "list", "--root", ".", "--page", "--limit", "101"], "between 1 and 100"),
    ],
)
def test_what_cannot_be_is_said_and_exits_2(tmp_path, arguments, words):
    done = call(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr and not (tmp_path / "runs").exists()


def test_cancelled_before_its_first_step_a_recipe_opens_nothing(tmp_path):
    task = sft.prepare(configured(tmp_path, SMALL))
    run = start_run("sft", task)
    backend = FakeBackend()
    from tunebook.runs import only_writer

    with only_writer(run):
        run.lease(resumed_from_step=0, idempotency_key=None)
    assert shown_state(run) == "starting"
    cancel(run.path)
    with pytest.raises(RunCancelled):
        list(sft.train(task, backend, run))
    assert backend.calls == []
    record = assert_complete(run)
    assert (record.state, record.outcome.steps) == (RunState.CANCELLED, 0)
    assert not record.model_available and list(run.model_dir.iterdir()) == []


@pytest.mark.parametrize("at", [1, 3])
def test_the_step_in_flight_is_finished_and_saved(tmp_path, at):
    task = sft.prepare(configured(tmp_path, SMALL, plan__checkpoint_every=0))
    run = start_run("sft", task)
    backend = FakeBackend()
    for report in sft.train(task, backend, run):
        if report.step == at:
            cancel(run.path)
    record = assert_complete(run)
    assert (record.state, record.outcome.steps) == (RunState.CANCELLED, at)
    assert record.model_available
    assert [one.step for one in run.checkpoints()] == [at]


def test_asked_after_the_last_step_it_is_cancelled_with_all_steps(tmp_path):
    task = sft.prepare(configured(tmp_path, SMALL))
    run = start_run("sft", task)
    for report in sft.train(task, FakeBackend(), run):
        if report.step == report.planned_steps:
            assert not cancel(run.path).confirmed
    record = assert_complete(run)
    assert record.state is RunState.CANCELLED
    assert record.outcome.steps == record.outcome.planned_steps


# Signals and exceptions.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_stops_at_once_and_leaves_a_complete_record(tmp_path, number):
    process = subprocess.Popen(
        **command("run", "sft", *lines(LONG), cwd=tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    wait_until(lambda: list(tmp_path.glob("runs/sft/*/metrics.jsonl")), process=process)
    process.send_signal(number)
    assert process.stdout is not None
    while "a second signal" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(number)
    process.communicate(timeout=END_S)
    assert process.returncode == 128 + number
    run = only_run(tmp_path)
    record = assert_complete(run)
    assert record.state is RunState.CANCELLED
    newest = run.checkpoints()
    assert record.outcome.steps >= (newest[-1].step if newest else 0)


def test_an_exception_in_a_reward_is_recorded_without_its_traceback(tmp_path):
    reward = {"mine": {"_target_": "tests.recipes.test_runs_flow.breaks"}}
    settings = {
        **SMALL,
        "plan.epochs": None,
        "plan.max_steps": 2,
        "plan.batch_size": 2,
        "rollout.group_size": 2,
        "rollout.max_new_tokens": 4,
        "reward.functions": reward,
        "reward.on_error": "fail",
    }
    task = grpo.prepare(configured(tmp_path, settings, recipe="grpo"))
    run = start_run("grpo", task)
    with build_backend(task.config) as backend, pytest.raises(Exception, match="at last"):
        list(grpo.train(task, backend, run))
    record = assert_complete(run)
    assert (record.state, record.failure.code) == (RunState.FAILED, "reward")
    assert "at last" in record.failure.message and "File " not in record.failure.message
    assert "Traceback" in (run.path / "log.txt").read_text()


def breaks(completion):
    """A reward with a bug."""
    raise KeyError("at last")


# Limits.


def test_a_run_that_would_take_too_long_or_cost_too_much_is_refused(tmp_path):
    class Priced(FakeBackend):
        def estimate(self, workload):
            return Estimate(
                seconds=4.0, train_tokens=1, peak_memory_bytes=None, price=2.0, basis="a formula"
            )

    def admitted(**limits):
        admit(sft.prepare(configured(tmp_path, SMALL, **limits)), Priced())

    admitted(limits__max_seconds=4, limits__max_cost=2)
    with pytest.raises(
        AdmissionError, match=r"max_seconds=3: the 4 steps .* take 4 \(4.0 s; a form"
    ):
        admitted(limits__max_seconds=3)
    with pytest.raises(AdmissionError, match=r"max_cost=1.5: .* 2 \(2.00 US dollars") as raised:
        admitted(limits__max_cost=1.5)
    assert (raised.value.code, raised.value.category) == ("over_limit", "capacity")
    with pytest.raises(AdmissionError, match="cannot say beforehand"):
        admit(sft.prepare(configured(tmp_path, SMALL, limits__max_cost=1)), FakeBackend())
    # A program of one's own cannot pass a limit by, either.
    with pytest.raises(AdmissionError, match=r"Call tunebook\.launch\.admit"):
        start_run("sft", sft.prepare(configured(tmp_path, SMALL, limits__max_cost=9)))
    assert not (tmp_path / "runs").exists()


def test_only_the_steps_that_are_left_count(tmp_path):
    _, run = train_all(configured(tmp_path, SMALL), stop_after=2)
    task = sft.prepare(compose("sft", {"resume": str(run.path), "limits.max_seconds": 2}))

    class Slow(FakeBackend):
        def estimate(self, workload):
            return Estimate(
                seconds=4.0, train_tokens=1, peak_memory_bytes=None, price=None, basis="measured"
            )

    admit(task, Slow())
    task.config.limits.max_seconds = 1.9
    with pytest.raises(AdmissionError, match="the 2 steps to make"):
        admit(task, Slow())


def test_a_run_that_would_not_fit_onto_the_disk_is_refused(tmp_path):
    config = configured(tmp_path, SMALL, limits__min_free_bytes=1 << 60)
    with pytest.raises(AdmissionError) as raised:
        start_run("sft", sft.prepare(config))
    numbers = re.findall(r"[\d,]{4,}", str(raised.value))
    assert f"{1 << 60:,}" in numbers and len(numbers) >= 4
    assert not (tmp_path / "runs").exists()


def test_the_command_line_refuses_with_the_numbers_and_makes_nothing(tmp_path):
    done = call("run", "sft", *lines(SMALL, limits__max_seconds=0.001), cwd=tmp_path)
    assert done.returncode == 2
    assert "limits.max_seconds=0.001" in done.stderr and "measured" in done.stderr
    assert not (tmp_path / "runs").exists()


# A disk that fills, a folder that cannot be written.

LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
from recipes import sft
sys.exit(sft.main(sys.argv[2:]))
"""


def limited(tmp_path, num_bytes, *arguments):
    given = command(cwd=tmp_path)
    given["args"] = [sys.executable, "-c", LIMITED, str(num_bytes), *arguments]
    return subprocess.run(**given, capture_output=True, timeout=END_S, check=False)


def test_files_that_cannot_grow_fail_the_run_which_then_goes_on_bit_for_bit(tmp_path):
    """A limit on the size of a file stands for a disk that fills: it comes within a checkpoint."""
    _, whole = train_all(configured(tmp_path / "whole", SMALL))
    checkpoint = whole.checkpoints()[-1].ref.path / "optimizer.safetensors"
    done = limited(tmp_path, checkpoint.stat().st_size - 1, *lines(SMALL, runs_dir="runs"))
    assert done.returncode == 1
    assert "cannot be written" in done.stderr and "bytes" in done.stderr
    assert "Traceback" not in done.stderr
    run = only_run(tmp_path)
    record = assert_complete(run)
    assert (record.state, record.failure.category) == (RunState.FAILED, "system")
    assert run.checkpoints() == [] and list(run.checkpoints_dir.iterdir()) == []
    _, run = train_all(compose("sft", {"resume": str(run.path)}))
    assert_complete(run)
    name = "adapter_model.safetensors"
    assert (run.model_dir / name).read_bytes() == (whole.model_dir / name).read_bytes()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 12 MiB of its own, which only the administrator can make."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = mount("-t", "tmpfs", "-o", "size=12m", "tmpfs", folder)
    if made.returncode != 0:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def mount(*arguments):
    return subprocess.run(["mount", *map(str, arguments)], capture_output=True, check=False)


def test_a_disk_that_fills_keeps_the_last_checkpoint_and_the_record(small_disk, tmp_path):
    _, whole = train_all(configured(tmp_path / "whole", SMALL))
    task = sft.prepare(configured(small_disk, SMALL))
    run = start_run("sft", task)
    filler = small_disk / "filler"
    with build_backend(task.config) as backend, pytest.raises(Exception) as raised:
        for report in sft.train(task, backend, run):
            if report.step == 2:
                assert [one.step for one in run.checkpoints()] == [2]
                fill(filler)
    assert "cannot be written" in str(raised.value)
    kept = RunDir.open(run.path)
    assert [one.step for one in kept.checkpoints()] == [2]
    steps = [row["step"] for row in kept.metrics()]  # whole lines, as far as a block has room
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= 2
    assert run_status(run.path).record.state is RunState.FAILED  # recorded, or seen by its lock
    filler.unlink()
    _, resumed = train_all(compose("sft", {"resume": str(run.path)}))
    assert resumed.record.state is RunState.SUCCEEDED
    assert [row["step"] for row in resumed.metrics()] == [1, 2, 3, 4]
    name = "adapter_model.safetensors"
    assert (resumed.model_dir / name).read_bytes() == (whole.model_dir / name).read_bytes()


def fill(file):
    """Writes until no byte is left."""
    with file.open("wb", buffering=0) as opened:
        for size in (65536, 1):
            try:
                while opened.write(bytes(size)) == size:
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC


def test_a_read_only_folder_can_be_looked_at_and_is_refused_before_anything(small_disk):
    _, run = train_all(configured(small_disk, SMALL), stop_after=2)
    task = sft.prepare(compose("sft", {"resume": str(run.path)}))
    assert mount("-o", "remount,ro", small_disk).returncode == 0
    backend = FakeBackend()
    with pytest.raises(StorageError, match="cannot be written") as raised:
        list(sft.train(task, backend, start_run("sft", task)))
    assert str(run.path) in str(raised.value) and backend.calls == []
    shown = call("runs", "show", str(run.path), cwd=small_disk)
    assert shown.returncode == 0 and "was cancelled after 2 of 4" in shown.stdout
    with pytest.raises(StorageError):
        RunDir.create(small_disk / "runs", "sft", None)


# Secrets.

SENTINELS = {
    "SERVICE_API_KEY": "sentinel-value-of-the-service-key",
    "HF_TOKEN": "hf_SentinelSentinelSentinelSentinel01",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "DB_PASSWORD": "sentinel-value-of-the-password",
}

LEAKING = """
import os, sys, warnings
SECRETS = ("SERVICE_API_KEY", "HF_TOKEN", "WANDB_API_KEY", "DB_PASSWORD")
calls = [0]

def loss(logprobs, *, token_weights, note):
    calls[0] += 1
    for name in SECRETS:
        print("printed", os.environ[name])
        print("written", os.environ[name], file=sys.stderr)
        warnings.warn(f"warned {os.environ[name]} {calls[0]}")
    if calls[0] > 3:
        raise RuntimeError("raised " + " ".join(os.environ[name] for name in SECRETS))
    return -(logprobs * token_weights).sum(), {}
"""


@pytest.fixture
def planted(tmp_path):
    """How commands are called where keys are in the environment and a loss tells them all."""
    (tmp_path / "leaking.py").write_text(LEAKING)
    return {"cwd": tmp_path, "HOME": str(tmp_path / "home"), **SENTINELS}


def assert_no_sentinel(tmp_path, *texts):
    written = [each for each in (tmp_path / "runs").rglob("*") if each.is_file()]
    assert len(written) > 10
    for name, secret in SENTINELS.items():
        found = [str(each) for each in written if secret.encode() in each.read_bytes()]
        assert found == [], name
        assert not any(secret in str(each) for each in written), name
        assert not any(secret in text for text in texts), name


def test_no_planted_key_is_in_anything_that_a_run_writes(tmp_path, planted):
    """Keys in the environment, the run's name, the config, a tracker, prints and an exception."""
    key, password = SENTINELS["SERVICE_API_KEY"], SENTINELS["DB_PASSWORD"]
    arguments = [*lines(SMALL, plan__epochs=3), "loss._target_=leaking.loss"]
    inside = [f"name={key}", f"loss.note={password}", "tracker=wandb", "tracker.mode=offline"]
    inside.append(f"tracker.tags=[{key}]")
    refused = call("run", "sft", *arguments, *inside, "--detach", **planted)
    assert refused.returncode == 2 and not (tmp_path / "runs").exists()
    assert "loss.note" in refused.stderr and "holds a secret" in refused.stderr
    done = call("run", "sft", *arguments, *inside, **planted)
    assert done.returncode == 1, done.stderr
    assert "printed [redacted]" in done.stdout and "written [redacted]" in done.stderr
    run = only_run(tmp_path)
    assert "raised [redacted]" in run.record.failure.message
    texts = [refused.stdout, refused.stderr, done.stdout, done.stderr]
    for asked in (["show", "1"], ["show", "1", "--json"], ["follow", "1"]):
        shown = call("runs", *asked, **planted)
        texts += [shown.stdout, shown.stderr]
    assert_no_sentinel(tmp_path, *texts)


def test_no_planted_key_is_in_what_a_process_in_the_background_prints(tmp_path, planted):
    arguments = [*lines(SMALL), "loss._target_=leaking.loss", "loss.note=x"]
    done = call("run", "sft", *arguments, "--detach", **planted)
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path)
    status = wait(run.path, poll_s=0.05, timeout_s=END_S)
    output = (run.path / "output.txt").read_text()
    assert status.record.failure.code == "internal", output
    assert "printed [redacted]" in output and "written [redacted]" in output
    assert_no_sentinel(tmp_path, done.stdout, done.stderr)
