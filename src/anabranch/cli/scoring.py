"""Scores and their statistics. Pure functions of texts and counts.

GSM8K is scored as lm-evaluation-harness's task `gsm8k` version 3 defines it: which number is taken
from an answer (strict: the first after ####; flexible: the last in the text) and what is stripped
before the comparison.
"""

import re
from math import comb, exp, sqrt

_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_STRIPPED = tuple(re.compile(p) for p in (r",", r"\$", r"(?s).*#### ", r"\.$"))
_Z95 = 1.959963984540054
NO_ANSWER = "[invalid]"


def strict_answer(text: str) -> str:
    """The number after the first `#### `, or NO_ANSWER."""
    found = _STRICT.search(text)
    return NO_ANSWER if found is None else found.group(1).strip()


def flexible_answer(text: str) -> str:
    """The last thing in `text` that looks like a number, or NO_ANSWER."""
    found = _FLEXIBLE.findall(text)
    return NO_ANSWER if not found else next(group for group in found[-1] if group).strip()


def normalised(text: str) -> str:
    """What is compared: no commas, no dollar signs, nothing before `#### `, no last full stop."""
    for pattern in _STRIPPED:
        text = pattern.sub("", text)
    return text.lower()


def gsm8k_correct(found: str, reference: str) -> bool:
    """Does an extracted answer equal a reference solution's?"""
    return normalised(found) == normalised(reference)


def wilson(correct: int, n: int) -> tuple[float, float]:
    """95% interval of a share (Wilson's score interval)."""
    if n == 0:
        return 0.0, 1.0
    share, z2 = correct / n, _Z95**2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z95 * sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided exact p of McNemar's test; the counts are of items that only one got right."""
    n = only_a + only_b
    if n == 0:
        return 1.0
    tail = sum(comb(n, i) for i in range(min(only_a, only_b) + 1))
    return float(min(1.0, 2 * tail / 2**n))


def perplexity(logprob_sum: float, tokens: int) -> float:
    """exp of the mean negative logprob (natural log)."""
    if tokens == 0:
        raise ValueError("no token was scored: each window needs at least two")
    return exp(-logprob_sum / tokens)
