"""Runs that were killed, or had no room, end as a run that had none of it; see `kills`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

RECIPES = ["sft", "dpo", "grpo"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_kill_9_at_seeded_moments_changes_nothing_in_the_end(recipe: str) -> None:
    """Five of each here; `python -m tests.runs.kills` makes 50 over all, or any number."""
    check(recipe, by="kill", moments=5)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_disk_that_fills_at_seeded_moments_changes_nothing_in_the_end(recipe: str) -> None:
    check(recipe, by="full-disk", moments=3)


def check(recipe: str, *, by: str, moments: int) -> None:
    command = [sys.executable, "-m", "tests.runs.kills", "--recipes", recipe, "--by", by]
    done = subprocess.run(
        [*command, "--moments", str(moments)],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": the same") == moments
    assert done.stdout.endswith(f"{moments} moments, 0 problems\n")
