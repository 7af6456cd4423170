"""`tunebook rewards` and `tunebook rewards test`, as a person calls them."""

import importlib
import inspect
import json
from pathlib import Path

import pytest

from tests.test_cli import call
from tunebook.compose import compose
from tunebook.config import GRPOConfig
from tunebook.errors import ConfigError, DataError
from tunebook.reward_listing import list_rewards, reward_names
from tunebook.reward_trial import HACKS, read_samples, trial_config
from tunebook.reward_worker import locate

ROOT = Path(__file__).parent.parent
OWN = """
import itertools
import random

count = itertools.count()


def unsteady(completion):
    return float(next(count))


def broken(completion):
    raise ValueError("a broken reward")


def polite(completion, *, prompt, messages, stop_reason):
    assert messages[-1]["content"] == completion and prompt and stop_reason == "stop"
    return float(len(completion) == 0)
"""


@pytest.fixture
def folder(tmp_path):
    """Where a person stands: saved completions and a module of their own."""
    rows = [
        {"prompt": "How much is 1 + 1?", "completion": "It is 2.", "answer": "2"},
        {
            "prompt": [{"role": "user", "content": "And 1 + 2?"}],
            "completion": "It is 4.",
            "answer": "3",
        },
        {"prompt": "And 2 + 2?", "completion": "Who knows?", "answer": "4"},
    ]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own_rewards.py").write_text(OWN)
    return tmp_path


def try_rewards(folder, *arguments):
    return call("rewards", "test", "--file", "samples.jsonl", *arguments, cwd=folder)


def own(name):
    return ["reward=base", f"reward.functions.mine._target_=own_rewards.{name}"]


@pytest.mark.parametrize("name", reward_names())
def test_every_reward_file_composes_with_every_argument_it_needs(name):
    """And with no other, and nothing has a default of its own beside the file's."""
    config = compose("grpo", [f"reward={name}"])
    assert isinstance(config, GRPOConfig)
    [listed] = [one for one in list_rewards() if one.name == name]
    target = locate(listed.target)
    assert set(config.reward.functions) == {name}
    settings = inspect.signature(target).parameters if isinstance(target, type) else {}
    assert set(settings) == set(listed.settings)
    assert all(one.default is one.empty for one in settings.values())


def test_every_built_in_reward_has_a_file():
    targets = {locate(listed.target) for listed in list_rewards()}
    module = importlib.import_module("tunebook.rewards")
    others = {module.NotedReward, module.Unscored, module.overlong_penalty}
    assert targets | others == {getattr(module, name) for name in module.__all__}


def test_the_list_names_columns_settings_and_meaning():
    done = call("rewards")
    assert done.returncode == 0, done.stderr
    for text in (
        "reward=exact_number\n",
        "1 where the number that the completion gives",
        "columns: prompt, answer (if there)",
        "reward.functions.python_tests.allow_running_code=false",
        'reward.functions.tag_format.tags=["think", "answer"]',
        "reward.functions.regex_match.pattern=null",
        "my_package.my_reward",
    ):
        assert text in done.stdout


def test_the_list_as_json():
    listed = {one["name"]: one for one in json.loads(call("rewards", "--json").stdout)}
    assert sorted(listed) == reward_names()
    assert listed["target_length"]["columns"] == ["num_tokens"]
    assert listed["target_length"]["settings"]["maximum"] == 128


@pytest.mark.parametrize("arguments", [[], ["exact_number"], ["grpo", "reward=exact_number"]])
def test_saved_completions_are_scored(folder, arguments):
    done = try_rewards(folder, *arguments)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["row", "prompt", "completion", "exact_number", "reward"]
    assert lines[1].split() == [
        *["1", "How", "much", "is", "1", "+", "1?", "It", "is", "2.", "1", "1"]
    ]
    assert lines[2].split()[-2:] == ["0", "0"]
    assert lines[4:7] == [
        "3 completions, 0 unscored; mean reward 0.3333.",
        "exact_number: 1 times no_answer",
        "3 passes gave the same rewards.",
    ]
    assert "every answer of the file: 1 of 3 score above 0, 1 at most (exact_number)" in done.stdout
    assert list(folder.iterdir()) != []


def test_hacks_that_score_are_named_with_the_reward(folder):
    format_too = [
        "reward.functions.format._target_=tunebook.rewards.TagFormat",
        "reward.functions.format.tags=[think,answer]",
        "reward.functions.format.first_is_open=false",
        "reward.functions.format.weight=0.25",
    ]
    done = try_rewards(folder, *format_too, "--hack-rows", "2")
    assert done.returncode == 0, done.stderr
    assert "tags only: 2 of 2 score above 0, 0.25 at most (format)" in done.stdout
    done = try_rewards(folder, *own("polite"))
    assert "empty: 3 of 3 score above 0, 1 at most (mine)" in done.stdout
    done = try_rewards(folder, "regex_match", "reward.functions.regex_match.pattern=nothing_has_it")
    assert f"None of {len(HACKS)} known hacks scores above 0." in done.stdout
    done = try_rewards(folder, "--hack-rows", "0")
    assert "hack" not in done.stdout


def test_a_reward_that_differs_from_pass_to_pass_fails(folder):
    done = try_rewards(folder, *own("unsteady"), "--repeats", "2", "--hack-rows", "0")
    assert done.returncode == 1
    assert "2 passes differ in 3 places:" in done.stdout
    assert "row 1, mine: 0, 3" in done.stdout
    steady = try_rewards(folder, *own("unsteady"), "--repeats", "1", "--hack-rows", "0")
    assert steady.returncode == 0 and "passes" not in steady.stdout


def test_a_broken_reward_shows_its_traceback_and_fails(folder):
    done = try_rewards(folder, *own("broken"), "reward.on_error=fail")
    assert done.returncode == 1
    assert "3 completions, 3 unscored; nothing could be scored." in done.stdout
    assert "Unscored 3 times: reward 'mine' on the prompt 'How much is 1 + 1?'" in done.stdout
    assert 'raise ValueError("a broken reward")' in done.stdout


def test_the_trial_as_json(folder):
    trial = json.loads(try_rewards(folder, "--json").stdout)
    assert [score["total"] for score in trial["scores"]] == [1.0, 0.0, 0.0]
    assert trial["unsteady"] == [] and set(trial["hacks"]) == {hack.name for hack in HACKS}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sft"], ["sft", "has no rewards", "exact_number"]),
        (["exact_numbr"], ["exact_numbr", "exact_number"]),
        (["target_length"], ["'num_tokens'", "target_length"]),
        (["python_tests"], ["allow_running_code", "no sandbox"]),
        (["--repeats", "0"], ["--repeats 0"]),
        (own("nowhere"), ["reward.functions.mine._target_"]),
        (["reward.timeout=1"], ["reward.timeout_s"]),
    ],
)
def test_what_cannot_run_is_one_paragraph(folder, arguments, words):
    done = try_rewards(folder, *arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_a_row_that_lacks_a_column_is_located(folder):
    with (folder / "samples.jsonl").open("a") as file:
        file.write('{"completion": "x", "prompt": "y"}\n')
    done = try_rewards(folder)
    assert done.returncode == 2
    assert "samples.jsonl:4: answer: reward 'exact_number' needs this column" in done.stderr


def test_rows_that_cannot_be_used_are_located(tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"completion": 5}\n{"answer": 1}\n[]\nno\n{"completion": ""}\n')
    with pytest.raises(DataError) as raised:
        read_samples(file)
    assert [problem.line for problem in raised.value.problems] == [1, 2, 3, 4]
    file.write_text("")
    with pytest.raises(DataError, match="no rows"):
        read_samples(file)


def test_overrides_are_those_of_the_recipe():
    config = trial_config(
        ["reward=base", "reward.functions.mine._target_=a.b", "reward.timeout_s=3"]
    )
    assert config.reward.functions == {"mine": {"_target_": "a.b"}}
    assert config.reward.timeout_s == 3
    with pytest.raises(ConfigError, match="optimizer"):
        trial_config(["optimizer.lr=1"])


def test_help_of_the_group_and_of_its_command():
    assert "test" in call("rewards", "--help").stdout
    done = call("rewards", "test", "--help")
    assert done.returncode == 0 and "--hack-rows" in done.stdout
    assert call("rewards", "test").returncode == 2  # without a file
