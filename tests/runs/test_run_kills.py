"""Killed runs that go on end as a run that nobody killed, bit for bit; see `kills`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

MOMENTS = 6
"""Of each recipe; `python -m tests.runs.kills` makes 50, and any number."""


@pytest.mark.parametrize("recipe", ["sft", "dpo", "grpo"])
def test_kill_9_at_seeded_moments_changes_nothing_in_the_end(recipe: str) -> None:
    command = [sys.executable, "-m", "tests.runs.kills", "--recipes", recipe]
    done = subprocess.run(
        [*command, "--moments", str(MOMENTS)],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": the same") == MOMENTS
    assert done.stdout.endswith(f"{MOMENTS} kills, 0 problems\n")
