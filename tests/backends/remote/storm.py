"""Trainings through a server that misbehaves or dies, and by clients that die.

    python -m tests.backends.remote.storm faults --steps 1000
    python -m tests.backends.remote.storm kill-server --kills 20
    python -m tests.backends.remote.storm kill-client --kills 20

Each trains with `backend=together`, prints what happened, and fails unless every step was made
once, the adapter has the bytes of an undisturbed run, and nothing is left that may bill.
The SDK waits 1 to 10 s before it tries again, unless a server says how long in `retry-after-ms`:
most of the faults here do, with a few milliseconds, so that 1,000 steps take minutes.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random

import httpx

from recipes import sft
from tests.running import train_all
from tests.serve.server import ServerProcess, wait_until
from tunebook.backends.together.service import TogetherService
from tunebook.compose import compose
from tunebook.launch import start_run
from tunebook.opening import build_backend
from tunebook.resources import Ledger
from tunebook.runs import Preparation, RunDir, RunState

OPERATIONS = "/v1/rl/training-sessions/*"
"""Creations of resources and sessions carry no idempotency key, so they are left alone."""


def fault_plan(seed: int) -> dict:
    """More than one lost, late or refused answer in three; never more in a row than are retried."""
    faults = [
        {"fault": "status", "status": 429, "retry_after_s": 0.005, "share": 0.15},
        {"fault": "status", "status": 503, "retry_after_s": 0.005, "share": 0.12},
        {"fault": "status", "status": 500, "share": 0.004},
        {"fault": "status", "status": 429, "share": 0.004},
        {"fault": "drop_before", "share": 0.008},
        {"fault": "drop_after", "share": 0.012},
        {"fault": "delay", "delay_s": 0.02, "share": 0.12},
    ]
    rules = [{**fault, "path": OPERATIONS} for fault in faults]
    return {"seed": seed, "max_in_a_row": 4, "faults": rules}


@dataclass(frozen=True)
class Result:
    run: RunDir
    adapter: bytes
    disturbed: Counter
    """What happened how often."""


def overrides(folder: Path, server: ServerProcess, *, steps: int, checkpoint_every: int) -> dict:
    return {
        "backend": "together",
        "backend.base_url": server.url,
        "runs_dir": str(folder / "runs"),
        "data.limit": 40,
        "eval.fraction": 0.0,
        "samples.num_prompts": 0,
        "plan.batch_size": 2,
        "plan.epochs": None,
        "plan.max_steps": steps,
        "plan.checkpoint_every": checkpoint_every,
        "optimizer.learning_rate": 1e-3,
        "lora.rank": 4,
    }


def adapter_of(run: RunDir) -> bytes:
    run.reload()
    assert run.record.state is RunState.SUCCEEDED, run.record
    return (run.model_dir / "adapter_model.safetensors").read_bytes()


def undisturbed(folder: Path, server: ServerProcess, *, steps: int) -> bytes:
    """The adapter of a training through a server without faults."""
    settings = overrides(folder, server, steps=steps, checkpoint_every=0)
    _, run = train_all(compose("sft", settings))
    return adapter_of(run)


def check_server_steps(server: ServerProcess, steps: int) -> None:
    """One session made all the steps.

    There may be others that never made one: a create call has no idempotency key, so that the one
    that is sent again after its answer was lost makes a second session.
    """
    url = f"{server.url}/v1/rl/training-sessions?limit=100"
    answer = httpx.get(url, headers={"Authorization": "Bearer any"})
    assert answer.status_code == 200, answer.text
    *unused, used = sorted(answer.json()["data"], key=lambda session: int(session["step"]))
    assert int(used["step"]) == int(used["policy_state"]["trainer_step"]) == steps, used
    assert all(int(session["step"]) == 0 for session in unused), unused


def check_steps(run: RunDir, steps: int) -> None:
    assert [row["step"] for row in run.metrics()] == list(range(1, steps + 1))


def check_nothing_bills(server: ServerProcess) -> None:
    """The ledger is empty, once the watchdogs of dead clients are through, and so is the server."""
    wait_until(lambda: not Ledger.of_user().open_entries(), timeout=60)
    assert TogetherService(server.url).list_live() == []


def through_faults(folder: Path, *, seed: int, steps: int) -> Result:
    """A training whose requests get lost, late or refused."""
    with ServerProcess(folder / "home", faults=fault_plan(seed)) as server:
        settings = overrides(folder, server, steps=steps, checkpoint_every=max(1, steps // 4))
        _, run = train_all(compose("sft", settings))
        check_steps(run, steps)
        check_server_steps(server, steps)
        check_nothing_bills(server)
        found = re.findall(r"fault: (\w+) \((\d+)\)", server.log)
        assert server.stop() == 0, server.log
    disturbed = Counter(name for name, _ in found)
    disturbed["requests"] = max(int(count) for _, count in found)
    assert 3 * len(found) >= disturbed["requests"], disturbed
    assert {"status", "drop_before", "drop_after", "delay"} <= set(disturbed) or steps < 200
    return Result(run, adapter_of(run), disturbed)


def through_server_kills(folder: Path, *, seed: int, steps: int, kills: int) -> Result:
    """A training whose server is killed at random moments and started again on its folder."""
    rng = Random(seed)
    at = sorted(rng.sample(range(steps), kills))
    dying: list[threading.Thread] = []
    with ServerProcess(folder / "home") as server:

        def kill_soon(delay_s: float) -> None:
            time.sleep(delay_s)
            server.kill()
            server.start()

        def disturb(step: int) -> None:
            if step in at:
                for thread in dying:
                    thread.join()
                dying.append(threading.Thread(target=kill_soon, args=[rng.uniform(0, 0.15)]))
                dying[-1].start()

        settings = overrides(folder, server, steps=steps, checkpoint_every=5)
        config = compose("sft", settings)
        task = sft.prepare(config)
        run = start_run("sft", task)
        disturb(0)
        with build_backend(config) as backend:
            for report in sft.train(task, backend, run):
                disturb(report.step)
        for thread in dying:
            thread.join()
        check_steps(run, steps)
        check_server_steps(server, steps)
        check_nothing_bills(server)
        assert server.stop() == 0, server.log
    return Result(run, adapter_of(run), Counter({"kills of the server": len(dying)}))


def through_client_kills(folder: Path, *, seed: int, steps: int, kills: int) -> Result:
    """A training whose process is killed at random moments, and resumed each time."""
    rng = Random(seed)
    disturbed: Counter = Counter()
    with ServerProcess(folder / "home") as server:
        settings = overrides(folder, server, steps=steps, checkpoint_every=2)
        for _ in range(kills):
            with start_client(settings, folder) as process:
                disturbed[kill_at_random(process, rng, folder)] += 1
        with start_client(settings, folder) as process:
            assert process.wait() == 0, "a client failed that nobody had killed"
        run = newest_run(folder)
        assert run is not None
        check_steps(run, steps)
        check_nothing_bills(server)
        assert server.stop() == 0, server.log
    return Result(run, adapter_of(run), disturbed)


def newest_run(folder: Path) -> RunDir | None:
    """The run, once it is so far that it can be resumed."""
    for path in sorted(folder.glob("runs/sft/*/run.json"), reverse=True):
        run = RunDir.open(path.parent)
        if run.record.preparation is Preparation.VERIFIED:
            return run
    return None


def start_client(settings: dict, folder: Path) -> subprocess.Popen:
    run = newest_run(folder)
    values = settings if run is None else {"resume": run.path}
    arguments = [f"{key}={'null' if value is None else value}" for key, value in values.items()]
    with (folder / "client.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "recipes.sft", *arguments], stdout=log, stderr=log
        )


def kill_at_random(process: subprocess.Popen, rng: Random, folder: Path) -> str:
    """Kills a client a random time after a random sign of life; what that hit."""
    moment = rng.choice(("start", "opening", "step", "step"))
    before = lived(folder)
    while process.poll() is None and moment != "start":
        events, steps = lived(folder)
        if (steps if moment == "step" else events) > before[moment == "step"]:
            break
        time.sleep(0.005)
    time.sleep(rng.uniform(0, 4.0 if moment == "start" else 0.3))
    ended = process.poll() is not None
    process.kill()
    process.wait()
    return "client had ended before its kill" if ended else f"kill of the client, {moment}"


def lived(folder: Path) -> tuple[int, int]:
    """How many events and steps a run has recorded."""
    run = newest_run(folder)
    return (len(run.events()), len(run.metrics())) if run else (0, 0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["faults", "kill-server", "kill-client"])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # no server is left behind
    steps = options.steps or {"faults": 1000, "kill-server": 60, "kill-client": 40}[options.what]
    with tempfile.TemporaryDirectory() as name:
        os.environ["TUNEBOOK_HOME"] = f"{name}/tunebook"
        with ServerProcess(Path(name) / "calm") as server:
            expected = undisturbed(Path(name) / "calm", server, steps=steps)
        begin, folder, seed = time.monotonic(), Path(name) / "disturbed", options.seed
        if options.what == "faults":
            result = through_faults(folder, seed=seed, steps=steps)
        elif options.what == "kill-server":
            result = through_server_kills(folder, seed=seed, steps=steps, kills=options.kills)
        else:
            result = through_client_kills(folder, seed=seed, steps=steps, kills=options.kills)
    print(f"{steps} steps in {time.monotonic() - begin:.0f} s; {dict(result.disturbed)}")
    same = result.adapter == expected
    print("the adapter has the bytes of an undisturbed run" if same else "the adapter DIFFERS")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
