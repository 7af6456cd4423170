"""Mathematical equality through math-verify."""

import threading

import pytest

pytest.importorskip("math_verify")

from tests.rewards.scorers import scorer_of
from tunebook.rewards import MathEquivalence, NotedReward
from tunebook.scoring import Sample

EQUAL = [
    ("so \\boxed{\\frac{2}{4}}", "1/2"),
    ("The answer is 0.5", "\\frac{1}{2}"),
    ("The answer is $\\frac12$.", "$0.5$"),
    ("\\boxed{(x+1)^2}", "x^2+2x+1"),
    ("$2\\sqrt{2}$", "\\sqrt{8}"),
    ("it is \\boxed{\\{1, 2\\}}", "\\{2,1\\}"),
    ("#### 18", 18),
    ("The answer is 12", "12"),
]
DIFFERENT = [
    ("so \\boxed{\\frac{2}{3}}", "1/2"),
    ("\\boxed{x+1}", "x^2+2x+1"),
    ("The answer is 13", "12"),
    ("\\boxed{12} or \\boxed{13}", "12"),
    ("12 11 10", "12"),
]


@pytest.mark.parametrize(("completion", "answer"), EQUAL)
def test_equal_scores_one(completion, answer):
    assert MathEquivalence()(completion, answer=answer) == 1.0


@pytest.mark.parametrize(("completion", "answer"), DIFFERENT)
def test_different_scores_zero(completion, answer):
    assert MathEquivalence()(completion, answer=answer) == 0.0


@pytest.mark.parametrize("completion", ["", "no idea", "\\boxed{}", "$$", "\x00\ud800"])
def test_no_expression_is_wrong_and_counted_apart(completion):
    reward = MathEquivalence()(completion, answer="1/2")
    assert reward == 0.0 and isinstance(reward, NotedReward) and reward.note == "no_answer"


@pytest.mark.parametrize("answer", ["", "  ", None, True])
def test_an_answer_without_an_expression_is_an_error_of_the_row(answer):
    with pytest.raises(ValueError, match="the row's answer is"):
        MathEquivalence()("12", answer=answer)


@pytest.mark.parametrize("ending", ["", ".", "\n", "<|im_end|>", "\n\nQ:"])
def test_case_79_a_right_answer_scores_however_it_ended(ending):
    assert MathEquivalence()(f"The answer is 12{ending}", answer="12") == 1.0
    assert MathEquivalence()(f"so $x = 12${ending}", answer="12") == 1.0


def test_case_65_the_main_thread_another_and_a_worker_agree():
    """Nowhere does it rest on signals, which only the main thread gets."""
    reward = MathEquivalence()
    cases = EQUAL + DIFFERENT
    expected = [1.0] * len(EQUAL) + [0.0] * len(DIFFERENT)
    here = [reward(completion, answer=answer) for completion, answer in cases]
    there = []

    def grade():
        there.extend(reward(completion, answer=answer) for completion, answer in cases)

    thread = threading.Thread(target=grade)
    thread.start()
    thread.join()
    with scorer_of({"it": {"_target_": "tunebook.rewards.MathEquivalence"}}) as scorer:
        scores = scorer.score([Sample(text, {"answer": answer}) for text, answer in cases])
    assert here == there == [score.total for score in scores] == expected
