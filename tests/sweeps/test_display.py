"""What a person sees of several trials, in a pipe and on a terminal."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from tunebook.display import counting
from tunebook.errors import ConfigError
from tunebook.evaluate import Monitor
from tunebook.sweeps.display import SweepDisplay
from tunebook.sweeps.trial import Trial, TrialState, labels, raise_all


def trial(number, steps=40):
    task = SimpleNamespace(
        summary={"planned_steps": steps}, monitor=Monitor("eval/loss", lower_is_better=True)
    )
    run = SimpleNamespace(path="runs/sft/one", record=SimpleNamespace(evaluation=None))
    return Trial(
        number=number, overrides=(), config=None, label=f"learning_rate={number}e-4",
        task=task, run=run,
    )  # fmt: skip


def report(step, *, evaluation=None, notes=(), planned=40):
    return SimpleNamespace(
        step=step, planned_steps=planned, evaluation=evaluation, notes=notes,
        metrics={"train/loss": 1.5, "train/reward": 0.25},
    )  # fmt: skip


def shown(console, trials=2):
    display = SweepDisplay(console, trials)
    with display.shown(), counting("rendering rows") as count:
        for number in range(trials):
            display.began(trial(number))
        for step in range(1, 41):
            for number in range(trials):
                count(step, 40)
                evaluation = {"eval/loss": 2.0, "eval/perplexity": 7.4} if step == 13 else None
                notes = ("a word of advice",) if step == 7 and number == 1 else ()
                display.stepped(trial(number), report(step, evaluation=evaluation, notes=notes))
        for number in range(trials):
            ended = trial(number)
            ended.state = TrialState.FAILED if number else TrialState.SUCCEEDED
            ended.why = "it broke" if number else None
            display.ended(ended)


def test_plain_lines_where_there_is_no_terminal():
    stream = io.StringIO()
    shown(Console(file=stream, width=80, force_terminal=False))
    lines = stream.getvalue().splitlines()
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()
    assert lines[0] == "trial 0 (learning_rate=0e-4): begins, 40 steps, runs/sft/one"
    of_first = [line for line in lines if line.startswith("trial 0") and ": step" in line]
    steps = [int(line.split("step ")[1].split("/")[0]) for line in of_first]
    assert steps == sorted({1, 13, *range(4, 41, 4)})
    assert of_first[-1].endswith("loss 1.5000  reward 0.2500  eval/loss 2.0000 @ 13")
    assert "trial 1 (learning_rate=1e-4): a word of advice" in lines
    assert lines[-1] == "trial 1 (learning_rate=1e-4): failed (2/2): it broke"


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_line_a_trial_on_a_terminal(width):
    stream = io.StringIO()
    shown(Console(file=stream, width=width, force_terminal=True, legacy_windows=False))
    text = stream.getvalue()
    assert "succeeded" in text and "it broke" in text
    assert "begins" not in text


def test_a_label_is_what_differs_by_the_shortest_key_that_is_clear():
    jobs = [
        ["seed=1", "optimizer.learning_rate=1e-4", "lora.rank=4"],
        ["seed=1", "optimizer.learning_rate=2e-4", "lora.rank=4"],
    ]
    assert labels(jobs) == ["learning_rate=1e-4", "learning_rate=2e-4"]
    assert labels([["seed=1", "lora.seed=2"], ["seed=2", "lora.seed=1"]]) == [
        "seed=1 lora.seed=2",
        "seed=2 lora.seed=1",
    ]
    assert labels([["data.path=a/b.c.jsonl"], ["data.path=x.jsonl"]])[0] == "path=a/b.c.jsonl"
    assert labels([["seed=1"]]) == ["seed=1"]


def test_problems_of_all_trials_are_said_once_each():
    raise_all({})
    with pytest.raises(ConfigError) as raised:
        raise_all(
            {
                "trial 0": ConfigError("no"),
                "trial 1": ConfigError("no"),
                "trial 2": ConfigError("never"),
            }
        )
    assert str(raised.value) == "Nothing was trained.\ntrial 0, trial 1: no\ntrial 2: never"
    with pytest.raises(ConfigError, match="no") as raised:
        raise_all({"trial 7": ConfigError("no")})
    assert raised.value.__notes__ == ["This is trial 7; nothing was trained."]
