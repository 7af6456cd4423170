"""When a rule begins to hold, and what it says."""

import math

import pytest

from tunebook.health import RULES, findings, stopping_rule

HEALTHY = {
    "train/reward": 0.5,
    "train/reward/answer": 0.4,
    "train/reward/format": 0.1,
    "train/zero_variance_share": 0.3,
    "train/truncated_share": 0.1,
    "train/unscored_share": 0.0,
    "train/entropy": 1.0,
    "train/kl": 0.01,
    "train/effective_sample_size": 0.99,
    "train/staleness": 0.0,
    "train/logprob_gap": 1e-6,
}
SICK = {
    "rewards_equal": {"train/zero_variance_share": 1.0},
    "all_truncated": {"train/truncated_share": 0.95},
    "entropy_collapse": {"train/entropy": 0.09},
    "kl_blowup": {"train/kl": 1.5},
    "parts_cancel": {"train/reward/answer": 0.3, "train/reward/format": 0.2},
    "stale_policy": {"train/effective_sample_size": 0.4, "train/staleness": 1.0},
    "many_unscored": {"train/unscored_share": 0.25},
    "logprob_mismatch": {"train/logprob_gap": 0.06},
}


def test_every_rule_has_a_case():
    assert set(SICK) == set(RULES)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_speaks_once_when_it_begins_to_hold(rule):
    """Window 2: healthy, healthy, sick: half of the window is not enough for a mean to cross."""
    sick = HEALTHY | SICK[rule]
    history = [HEALTHY, HEALTHY, sick, sick, sick, sick]
    spoken = [
        [found.rule for found in findings(history[:n], window=2)] for n in range(len(history) + 1)
    ]
    assert sum(found == [rule] for found in spoken) == 1
    assert all(found in ([], [rule]) for found in spoken)


def test_a_healthy_run_hears_nothing():
    assert findings([HEALTHY] * 20, window=5) == []


def test_before_a_window_is_full_nothing_holds():
    assert findings([HEALTHY | SICK["kl_blowup"]] * 4, window=5) == []
    assert [found.rule for found in findings([SICK["kl_blowup"]] * 5, window=5)] == ["kl_blowup"]


def test_a_rule_speaks_again_after_it_has_not_held():
    sick = HEALTHY | SICK["all_truncated"]
    history = [sick, HEALTHY, sick]
    assert [len(findings(history[:n], window=1)) for n in (1, 2, 3)] == [1, 0, 1]


def test_unknown_and_nan_metrics_are_no_sign_of_anything():
    """Steps without an update have no loss metrics; a mean over no reward is NaN."""
    assert findings([{"train/reward": math.nan, "train/kl": None}] * 3, window=2) == []


def test_parts_that_grow_together_do_not_cancel():
    grown = HEALTHY | {"train/reward/answer": 0.5, "train/reward/format": 0.3}
    assert findings([HEALTHY, grown], window=1) == []


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ([], None),
        (["kl_blowup"], "kl_blowup"),
        (["all"], "all_truncated"),
        (["rewards_equal"], None),
    ],
)
def test_only_rules_that_are_named_end_a_run(stop, expected):
    history = [HEALTHY | SICK["kl_blowup"] | SICK["all_truncated"]]
    found = stopping_rule(findings(history, window=1), stop)
    assert (found and found.rule) == expected
