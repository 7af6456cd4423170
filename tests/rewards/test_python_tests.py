"""Unit tests of code in a completion."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.rewards.processes import children, is_alive, wait_until
from tests.rewards.scorers import HERE, scorer_of
from tunebook.errors import ConfigError, RewardError
from tunebook.rewards import NotedReward, PythonTests
from tunebook.scoring import Sample

LIMITS = {"cpu_s": 2, "wall_s": 20, "memory_mb": 512, "file_mb": 1}
TESTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0"
GOOD = "def add(a, b):\n    return a + b\n"


def reward_of(code, tests=TESTS, **limits):
    reward = PythonTests(allow_running_code=True, **{**LIMITS, **limits})
    return asyncio.run(reward(code, tests=tests))


def note_of(reward):
    return reward.note if isinstance(reward, NotedReward) else None


@pytest.mark.parametrize(
    "completion",
    [
        GOOD,
        f"Here it is:\n```python\n{GOOD}```\nDone.",
        f"```\nwrong\n```\nBetter:\n```py\n{GOOD}```",
        f"{GOOD}\nif __name__ == '__main__':\n    print(add(int(input()), 1))",
        f"print('x' * 10**6)\n{GOOD}",
    ],
)
def test_code_that_passes_scores_one(completion):
    assert reward_of(completion) == 1.0
    assert reward_of(completion, tests=TESTS.splitlines()) == 1.0


@pytest.mark.parametrize(
    "code",
    [
        "def add(a, b):\n    return a - b",
        "def add(a, b):\n    return 3",
        "def add(a, b:",
        "raise KeyboardInterrupt",
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "print('ready')\nimport os\nos.write(1, b'ready')",
        f"{GOOD}\nimport os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
        "\ud800",
        "x = (" * 1000,
        "(" * 10**6,
    ],
)  # fmt: skip
def test_code_that_does_not_pass_scores_zero(code):
    reward = reward_of(code)
    assert (reward, note_of(reward)) == (0.0, None)


@pytest.mark.parametrize("completion", ["", " \n", "```python\n```"])
def test_no_code_is_counted_apart(completion):
    reward = reward_of(completion)
    assert (reward, note_of(reward)) == (0.0, "no_answer")


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(1000)"])
def test_code_that_never_ends_is_wrong(code):
    reward = reward_of(code, cpu_s=1, wall_s=2)
    assert (reward, note_of(reward)) == (0.0, "time_limit")


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has no limit of address space")
def test_memory_is_limited():
    code = f"{GOOD}\nbytearray(400 * 2**20)"
    assert (reward_of(code, memory_mb=256), reward_of(code, memory_mb=1024)) == (0.0, 1.0)


def test_files_are_limited_and_the_folder_goes(tmp_path):
    code = f"{GOOD}\nimport os\nopen({str(tmp_path / 'where')!r}, 'w').write(os.getcwd())\n"
    assert reward_of(code + "open('x', 'wb').write(b'x' * 2**19)") == 1.0
    assert reward_of(code + "open('x', 'wb').write(b'x' * 2**21)") == 0.0
    folder = (tmp_path / "where").read_text()
    assert folder != os.getcwd() and not Path(folder).exists()


def test_the_environment_is_not_inherited(monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "s3cr3t-s3cr3t")
    code = (
        f"import os, sys\nassert 's3cr3t' not in str(os.environ)\nassert sys.argv[1:] == []\n{GOOD}"
    )
    assert reward_of(code) == 1.0


def test_processes_that_it_starts_are_ended(tmp_path):
    """Where it can start any: without being root it cannot."""
    file = tmp_path / "pid"
    code = f"{GOOD}\nimport os\nos.system('sleep 1000 & echo $! > {file}')"
    assert reward_of(code) == 1.0
    if file.exists() and file.read_text().strip():
        pid = int(file.read_text())
        assert wait_until(lambda: not is_alive(pid))


def test_code_ends_with_the_call_that_ran_it(tmp_path):
    """Where something else ends the run: here another reward, in the middle of it."""
    before = children()
    file = tmp_path / "pid"
    code = f"import os, time\nopen({str(file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(1000)"
    functions = {
        "tests": {
            "_target_": "tunebook.rewards.PythonTests", "allow_running_code": True,
            **LIMITS, "wall_s": 500,
        },
        "raising": {"_target_": HERE + "raises_when_there", "file": str(file)},
    }  # fmt: skip
    scorer = scorer_of(functions, columns=("tests",), timeout_s=600, fail=True)
    with pytest.raises(RewardError, match="raising"), scorer:
        scorer.score([Sample(code, {"tests": TESTS})])
    pid = int(file.read_text())
    assert wait_until(lambda: not is_alive(pid))
    assert children() == before


def test_it_has_to_be_allowed():
    with pytest.raises(ConfigError) as raised:
        PythonTests(allow_running_code=False, **LIMITS)
    for word in ("allow_running_code", "no sandbox", "network", "files", "container"):
        assert word in str(raised.value)


@pytest.mark.parametrize("name", LIMITS)
def test_limits_have_to_be_positive(name):
    with pytest.raises(ConfigError, match=f"{name}=0"):
        PythonTests(allow_running_code=True, **{**LIMITS, name: 0})


@pytest.mark.parametrize("tests", ["", " ", []])
def test_a_row_without_tests_is_an_error(tests):
    with pytest.raises(ValueError, match="any code would pass"):
        reward_of(GOOD, tests=tests)
