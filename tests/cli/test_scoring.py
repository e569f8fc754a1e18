"""Scores against lm-evaluation-harness's own (stored), and statistics against known values."""

import pytest

from anabranch.cli.scoring import (
    flexible_answer,
    gsm8k_correct,
    mcnemar,
    perplexity,
    strict_answer,
    wilson,
)

# reference solution, answer, then what lm-evaluation-harness 0.4.13 (task gsm8k, version 3.0)
# extracts and scores: strict, flexible, strict right, flexible right
STORED = [
    ("x = 1\n#### 18", " She has 18.\n#### 18", "18", "18", True, True),
    ("#### 1,250", "so $1250 #### 1,250", "1,250", "1,250", True, True),
    ("#### 72", "#### 72.", "72.", "72.", True, True),
    ("#### 5", "The answer is 5", "[invalid]", "5", False, True),
    ("#### 5", "####5", "[invalid]", "5", False, True),
    ("#### 10", "#### 10\nQ: 20", "10", "20", True, False),
    ("#### -3", "it is -3\n#### -3", "-3", "-3", True, True),
    ("#### 3", "it is -3", "[invalid]", "-3", False, False),
    ("#### 0.5", "#### .5", ".5", ".5", False, False),
    ("#### 0.5", "#### 0.5", "0.5", "0.5", True, True),
    ("#### 7", "no number here", "[invalid]", "[invalid]", False, False),
    ("#### 7", "7", "[invalid]", "7", False, True),
    ("#### 7", "#### seven 7", "[invalid]", "7", False, True),
    ("#### 40", "He paid $40.", "[invalid]", "$40.", False, True),
    ("#### 1000", "#### 1,000.00", "1,000.00", "1,000.00", False, False),
    ("#### 12", "12...", "[invalid]", "12...", False, False),
    ("#### 6", "#### 5\n#### 6", "5", "6", False, True),
    ("#### 8", "a, b. 8 apples", "[invalid]", "8", False, True),
    ("#### 100", "#### $100", "[invalid]", "$100", False, True),
    ("#### 2,000", "2000 dollars, or 2,000", "[invalid]", "2,000", False, True),
    ("#### 64", "#### 64 and then 3.", "64", "3.", True, False),
    ("#### 9", ". ,", "[invalid]", "[invalid]", False, False),
]


@pytest.mark.parametrize("row", STORED)
def test_gsm8k_equals_the_harness(row: tuple[str, str, str, str, bool, bool]) -> None:
    reference, answer, strict, flexible, strict_right, flexible_right = row
    assert strict_answer(answer) == strict
    assert flexible_answer(answer) == flexible
    assert gsm8k_correct(strict_answer(answer), reference) is strict_right
    assert gsm8k_correct(flexible_answer(answer), reference) is flexible_right


def test_wilson_equals_scipy() -> None:
    from scipy import stats

    for correct, n in ((0, 10), (10, 10), (7, 10), (475, 500), (1, 3)):
        theirs = stats.binomtest(correct, n).proportion_ci(0.95, "wilson")
        assert wilson(correct, n) == pytest.approx((theirs.low, theirs.high), abs=1e-12)
    assert wilson(0, 0) == (0.0, 1.0)


def test_mcnemar_equals_the_binomial_test() -> None:
    from scipy import stats

    for b, c in ((1, 0), (5, 2), (20, 4), (10, 10), (0, 12)):
        assert mcnemar(b, c) == pytest.approx(stats.binomtest(b, b + c, 0.5).pvalue)
    assert mcnemar(0, 0) == 1.0


def test_perplexity() -> None:
    assert perplexity(-10.0, 5) == pytest.approx(7.38905609893065)
    with pytest.raises(ValueError, match="two"):
        perplexity(0.0, 0)
