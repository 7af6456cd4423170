"""Rewards that need a package which is not installed by default say so before anything runs."""

import sys

import pytest

from tests.rewards.scorers import scorer_of
from tunebook.compose import compose
from tunebook.config import GRPOConfig
from tunebook.errors import ConfigError
from tunebook.scoring import GIVEN_COLUMNS, make_scorer


@pytest.mark.parametrize(
    ("reward", "package", "extra"),
    [
        ("json_schema", "jsonschema", "json"),
        ("math_equivalence", "math_verify", "math"),
        ("llm_judge", "httpx2", "judge"),
    ],
)
def test_a_missing_package_names_the_extra(monkeypatch, reward, package, extra):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not there
    config = compose("grpo", [f"reward={reward}"])
    assert isinstance(config, GRPOConfig)
    with pytest.raises(ConfigError) as raised:
        make_scorer(config.reward, {"answer", *GIVEN_COLUMNS})
    assert f"pip install 'tunebook[{extra}]'" in str(raised.value)
    assert f"reward.functions.{reward}" in str(raised.value)


def test_rewards_without_such_a_package_do_not_care(monkeypatch):
    for package in ("jsonschema", "math_verify", "httpx2"):
        monkeypatch.setitem(sys.modules, package, None)
    scorer_of({"it": {"_target_": "tunebook.rewards.exact_number"}})
