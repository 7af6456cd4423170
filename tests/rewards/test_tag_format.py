"""Tags in their order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunebook.errors import ConfigError
from tunebook.rewards import TagFormat

BOTH = TagFormat(tags=["think", "answer"], first_is_open=False)
OPEN = TagFormat(tags=["think", "answer"], first_is_open=True)


@pytest.mark.parametrize(
    "completion",
    [
        "<think>a</think><answer>b</answer>",
        "\n<think>\na\n</think>\n\n<answer>b</answer>\n",
        "<think>1 < 2 and <b>bold</b></think><answer>b</answer>",
    ],
)
def test_the_whole_form_scores_one(completion):
    assert BOTH(completion) == 1.0
    assert OPEN(completion.strip().removeprefix("<think>")) == 1.0


@pytest.mark.parametrize(
    ("rule", "completion"),
    [
        ("something is there", ""),
        ("tags are there", "a b"),
        ("all are there", "<think>a</think>"),
        ("in their order", "<answer>b</answer><think>a</think>"),
        ("closed", "<think>a</think><answer>b"),
        ("opened", "a</think><answer>b</answer>"),
        ("not blank", "<think> </think><answer>b</answer>"),
        ("nothing before", "so <think>a</think><answer>b</answer>"),
        ("nothing between", "<think>a</think> so <answer>b</answer>"),
        ("nothing behind", "<think>a</think><answer>b</answer> so"),
        ("once", "<think>a</think><answer>b</answer><answer>c</answer>"),
        ("not nested", "<think>a<answer>x</answer></think><answer>b</answer>"),
        ("exact names", "<Think>a</Think><answer>b</answer>"),
    ],
)
def test_each_rule_has_a_text_that_breaks_it(rule, completion):
    assert BOTH(completion) == 0.0, rule


def test_an_open_first_tag_is_not_opened_again():
    assert OPEN("<think>a</think><answer>b</answer>") == 0.0


@given(st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "a", " "])))
def test_only_one_form_scores(pieces):
    text = "".join(pieces)
    tags = [piece for piece in pieces if piece not in ("a", " ")]
    if BOTH(text) == 1.0:
        assert tags == ["<think>", "</think>", "<answer>", "</answer>"]


@pytest.mark.parametrize("tags", [None, [], "think", [1], ["a b"], ["<a>"], ["a", "a"]])
def test_bad_tags_are_refused(tags):
    with pytest.raises(ConfigError, match="tags="):
        TagFormat(tags=tags, first_is_open=False)
