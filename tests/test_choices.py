"""What is said of keys that depend on which file of a group was chosen."""

import pytest

from recipes import dpo, grpo, sft
from tunebook.choices import DATA_OF_A_LOSS
from tunebook.compose import build, build_function, compose
from tunebook.environments.running import build_environments
from tunebook.errors import ConfigError


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["backend.scope=team"], "backend.scope is a key of backend=baseten; this run has backend=local"),
        (["backend=together", "backend.device=cpu"], "backend.device is a key of backend=local; this run has backend=together"),
    ],
)  # fmt: skip
def test_a_key_of_another_choice_is_named_with_its_choice(overrides, told):
    with pytest.raises(ConfigError) as raised:
        compose("sft", overrides)
    assert str(raised.value) == told


def test_suggested_are_keys_of_the_choice_and_no_others():
    with pytest.raises(ConfigError) as raised:
        compose("sft", ["backend.nope=1"])
    assert "backend.device" in str(raised.value) and "scope" not in str(raised.value)
    with pytest.raises(ConfigError) as raised:
        build_function(compose("sft").loss | {"beta": 0.1}, key="loss")
    assert str(raised.value) == "loss.beta: there is no 'beta' in 'loss'. Known: loss._target_"


def test_what_is_set_of_nothing_says_what_to_choose_first():
    with pytest.raises(ConfigError, match=r"first, tracker=trackio or tracker=wandb$"):
        build({"project": "x"}, key="tracker")
    with pytest.raises(ConfigError, match=r"first, environment=calculator$"):
        build_environments({"max_turns": 3})


def test_every_column_of_a_recipe_is_no_setting_of_a_loss():
    columns = {*sft.COLUMNS, *dpo.COLUMNS, *grpo.COLUMNS, "reference_logprobs", "logprobs"}
    assert columns == DATA_OF_A_LOSS
