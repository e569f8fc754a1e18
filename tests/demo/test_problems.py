"""Every written step is true, splits share nothing, equal seeds give equal problems."""

import itertools
import re

import pytest

from anabranch.demo.problems import (
    Problem,
    Split,
    extract_answer,
    held_out,
    kept_numbers,
    problems,
)
from anabranch.demo.working import Unfit, minus, over, plus, times

SPLITS: tuple[Split, ...] = ("train", "new-numbers", "held-out")
_EQUATION = re.compile(r"([0-9+*/-]+)( \[[^]]*\])?=(\d+)(?:r(\d+))?")


def value_of(terms: str) -> int:
    """An expression of + - * over whole numbers, with * first."""
    total = 0
    for sign, product in re.findall(r"([+-]?)([0-9*]+)", terms):
        value = 1
        for factor in product.split("*"):
            value *= int(factor)
        total += -value if sign == "-" else value
    return total


def check_step(step: str) -> int:
    """The result of `a/b=q`, `a/b=qrR`, `a+b [..]=c`...; asserts that it and all in it are true."""
    found = _EQUATION.fullmatch(step)
    assert found is not None, step
    left, inner, result, rest = found.groups()
    for part in (inner or " []")[2:-1].split(","):
        if part:
            check_step(part)
    if "/" in left:
        a, b = map(int, left.split("/"))
        assert a == int(result) * b + int(rest or 0) and int(rest or 0) < b, step
    else:
        assert value_of(left) == int(result) and rest is None, step
    return int(result)


def check_line(line: str) -> int:
    """The result of a worked line: a label, then steps; a product's first term has no result."""
    _, _, working = line.partition(": ")
    *steps, last = working.split("; ")
    if not steps:
        return check_step(last)
    results = [check_step(step) for step in steps[1:]]
    total = check_step(last)
    assert value_of(steps[0]) == total and results, line
    return total


def check(problem: Problem) -> None:
    *lines, last = problem.solution.splitlines()
    assert lines and last == f"#### {problem.answer}"
    assert check_line(lines[-1]) == int(problem.answer) > 0
    for line in lines:
        check_line(line)
    assert extract_answer(problem.solution) == problem.answer
    assert len(problem.answer) <= 4 and "{" not in problem.question


@pytest.mark.parametrize("split", SPLITS)
def test_every_written_step_is_true(split: Split) -> None:
    for problem in problems(split, 1500, seed=3):
        check(problem)


def test_the_check_sees_false_steps() -> None:
    for line in ("x: 2+2=5", "x: 34/8=4r3", "x: 12+19 [2+9=12,1+1+1=3]=31",
                 "x: 34*27; 34*7 [4*7=28,3*7+2=23]=238; 34*20 [4*2=8,3*2=6]=681"):  # fmt: skip
        with pytest.raises(AssertionError):
            check_line(line)


@pytest.mark.parametrize(
    ("write", "truth"),
    [
        (plus, lambda a, b: a + b), (minus, lambda a, b: a - b),
        (times, lambda a, b: a * b), (over, lambda a, b: a // b),
    ],
)  # fmt: skip
def test_the_notation_of_all_small_numbers(write, truth) -> None:
    numbers = [*range(0, 130, 7), 10, 100, 99, 101, 999, 4999]
    written = 0
    for a, b in itertools.product(numbers, numbers):
        if write is times and 0 in (a, b):
            continue
        try:
            text, value = write(a, b)
        except Unfit:
            continue
        written += 1
        assert value == truth(a, b) == check_line(f"x: {text}"), text
    assert written > 20


def test_splits_share_no_template_and_no_numbers() -> None:
    drawn = {split: list(problems(split, 1500, seed=1)) for split in SPLITS}
    names = {split: {p.template for p in drawn[split]} for split in SPLITS}
    assert not names["held-out"] & (names["train"] | names["new-numbers"])
    assert all(held_out(name) for name in names["held-out"])
    assert not any(held_out(name) for name in names["train"] | names["new-numbers"])
    questions = {split: {p.question for p in drawn[split]} for split in SPLITS}
    assert not questions["train"] & questions["new-numbers"]
    assert len(names["train"]) > 200, "hundreds of templates"


def test_kept_numbers_are_a_fixed_eighth() -> None:
    kept = sum(kept_numbers((a, b)) for a in range(2, 102) for b in range(2, 102))
    assert 0.10 < kept / 10_000 < 0.15
    assert kept_numbers((3, 4)) == kept_numbers([3, 4])


@pytest.mark.parametrize("split", SPLITS)
def test_equal_seeds_give_equal_problems(split: Split) -> None:
    first, again = list(problems(split, 50, 9)), list(problems(split, 50, 9))
    other = list(problems(split, 50, 10))
    assert first == again and first != other
    assert list(problems(split, 20, 9)) == first[:20]
    with pytest.raises(ValueError, match="split"):
        next(problems("test", 1, 0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "answer"),
    [("#### 12", "12"), ("a\n#### 1,234", "1234"), ("#### $7", "7"), ("####-3", "-3"),
     ("#### 5\n#### 6", "6"), ("12", None), ("#### x", None)],
)  # fmt: skip
def test_answers_are_what_follows_the_last_marks(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer
