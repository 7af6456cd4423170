"""A pattern that has to be found."""

import pytest

from tunebook.errors import ConfigError
from tunebook.rewards import RegexMatch


@pytest.mark.parametrize(
    ("pattern", "completion", "reward"),
    [
        (r"\d+", "a 5", 1.0),
        (r"\d+", "a five", 0.0),
        (r"yes", "YES", 0.0),
        (r"(?i)yes", "YES", 1.0),
        (r"\Ayes\Z", "yes", 1.0),
        (r"\Ayes\Z", "yes, sir", 0.0),
        (r"a.b", "a\nb", 0.0),
        (r"(?s)a.b", "a\nb", 1.0),
        (r"x", "", 0.0),
    ],
)
def test_found_or_not(pattern, completion, reward):
    assert RegexMatch(pattern=pattern)(completion) == reward


@pytest.mark.parametrize(("pattern", "words"), [(None, "not given"), ("", "not given"), ("(", "(")])
def test_a_bad_pattern_is_refused(pattern, words):
    with pytest.raises(ConfigError) as raised:
        RegexMatch(pattern=pattern)
    assert words in str(raised.value)
