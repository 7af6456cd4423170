import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.resources.server import ResourceServer, running, until
from tunebook.backends.together.service import TogetherService
from tunebook.resources import Ledger

KEY = "tgp_v1_" + "Ab3" * 12


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A `TUNEBOOK_HOME` without a ledger, and an environment with a key of the service."""
    folder = tmp_path / "home"
    monkeypatch.setenv("TUNEBOOK_HOME", str(folder))
    monkeypatch.setenv("TOGETHER_API_KEY", KEY)
    monkeypatch.delenv("TOGETHER_BASE_URL", raising=False)
    return folder


@pytest.fixture
def ledger(home) -> Ledger:
    return Ledger.of_user()


@pytest.fixture
def server():
    return ResourceServer()


@pytest.fixture
def url(server, home, monkeypatch):
    with running(server) as address:
        monkeypatch.setenv("TOGETHER_BASE_URL", address)
        yield address
        server.reply.set()
        try:
            until(lambda: not watchdogs(home))
        finally:
            for dog in watchdogs(home):
                os.kill(dog, signal.SIGKILL)


@pytest.fixture
def service(home, url) -> TogetherService:
    return TogetherService(url)


@pytest.fixture
def own_process():
    """Starts processes that own a resource at an address; see `tests.resources.owner`."""
    processes = []

    def start(url, *options):
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.resources.owner", url, *options],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        heard(process, "pid")
        return process

    yield start
    for process in processes:
        with process:
            process.kill()


@pytest.fixture
def owner(home, url, own_process):
    """The same at the address of the test's own service."""
    return partial(own_process, url)


def heard(process, word):
    """The rest of the line that a process says next with this word at its beginning."""
    for line in process.stdout:
        if line.startswith(word):
            return line.removeprefix(word).strip()
    raise AssertionError(f"the process ended without saying {word!r}")


def logged(ledger):
    """What the watchdogs of a ledger have said."""
    return ledger.log_path.read_text() if ledger.log_path.exists() else ""


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait()


def watchdogs(home):
    """Ids of the watchdogs that run for the ledger of a home."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if b"resources.watchdog" in command and os.fsencode(home) in command:
            found.append(int(folder.name))
    return found
