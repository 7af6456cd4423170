"""The whole completion against the answer."""

import pytest

from tunebook.rewards import NotedReward, exact_match


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("Paris", "Paris"),
        (" paris\n", "Paris"),
        ("New\n York", "new york"),
        ("STRASSE", "straße"),
        ("ｆｕｌｌ", "full"),
        ("e\u0301", "é"),
        ("5", 5),
        ("UK", ["United Kingdom", "uk"]),
    ],
)
def test_gold_scores_one(completion, answer):
    assert exact_match(completion, answer=answer) == 1.0


@pytest.mark.parametrize(
    ("completion", "answer"),
    [("Rome", "Paris"), ("Paris.", "Paris"), ("It is Paris", "Paris"), ("UK", ["U.K.", "GB"])],
)
def test_all_else_scores_zero(completion, answer):
    assert exact_match(completion, answer=answer) == 0.0


def test_a_blank_completion_is_counted_apart():
    reward = exact_match(" \n", answer="Paris")
    assert reward == 0.0 and isinstance(reward, NotedReward) and reward.note == "no_answer"


@pytest.mark.parametrize("answer", [None, "", "  ", [], ["a", ""]])
def test_an_answer_that_nothing_can_match_is_an_error_of_the_row(answer):
    with pytest.raises(ValueError, match="the row's answer is"):
        exact_match("x", answer=answer)
