"""Built-in rewards, one a file; a reward of your own needs nothing from here.

A reward is `reward(completion, *, <columns of the row>) -> float | None`, sync or async. Functions
have no settings; a class takes its settings when it is made and is called like a function. See
`tunebook.scoring` for how they are run.
"""

from tunebook.reward_values import NotedReward, Unscored
from tunebook.rewards.exact_match import exact_match
from tunebook.rewards.exact_number import exact_number
from tunebook.rewards.json_schema import JsonSchema
from tunebook.rewards.llm_judge import LLMJudge
from tunebook.rewards.math_equivalence import MathEquivalence
from tunebook.rewards.overlong import overlong_penalty
from tunebook.rewards.python_tests import PythonTests
from tunebook.rewards.regex_match import RegexMatch
from tunebook.rewards.tag_format import TagFormat
from tunebook.rewards.target_length import TargetLength

__all__ = [
    "JsonSchema",
    "LLMJudge",
    "MathEquivalence",
    "NotedReward",
    "PythonTests",
    "RegexMatch",
    "TagFormat",
    "TargetLength",
    "Unscored",
    "exact_match",
    "exact_number",
    "overlong_penalty",
]
