"""Successive halving: who goes on from a rung, as pure decisions and in a sweep."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from recipes import sft
from tests.running import train_all
from tests.sweeps.running import reopened, train_together
from tests.sweeps.test_equal import configured, numbers
from tests.sweeps.test_multirun import SMALL, run, sweep_in
from tunebook.compose import resumed_config
from tunebook.config import HalvingConfig
from tunebook.errors import ConfigError
from tunebook.evaluate import Monitor
from tunebook.runs import RunState, StopReason
from tunebook.sweeps.halving import Halving, check_halving
from tunebook.sweeps.trial import Trial

LOSS = Monitor("eval/loss", lower_is_better=True)


def trial(number):
    return Trial(number=number, overrides=(), config=None)


def report(step, value, planned=10):
    return SimpleNamespace(step=step, planned_steps=planned, evaluation={"eval/loss": value})


def judged(values, *, keep, at_once, monitor=LOSS):
    """Whether each trial goes on from one rung, `at_once` of them coming there together."""
    halving = Halving(HalvingConfig(rungs=[2], keep=keep), monitor)
    going_on = []
    for first in range(0, len(values), at_once):
        together = [(trial(n), report(2, values[n])) for n in range(len(values))][
            first : first + at_once
        ]
        for each in together:
            halving.enter(*each)
        going_on += [halving.verdict(each, at.step) is None for each, at in together]
    return going_on


def test_the_best_half_of_those_that_come_together_goes_on():
    assert judged([4.0, 1.0, 3.0, 2.0], keep=0.5, at_once=4) == [False, True, False, True]


def test_who_comes_later_is_compared_with_all_before():
    assert judged([2.0, 1.0, 3.0, 0.5], keep=0.5, at_once=1) == [True, True, False, True]


@pytest.mark.parametrize(
    ("values", "keep", "expected"),
    [
        ([1.0, 2.0, 3.0], 0.1, [True, False, False]),
        ([1.0, 1.0, 1.0], 0.4, [True, True, True]),  # equal ones are not worse
        ([math.nan, 5.0], 0.9, [False, True]),
        ([math.nan, math.nan], 0.5, [False, False]),
        ([math.inf, 5.0], 0.5, [False, True]),
    ],
)
def test_ties_and_values_that_are_no_numbers(values, keep, expected):
    assert judged(values, keep=keep, at_once=len(values)) == expected


def test_higher_is_better_where_the_monitor_says_so():
    reward = Monitor("eval/loss", lower_is_better=False)
    assert judged([4.0, 1.0], keep=0.5, at_once=2, monitor=reward) == [True, False]


def test_only_rungs_before_the_end_are_due():
    halving = Halving(HalvingConfig(rungs=[2, 4], keep=0.5), LOSS)
    due = [halving.is_due(trial(0), report(step, 1.0, planned=4)) for step in (1, 2, 3, 4)]
    assert due == [False, True, False, False]


def test_losers_are_closed_and_winners_are_as_alone(tmp_path):
    """The record says why each ended; a trial that goes on has the numbers it has alone."""
    rates = (1e-6, 3e-2, 1e-5, 1e-2)
    configs = [
        configured(
            "sft",
            tmp_path / "t",
            {"optimizer.learning_rate": each, "plan.epochs": 2, "plan.batch_size": 4},
        )
        for each in rates
    ]
    judge = Halving(HalvingConfig(rungs=[2, 4], keep=0.5), LOSS)
    trials, _ = train_together(configs, judge=judge)
    states = [each.state for each in trials]
    assert states == ["stopped", "stopped", "stopped", "succeeded"] or states == [
        "stopped", "succeeded", "stopped", "stopped",
    ]  # fmt: skip
    for each, steps in ((trials[0], 2), (trials[2], 2)):
        record = reopened(each).record
        assert record.state is RunState.CANCELLED
        assert record.outcome.stop_reason is StopReason.CANCELLED
        assert record.outcome.steps == steps
        assert record.model_available
        assert "not among the best 2 of 4" in each.why
        [event] = [one for one in reopened(each).events() if one["type"] == "stopped_by_sweep"]
        assert event["reason"] == each.why and event["step"] == steps
    [winner] = [n for n, state in enumerate(states) if state == "succeeded"]
    _, alone = train_all(
        configured(
            "sft",
            tmp_path / "a",
            {"optimizer.learning_rate": rates[winner], "plan.epochs": 2, "plan.batch_size": 4},
        )
    )
    assert numbers(reopened(trials[winner])) == numbers(alone)


@pytest.mark.parametrize(("other", "state"), [(0.0, "stopped"), (99.0, "succeeded")])
def test_a_trial_killed_before_its_verdict_gets_it_first(tmp_path, other, state):
    """It is judged where it goes on, and ends there without another step, or goes on."""
    config = configured("sft", tmp_path, {"plan.epochs": 2, "plan.batch_size": 4})
    _, run = train_all(config, stop_after=2)
    run.save(replace(run.record, state=RunState.FAILED))
    judge = Halving(HalvingConfig(rungs=[2], keep=0.5), LOSS)
    judge.remember(trial(0), run)
    judge.enter(trial(1), report(2, other))
    [resumed], watch = train_together([resumed_config("sft", str(run.path), [], {})], judge=judge)
    assert resumed.state == state
    run = reopened(resumed)
    assert run.path == resumed.run.path and len(run.record.attempts) == 2
    assert run.record.model_available
    if state == "stopped":
        assert watch.steps == [] and run.record.outcome.steps == 2
        assert run.record.state is RunState.CANCELLED
        [event] = [one for one in run.events() if one["type"] == "stopped_by_sweep"]
        assert (event["step"], event["attempt"], event["reason"]) == (2, 2, resumed.why)
    else:
        assert watch.steps[0] == (0, 3)


@pytest.mark.parametrize(
    ("halving", "changes", "words"),
    [
        (HalvingConfig(rungs=[1], keep=1.0), {}, "between 0 and 1"),
        (HalvingConfig(rungs=[2, 1], keep=0.5), {}, "from the first to the last"),
        (HalvingConfig(rungs=[], keep=0.5), {}, "one step or more"),
        (HalvingConfig(rungs=[1], keep=0.5), {}, "does not evaluate at step 1, only at 2, 3"),
        (HalvingConfig(rungs=[2], keep=0.5), {"eval.fraction": 0.0}, "no eval rows"),
    ],
)
def test_halving_that_cannot_be(tmp_path, halving, changes, words):
    task = sft.prepare(configured("sft", tmp_path, changes))
    with pytest.raises(ConfigError, match=words):
        check_halving(halving, [Trial(number=0, overrides=(), config=task.config, task=task)])


def test_freed_slots_start_the_next_trials(tmp_path, monkeypatch, capsys):
    """Through the command line: two slots, four trials, one of each pair is stopped early."""
    monkeypatch.chdir(tmp_path)
    code = run(
        *SMALL, "optimizer.learning_rate=1e-2,1e-6,2e-2,2e-6", "sweep.max_at_once=2",
        "sweep.halving={rungs: [1], keep: 0.5}",
    )  # fmt: skip
    assert code == 0
    sweep = sweep_in(tmp_path)
    found = [each.state.value for each in sweep.trials]
    assert (found[0], found[1], found[3]) == ("succeeded", "stopped", "stopped")
    assert sweep.head["halving"] == {"rungs": [1], "keep": 0.5}
    out = capsys.readouterr().out
    assert "is not among the best 1 of 2" in out
    assert run("--multirun", f"sweep.resume={sweep.path}") == 0
    assert "4 trials of sft, 4 of them over already" in capsys.readouterr().out
