"""A hostile hour for the server: `python -m tests.serve.fuzz --minutes 10 --seed 0`.

Several clients send drawn requests (tests.serve.hostile) in drawn ways (whole, in pieces, cut off,
in broken chunks), others hold slow connections. The server has to answer each whole request in
time, in JSON, and never with a 5xx; no operation may end in an internal error; memory and open
files may not grow; and before, during and after it a normal training gives the same numbers.
"""

import argparse
import contextlib
import http.client
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.backends.tiny import write_model
from tests.serve.hostile import (
    KINDS,
    RESOURCES,
    SESSIONS,
    Attempt,
    World,
    draw_attempt,
)
from tests.serve.server import ServerProcess

SLOWEST_S = 40.0
"""Longest that an answer may take; the server holds a poll for some 20 s."""
MAX_GROWTH_MB = 80.0
WARM_S = 150.0
"""The allocators of Python and torch keep what the largest requests needed; they have met those by
then, so that memory is compared in longer runs only."""
MAX_NEW_FILES = 10
SLOW_CLIENTS = 12
GARBAGE = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    b"GET /health\r\n\r\n",
    b"GET /health HTTP/9.9\r\nHost: a\r\n\r\n",
    b"POST /v1/rl/training-sessions HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/rl/training-sessions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    b"POST /v1/rl/training-sessions HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/rl/training-sessions HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\n{}",
    b"GET /v1/rl/checkpoints HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 200_000 + b"\r\n\r\n",
    b"GET /v1/rl/checkpoints HTTP/1.1\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
    b"GET /" + b"z" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    b"\r\n" * 1000,
    bytes(5000),
)


@dataclass
class Answer:
    status: int | None
    """None: the server closed the connection without an answer."""
    body: bytes = b""


class NotStrict(ValueError):
    """JSON with NaN or Infinity in it."""


def strict_json(body: bytes) -> object:
    def refuse(word: str):
        raise NotStrict(word)

    return json.loads(body, parse_constant=refuse)


def exchange(
    address: tuple[str, int],
    pieces: list[bytes],
    *,
    method: str,
    pause_s: float = 0.0,
    cut: bool = False,
) -> Answer:
    """The answer to some bytes; `cut`: no more will come, and the client says so."""
    with contextlib.closing(socket.create_connection(address, timeout=SLOWEST_S)) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
                if pause_s:
                    time.sleep(pause_s)
            if cut:
                connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # refused before the end of the body: the answer may be there all the same
        response = http.client.HTTPResponse(connection, method=method)
        try:
            response.begin()
            return Answer(response.status, response.read())
        except TimeoutError:
            raise
        except (OSError, http.client.HTTPException):
            return Answer(None)
        finally:
            response.close()


@dataclass
class Fuzz:
    """One attack on one server."""

    address: tuple[str, int]
    pid: int
    model: str
    seed: int
    world: World = field(default_factory=World)
    findings: list[str] = field(default_factory=list)
    statuses: Counter = field(default_factory=Counter)
    ends: Counter = field(default_factory=Counter)
    """How operations of each kind ended."""
    running: bool = True

    def find(self, text: str) -> None:
        if len(self.findings) < 50:
            self.findings.append(text)
            print(f"FOUND {text}", file=sys.stderr, flush=True)

    def ask(self, method: str, path: str, body: object = None) -> dict:
        """The JSON that the server answers to a right request."""
        content = b"" if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Authorization": "Bearer any"}
        if "/operations/" in path and method == "POST":
            headers["Idempotency-Key"] = os.urandom(8).hex()
        connection = http.client.HTTPConnection(*self.address, timeout=SLOWEST_S)
        with contextlib.closing(connection):
            connection.request(method, path, content, headers)
            response = connection.getresponse()
            answer = response.read()
        assert 200 <= response.status < 300, f"{method} {path}: {response.status} {answer[:500]!r}"
        return json.loads(answer)

    def done(self, session: str, kind: str, body: object = None) -> dict:
        """The output of an operation."""
        path = f"{SESSIONS}/{session}/operations/{kind}"
        operation = self.ask("POST", path, body)
        while not operation["status"].endswith(("COMPLETED", "FAILED")):
            operation = self.ask("GET", f"{path}/{operation['id']}")
        assert operation["status"].endswith("COMPLETED"), operation
        return operation["output"]

    def open_resource(self) -> str:
        body = {
            "base_model": self.model,
            "lora_enabled": True,
            "compute_config": {"num_generator_replicas": 1},
        }
        resource = self.ask("POST", RESOURCES, body)
        while resource["status"] != "MODEL_RESOURCES_STATUS_READY":
            resource = self.ask("GET", f"{RESOURCES}/{resource['id']}")
        return resource["id"]

    def open_session(self, resource: str) -> str:
        lora = {"rank": 4, "alpha": 8, "seed": 5, "train_unembed": False}
        body = {"model_resources_id": resource, "lora_config": lora}
        session = self.ask("POST", SESSIONS, body)
        while session["status"] != "TRAINING_SESSION_STATUS_RUNNING":
            session = self.ask("GET", f"{SESSIONS}/{session['id']}")
        return session["id"]

    def training(self, resource: str) -> list[float]:
        """Losses of a short normal training, which depend on nothing but the base model."""
        session = self.open_session(resource)
        losses = []
        for step in range(4):
            tokens = [(7 * step + 3 * index) % 128 for index in range(12)]
            inputs = {
                "target_tokens": {"data": tokens[1:], "dtype": "int64"},
                "weights": {"data": [1 / 11] * 11, "dtype": "float32"},
            }
            chunks = [{"encoded_text": {"tokens": tokens[:-1]}}]
            samples = [{"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs}]
            body = {"loss": {"type": "LOSS_TYPE_CROSS_ENTROPY"}, "samples": samples}
            losses.append(self.done(session, "forward-backward", body)["loss"])
            adam = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
            self.done(session, "optim-step", {"adam_params": {**adam, "grad_clip_norm": 0.0}})
        self.ask("POST", f"{SESSIONS}/{session}/stop")
        return losses

    def attack(self, worker: int) -> None:
        rng = Random(f"{self.seed}/{worker}")
        while self.running:
            if rng.random() < 0.02:
                self._throw(rng)
            else:
                attempt = draw_attempt(rng, self.world, self.model)
                try:
                    self._deliver(rng, attempt)
                except TimeoutError:
                    self.find(f"no answer within {SLOWEST_S:g} s: {attempt}")
                except ConnectionRefusedError:
                    self.find(f"no connection: {attempt}")
                    self.running = False

    def _throw(self, rng: Random) -> None:
        garbage = rng.choice(GARBAGE)
        try:
            answer = exchange(self.address, [garbage], method="GET", cut=True)
        except TimeoutError:
            self.find(f"no answer to garbage within {SLOWEST_S:g} s: {garbage[:80]!r}")
            return
        self.statuses[answer.status] += 1
        if answer.status is not None and answer.status >= 500:
            self.find(f"{answer.status} for garbage {garbage[:80]!r}: {answer.body[:300]!r}")

    def _is_no_http(self, attempt: Attempt, request: bytes) -> bool:
        """Whether a request is refused before anything of ours sees it, when it comes at once."""
        answer = exchange(self.address, [request], method=attempt.method)
        return answer.status == 400 and b"Invalid HTTP request" in answer.body

    def _deliver(self, rng: Random, attempt: Attempt) -> None:
        body, way = attempt.body, rng.random()
        head = attempt.head(length=len(body))
        chunked = Attempt(
            attempt.method,
            attempt.target,
            (*attempt.headers, ("Transfer-Encoding", "chunked")),
            body,
            attempt.what,
        ).head(length=None)
        middle = rng.randrange(len(body) + 1)
        halves = [part for part in (body[:middle], body[middle:]) if part]
        chunks = [b"%x\r\n%s\r\n" % (len(part), part) for part in halves]
        whole, cut, pause_s = True, False, 0.0
        if way < 0.9:
            pieces = [head + body]
        elif way < 0.93:
            pieces = [chunked, *chunks, b"0\r\n\r\n"]
        elif way < 0.95:
            broken = rng.choice((b"zz\r\nab\r\n", b"5\r\nab", b"ffffffffffffffffff\r\n", b"-1\r\n"))
            pieces, whole, cut = [chunked, *chunks, broken], False, True
        elif way < 0.97:
            pieces, whole, cut = [attempt.head(length=len(body) + 10), body], False, True
        elif way < 0.98:
            size = max(1, len(head + body) // 6)
            sent = head + body
            pieces = [sent[start : start + size] for start in range(0, len(sent), size)]
            pause_s = 0.05
        else:
            with contextlib.closing(socket.create_connection(self.address)) as connection:
                connection.sendall((head + body)[: rng.randrange(len(head + body))])
            return
        start = time.monotonic()
        answer = exchange(self.address, pieces, method=attempt.method, pause_s=pause_s, cut=cut)
        took = time.monotonic() - start
        self.statuses[answer.status] += 1
        if took > SLOWEST_S:
            self.find(f"took {took:.1f} s: {attempt}")
        if answer.status is None:
            if len(pieces) > 1 and self._is_no_http(attempt, head + body):
                return  # refused at its first bytes, and closed before the last ones were sent
            if whole and len(body) < 60_000 and len(head) < 60_000:
                self.find(f"closed without an answer: {attempt}")
        else:
            self._judge(attempt, answer)

    def _judge(self, attempt: Attempt, answer: Answer) -> None:
        assert answer.status is not None
        if answer.status >= 500:
            self.find(f"{answer.status}: {attempt}: {answer.body[:600]!r}")
        is_file = "/files/" in attempt.target
        is_redirect = 300 <= answer.status < 400
        is_api = attempt.target.startswith("/v1/") and attempt.method != "HEAD"
        if is_file or is_redirect or not is_api:
            return
        if answer.body == b"Invalid HTTP request received.":
            return
        try:
            content = strict_json(answer.body)
        except ValueError as error:
            self.find(f"{answer.status} and no JSON ({error}): {attempt}: {answer.body[:200]!r}")
            return
        if answer.status >= 400:
            error = content.get("error") if isinstance(content, dict) else None
            if not isinstance(error, dict) or not error.get("message"):
                self.find(f"{answer.status} without a message: {attempt}: {answer.body[:200]!r}")
        elif isinstance(content, dict):
            self._learn(attempt, content)

    def _learn(self, attempt: Attempt, content: dict) -> None:
        if attempt.what == "payload":
            self.world.learn("payload", content.get("payload_id"))
            self.world.learn("url", content.get("upload_url"))
        elif attempt.what:
            self.world.learn(attempt.what, content.get("id"))
        self.world.learn("url", content.get("download_url"))
        files = content.get("data")
        for file in files if isinstance(files, list) else []:
            if isinstance(file, dict):
                self.world.learn("url", file.get("url"))
        error = content.get("error")
        if attempt.what in KINDS:
            code = str(error.get("code")) if isinstance(error, dict) else content.get("status")
            self.ends[attempt.what, str(code).rpartition("OPERATION_")[2]] += 1
            if attempt.method == "POST":
                path = attempt.target.partition("?")[0]
                self.world.learn("operation", f"{path}/{content.get('id')}")
        if isinstance(error, dict) and "INTERNAL_ERROR" in str(error.get("code")):
            self.find(f"internal error of an operation: {attempt}: {error}")
        output = content.get("output")
        checkpoint = output.get("checkpoint") if isinstance(output, dict) else None
        if isinstance(checkpoint, dict):
            self.world.learn("checkpoint", checkpoint.get("id"))

    def tend(self) -> None:
        """Keeps something alive that can be attacked: a resource with two sessions."""
        listed = self.ask("GET", f"{RESOURCES}?status=MODEL_RESOURCES_STATUS_READY&limit=100")
        with self.world.lock:
            ours = set(self.world.ids["resource"])
        ready = [one["id"] for one in listed["data"] if one["id"] in ours]
        for resource in ready[4:]:
            self.ask("POST", f"{RESOURCES}/{resource}/stop?force=true")
        resource = ready[0] if ready else self.open_resource()
        self.world.learn("resource", resource)
        status = "TRAINING_SESSION_STATUS_RUNNING"
        path = f"{SESSIONS}?model_resources_id={resource}&status={status}&limit=100"
        sessions = [one["id"] for one in self.ask("GET", path)["data"]]
        for session in sessions[3:]:
            self.ask("POST", f"{SESSIONS}/{session}/stop")
        sessions += [self.open_session(resource) for _ in range(2 - len(sessions))]
        for session in sessions[:3]:
            self.world.learn("session", session)

    def poll_operations(self) -> None:
        """Looks at how the latest operations ended."""
        with self.world.lock:
            targets = list(self.world.ids["operation"])
        for target in targets:
            headers = (("Authorization", "Bearer any"),)
            attempt = Attempt("GET", target, headers, b"", target.split("/")[-2])
            pieces = [attempt.head(length=None)]
            self._judge(attempt, exchange(self.address, pieces, method="GET"))

    def slow_clients(self) -> None:
        """Connections that send a header line a second, for ever."""
        with contextlib.ExitStack() as stack:
            connections = []
            for _ in range(SLOW_CLIENTS):
                connection = socket.create_connection(self.address, timeout=SLOWEST_S)
                stack.enter_context(contextlib.closing(connection))
                connection.sendall(b"POST /v1/rl/model-resources HTTP/1.1\r\n")
                connections.append(connection)
            while self.running:
                time.sleep(0.5)
                for connection in list(connections):
                    try:
                        connection.sendall(b"X-Slow: 1\r\n")
                    except OSError:  # the server has had enough of it, rightly
                        connections.remove(connection)

    def memory_mb(self) -> float:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


def make_server(folder: Path) -> ServerProcess:
    """A server over a model of 256 positions: the longest completion takes a second or so."""
    return ServerProcess(folder / "home", model=write_model(folder / "model", seed=0, tied=True))


def run_fuzz(server: ServerProcess, *, seed: int, seconds: float, workers: int) -> Fuzz:
    """The attack, done; `findings` of it should be empty."""
    host, port = server.url.removeprefix("http://").split(":")
    fuzz = Fuzz((host, int(port)), server.pid, server.model, seed)
    witness = fuzz.open_resource()
    expected = fuzz.training(witness)
    files = fuzz.open_files()
    fuzz.tend()
    threads = [threading.Thread(target=fuzz.attack, args=[worker]) for worker in range(workers)]
    threads.append(threading.Thread(target=fuzz.slow_clients))
    for thread in threads:
        thread.start()
    begin, memory = time.monotonic(), 0.0
    try:
        while fuzz.running and (elapsed := time.monotonic() - begin) < seconds:
            fuzz.tend()
            fuzz.poll_operations()
            _compare(fuzz, fuzz.training(witness), expected, "during the attack")
            fuzz.ask("GET", "/health")
            print(f"{elapsed:.0f} s: {fuzz.memory_mb():.0f} MB, {fuzz.open_files()} files")
            if elapsed < seconds / 2:
                memory = max(memory, fuzz.memory_mb())
            time.sleep(0.5)
    finally:
        fuzz.running = False
        for thread in threads:
            thread.join()
    _compare(fuzz, fuzz.training(witness), expected, "after the attack")
    fuzz.ask("GET", "/health")
    time.sleep(1.0)  # the server notices that connections were closed
    grown, new = fuzz.memory_mb() - memory, fuzz.open_files() - files
    print(f"{fuzz.statuses.total()} requests: {sorted(fuzz.statuses.items(), key=str)}")
    print(f"operations: {sorted(fuzz.ends.items())}")
    print(f"memory {memory:.0f} MB, grown by {grown:.1f} MB; open files {files}, {new} more")
    if seconds / 2 > WARM_S and grown > MAX_GROWTH_MB:
        fuzz.find(f"memory grew by {grown:.1f} MB in the second half")
    if new > MAX_NEW_FILES:
        fuzz.find(f"{new} files more are open than at the beginning")
    return fuzz


def _compare(fuzz: Fuzz, losses: list[float], expected: list[float], when: str) -> None:
    if any(
        abs(loss - right) > 1e-4 * abs(right) for loss, right in zip(losses, expected, strict=True)
    ):
        fuzz.find(f"a training {when} gave {losses}, not {expected}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=6)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # no server is left behind
    with tempfile.TemporaryDirectory() as folder:
        server = make_server(Path(folder)).start()
        try:
            fuzz = run_fuzz(
                server,
                seed=options.seed,
                seconds=options.minutes * 60,
                workers=options.workers,
            )
        finally:
            print(server.log[-3000:], file=sys.stderr)
            code = server.stop()
    print(f"{len(fuzz.findings)} findings; the server ended with {code}")
    sys.exit(1 if fuzz.findings or code else 0)


if __name__ == "__main__":
    main()
