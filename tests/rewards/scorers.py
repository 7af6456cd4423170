"""Scorers of the example rewards, and completions for them."""

from tunebook.config import OnRewardError, RewardConfig
from tunebook.scoring import Sample, make_scorer

HERE = "tests.rewards.examples."


def scorer_of(functions, *, columns=("answer", "prompt"), timeout_s=20.0, at_once=8, fail=False):
    """A scorer of rewards from the examples; a string stands for `_target_` alone."""
    nodes = {
        name: {"_target_": HERE + node} if isinstance(node, str) else node
        for name, node in functions.items()
    }
    config = RewardConfig(
        functions=nodes,
        timeout_s=timeout_s,
        max_concurrency=at_once,
        on_error=OnRewardError.fail if fail else OnRewardError.skip,
    )
    return make_scorer(config, columns)


def samples_of(*completions, answer="yes"):
    return [
        Sample(text, {"answer": answer, "prompt": [{"role": "user", "content": f"about {text}"}]})
        for text in completions
    ]
