"""Which trials share a base, and how many of them train at a time."""

import sys
from types import SimpleNamespace

import pytest

from tunebook.backends.local import memory
from tunebook.compose import compose
from tunebook.config import SweepConfig
from tunebook.sweeps.sweep import groups, trials_at_once
from tunebook.sweeps.trial import Trial


def trial(number, changes=None, *, trained=1_000_000, sessions=1):
    summary = {"trainable_parameters": trained, "sessions": sessions}
    config = compose("sft", changes or {})
    task = SimpleNamespace(summary=summary)
    return Trial(number=number, overrides=(), config=config, task=task)


def backend(max_sessions=sys.maxsize):
    return SimpleNamespace(capabilities=SimpleNamespace(max_sessions=max_sessions))


def test_what_differs_in_model_or_backend_does_not_share_a_base():
    changes = [
        {"seed": 1},
        {"backend.dtype": "bfloat16"},
        {"lora.rank": 2, "optimizer.learning_rate": 1.0},
        {"lora": None},
        {"model.chat_template": "chatml"},
        {"backend.dtype": "bfloat16", "seed": 3},
    ]
    trials = [trial(number, one) for number, one in enumerate(changes)]
    found = [[each.number for each in group] for group in groups(trials)]
    assert found == [[0, 2], [1, 5], [3], [4]]


@pytest.mark.parametrize(
    ("free", "max_sessions", "max_at_once", "sessions", "expected"),
    [
        (None, sys.maxsize, 3, 1, 3),
        (None, 5, None, 1, 5),
        (None, 5, 8, 2, 2),
        (200_000_000, sys.maxsize, None, 1, 3),  # 0.3 x 200 MB of 20 MB each
        (200_000_000, sys.maxsize, None, 2, 1),
        (1_000, 1, 4, 3, 1),  # one always
    ],
)
def test_sessions_memory_and_the_setting_limit(
    monkeypatch, free, max_sessions, max_at_once, sessions, expected
):
    monkeypatch.setattr(memory, "free_memory", lambda device: free)
    trials = [trial(0, sessions=1), trial(1, sessions=sessions)]
    settings = SweepConfig(max_at_once=max_at_once)
    assert trials_at_once(trials, backend(max_sessions), settings) == expected


def test_full_weights_have_the_base_alone():
    assert trials_at_once([trial(0, {"lora": None})], backend(), SweepConfig()) == 1
