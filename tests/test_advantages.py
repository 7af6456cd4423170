"""Advantages: golden groups, unscored rewards, equal groups, the divergence in the reward."""

import math

import numpy as np
import pytest

from tunebook.advantages import (
    batch_std,
    group_advantages,
    group_mean,
    group_std,
    kl_shaped_advantages,
    maxrl,
    rloo,
)
from tunebook.config import AdvantageConfig, AdvantageEstimator
from tunebook.errors import ConfigError
from tunebook.settings import make_advantages

EVERY = [group_mean, group_std, batch_std, rloo, maxrl]
every_estimator = pytest.mark.parametrize("estimator", EVERY)


def flat(advantages):
    return [float(each) for group in advantages for each in group]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (group_mean, [0.75, -0.25, -0.25, -0.25, 0, 0, 0, 0]),
        (group_std, [1.49970, -0.49990, -0.49990, -0.49990, 0, 0, 0, 0]),
        (rloo, [1.0, -1 / 3, -1 / 3, -1 / 3, 0, 0, 0, 0]),
        (maxrl, [2.99999, -1.0, -1.0, -1.0, 0, 0, 0, 0]),
        (batch_std, [0.29296, -0.09765, -0.09765, -0.09765, 0, 0, 0, 0]),
    ],
)
def test_golden_groups(estimator, expected):
    """Case 61: rewards [1, 0, 0, 0] and [5, 5, 5, 5].

    Means 0.25 and 5. The first group's unbiased deviation is 0.5, so 0.75 / 0.5001 = 1.49970. All
    eight have mean 2.625 and squares 101 - 8 * 2.625^2 = 45.875, so a deviation of
    sqrt(45.875 / 7) = 2.56000: 0.75 / (2.56 + 1e-4) = 0.29296. For maxrl 0.75 / 0.250001.
    """
    found = estimator([[1, 0, 0, 0], [5, 5, 5, 5]])
    assert flat(found) == pytest.approx(expected, abs=5e-6)
    assert flat(found)[4:] == [0, 0, 0, 0]
    assert all(group.dtype == np.float32 for group in found)


def test_one_group_by_its_flag():
    """The function of one group, which `group_mean` and `group_std` apply to all."""
    for scale_by_std, estimator in ((False, group_mean), (True, group_std)):
        one = group_advantages([1, 0, 0, 0], scale_by_std=scale_by_std)
        assert one.tolist() == estimator([[1, 0, 0, 0]])[0].tolist()


@every_estimator
@pytest.mark.parametrize("unscored", [None, math.nan])
def test_an_unscored_reward_is_in_no_statistic(estimator, unscored):
    """Case 66: never a 0. Its advantage is 0, the others are those of the group without it."""
    found = estimator([[1, unscored, 0, 0.5], [0.25, 0.75]])
    without = estimator([[1, 0, 0.5], [0.25, 0.75]])
    assert found[0].tolist() == pytest.approx([without[0][0], 0.0, without[0][1], without[0][2]])
    assert found[1].tolist() == pytest.approx(without[1].tolist())
    assert found[0][1] == 0


@every_estimator
@pytest.mark.parametrize(
    "group", [[None, 1.0, None], [None, None], [0.7], [0.1, 0.1, 0.1], [0, 0], []]
)
def test_a_group_that_tells_nothing_has_advantages_of_exactly_zero(estimator, group):
    """One scored, none, all equal (whose mean may be off by a rounding): 0, and no warning."""
    with np.errstate(all="raise"):
        alone = estimator([group])
        beside = estimator([group, [1.0, 0.0]])
    assert flat(alone) == [0.0] * len(group)
    assert beside[0].tolist() == [0.0] * len(group)
    assert np.isfinite(beside[1]).all() and beside[1].any()


@every_estimator
def test_an_empty_step(estimator):
    assert estimator([]) == []


def test_negative_siblings_do_not_make_an_unscored_reward_good():
    """Case 66: beside rewards of -1 a 0 would be an advantage; unscored is none."""
    assert group_mean([[-1.0, None, -1.0]])[0].tolist() == [0, 0, 0]


@every_estimator
def test_advantages_are_centred_where_all_are_scored(estimator):
    rewards = np.random.default_rng(0).random((3, 5)).astype(np.float32)
    for advantages in estimator(list(rewards)):
        assert advantages.sum() == pytest.approx(0.0, abs=1e-5)
        assert np.abs(advantages).max() > 0


def test_rewards_are_left_as_they_are():
    rewards = np.array([1.0, 0.0, math.nan])
    group_std([rewards])
    assert rewards.tolist()[:2] == [1.0, 0.0] and math.isnan(rewards[2])


@every_estimator
@pytest.mark.parametrize("reward", [math.inf, -math.inf])
def test_an_infinite_reward_is_refused(estimator, reward):
    with pytest.raises(ConfigError, match="a reward is infinite"):
        estimator([[1.0, reward]])


def test_a_mean_that_is_no_share_is_refused():
    """maxrl divides by the mean reward; with negative rewards it would turn signs around."""
    with pytest.raises(ConfigError, match=r"advantage\.estimator=maxrl.*one is -1\..*group_mean"):
        maxrl([[0.0, -1.0]])


def test_every_estimator_of_the_config_is_there():
    for estimator in AdvantageEstimator:
        found = make_advantages(AdvantageConfig(estimator=estimator))
        assert found in EVERY and found.__name__ == estimator.value


def test_divergence_in_the_reward_by_hand():
    """q - f of the three marked tokens: 0.5, -0.25, 0.5; their mean is 0.25.

    At beta 2: +2 (0.25 - 0.5) = -0.5, +1 and -0.5; the masked token, NaN there, keeps its 7.
    """
    found = kl_shaped_advantages(
        [np.array([1, 1, 7], np.float32), np.array([-1], np.float32)],
        masks=[np.array([1, 0.5, 0], np.float32), np.array([1], np.float32)],
        sampling_logprobs=[
            np.array([-1, -2, math.nan], np.float32),
            np.array([-0.5], np.float32),
        ],
        reference_logprobs=[
            np.array([-1.5, -1.75, math.nan], np.float32),
            np.array([-1.0], np.float32),
        ],
        beta=2.0,
    )
    assert [each.tolist() for each in found] == [[0.5, 2.0, 7.0], [-1.5]]


def test_divergence_in_the_reward_keeps_the_mean_and_lowers_what_drifted():
    rng = np.random.default_rng(1)
    lengths = [3, 5, 2]
    advantages = [rng.normal(size=n).astype(np.float32) for n in lengths]
    columns = [[rng.normal(size=n).astype(np.float32) for n in lengths] for _ in range(2)]
    found = kl_shaped_advantages(
        advantages,
        masks=[np.ones(n, np.float32) for n in lengths],
        sampling_logprobs=columns[0],
        reference_logprobs=columns[1],
        beta=0.1,
    )
    assert np.concatenate(found).mean() == pytest.approx(np.concatenate(advantages).mean())
    change = np.concatenate(found) - np.concatenate(advantages)
    drift = np.concatenate(columns[0]) - np.concatenate(columns[1])
    assert np.corrcoef(change, drift)[0, 1] == pytest.approx(-1.0)


def test_nothing_marked_changes_nothing():
    found = kl_shaped_advantages(
        [np.array([1.0], np.float32)],
        masks=[np.zeros(1, np.float32)],
        sampling_logprobs=[np.array([math.nan], np.float32)],
        reference_logprobs=[np.array([math.nan], np.float32)],
        beta=0.1,
    )
    assert found[0].tolist() == [1.0]


@pytest.mark.parametrize("beta", [0.0, -1.0, math.nan, math.inf])
def test_a_weight_of_the_divergence_that_is_none_is_refused(beta):
    with pytest.raises(ConfigError, match=r"kl\.beta="):
        kl_shaped_advantages([], masks=[], sampling_logprobs=[], reference_logprobs=[], beta=beta)
