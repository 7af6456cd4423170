"""The last number of a completion against the answer."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunebook.rewards import NotedReward, exact_number
from tunebook.rewards.exact_number import final_number

READ = [
    ("18", 18),
    ("The answer is 18.", 18),
    ("#### 18", 18),
    ("18 apples, I think", 18),
    ("first 3, then 4, so 18", 18),
    ("#### 18\nThat was 3 times 6.", 6),  # the last behind the mark
    ("3 times 6\n#### $18.00", 18),
    ("18 ####", 18),  # nothing behind the mark
    ("#### 3 #### 18", 18),
    ("1,234", 1234),
    ("1,234,567.5", Fraction("1234567.5")),
    ("1,2", 2),
    ("1,2345", 2345),
    ("12,345,67", 67),
    ("$1,000", 1000),
    ("€ 5", 5),
    ("50%", 50),
    ("-7", -7),
    ("\u22127", -7),
    ("-$5", -5),
    ("$-5", -5),
    ("x = -5", -5),
    ("(-5)", -5),
    ("10-3", 3),
    ("f(2)-3", 3),
    ("0.75", Fraction(3, 4)),
    (".5", Fraction(1, 2)),
    ("3/4", Fraction(3, 4)),
    ("-3/4", Fraction(-3, 4)),
    ("1e3", 1000),
    ("2.5E-1", Fraction(1, 4)),
    ("007", 7),
    ("**18**", 18),
    ("\\boxed{18}", 18),
    ("18<|im_end|>", 18),
    ("١٨", 18),
]


@pytest.mark.parametrize(("text", "number"), READ)
def test_what_is_read(text, number):
    assert final_number(text) == number
    assert exact_number(text, answer=str(number)) == 1.0
    assert exact_number(text, answer=str(number + 1)) == 0.0
    assert exact_number("So it is 41.", answer=text) == 0.0


NOT_READ = ["", " ", "no number", "####", "five", "5/0", "7" * 301, "∞", "½"]


@pytest.mark.parametrize("text", NOT_READ)
def test_no_number_is_a_wrong_answer_that_is_counted_apart(text):
    reward = exact_number(text, answer=5)
    assert reward == 0.0
    assert isinstance(reward, NotedReward) and reward.note == "no_answer"


@pytest.mark.parametrize("ending", ["", ".", "\n", "<|im_end|>", "</s>", "\n\nQ:", " and th"])
def test_case_79_a_right_answer_scores_however_it_ended(ending):
    """By its end token, a stop string or its limit."""
    assert exact_number(f"The answer is 12{ending}", answer="12") == 1.0
    assert exact_number(f"The answer is 13{ending}", answer="12") == 0.0


@pytest.mark.parametrize(("answer", "given"), [(18, "18"), (18.0, "18"), (0.1, "0.1"), (-3, "-3")])
def test_answers_may_be_numbers(answer, given):
    assert exact_number(given, answer=answer) == 1.0


def test_a_solution_of_gsm8k_is_an_answer():
    assert exact_number("18", answer="16 - 3 - 4 = <<16-3-4=9>>9\n9 * 2 = 18\n#### 18") == 1.0


def test_equality_is_exact():
    assert exact_number("0.33", answer="1/3") == 0.0
    assert exact_number("0.1", answer="1/10") == 1.0
    assert exact_number("0.30000000000000004", answer="0.3") == 0.0


@pytest.mark.parametrize("answer", [None, "", "none", [], True])
def test_an_answer_without_a_number_is_an_error_of_the_row(answer):
    with pytest.raises(ValueError, match="the row's answer is"):
        exact_number("18", answer=answer)


@given(st.text(alphabet=st.sampled_from("0123456789,.-−$%/eE# \\x١"), max_size=40))
def test_no_text_raises(text):
    assert exact_number(text, answer="1") in (0.0, 1.0)
    assert exact_number(text + " 1", answer="1") == 1.0


def test_long_texts_take_no_time_to_speak_of():
    """Inputs that a careless pattern backtracks on."""
    for text in ("1" * 200_000, "1," * 100_000, "1,111" * 50_000, "-" * 200_000, "$" * 200_000):
        assert exact_number(text + " 5", answer=5) == 1.0
