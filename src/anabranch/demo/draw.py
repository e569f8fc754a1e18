"""One problem while it is being written: random numbers, story sentences, worked lines.

Owns the drawing of numbers and people and the bookkeeping of a solution. Knows no template.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from anabranch.demo import lexicon, working
from anabranch.demo.working import Unfit

T = TypeVar("T")
SIZES = ((2, 40), (10, 99), (20, 400), (100, 999))


class Draw:
    """Collects `text` (sentences), `lines` (worked steps) and `numbers` (all that were drawn)."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.numbers: list[int] = []
        self.lines: list[str] = []
        self.text: list[str] = []
        self.words: dict[str, str] = {}
        self.low, self.high = rng.choices(SIZES, (3, 4, 3, 1))[0]

    # -- drawing ---------------------------------------------------------------------------

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self.rng.random() * len(options))]

    def n(self, low: int, high: int) -> int:
        """A number that appears in the question, low <= n <= high."""
        if high < low:
            raise Unfit
        value = low + int(self.rng.random() * (high - low + 1))
        self.numbers.append(value)
        return value

    def given(self, value: int) -> int:
        """Records a derived number that appears in the question."""
        if not 0 < value <= working.LARGEST:
            raise Unfit
        self.numbers.append(value)
        return value

    def amount(self) -> int:
        """A number of this problem's size."""
        return self.n(self.low, self.high)

    def below(self, limit: int) -> int:
        """An amount that can be taken from `limit`, leaving something."""
        return self.n(2, min(limit - 1, self.high))

    def divisor(self, value: int, low: int = 2, high: int = 12) -> int:
        """A divisor of `value` whose quotient is at least 2."""
        fitting = [k for k in range(low, high + 1) if value % k == 0 and value >= 2 * k]
        if not fitting:
            raise Unfit
        return self.given(self.pick(fitting))

    def rate(self, value: int) -> int:
        """A percentage that takes a whole share of `value`."""
        fitting = [50] if value % 2 == 0 else []
        if value % 4 == 0:
            fitting += [25, 75]
        if value % 10 == 0:
            fitting += [10, 20, 30, 40, 60, 70, 80, 90]
        if value % 20 == 0:
            fitting.append(5)
        if not fitting:
            raise Unfit
        return self.given(self.pick(fitting))

    def people(self, *keys: str) -> None:
        """Different names under `keys`; the first also sets the pronouns he, He, his, him."""
        chosen: list[str] = []
        for key in keys:
            name = self.pick(self.pick((lexicon.WOMEN, lexicon.MEN)))
            while name in chosen:
                name = self.pick(lexicon.MEN)
            chosen.append(name)
            self.words[key] = name
        she = chosen[0] in lexicon.WOMEN
        self.words["he"], self.words["his"] = ("she", "her") if she else ("he", "his")
        self.words["He"], self.words["him"] = ("She", "her") if she else ("He", "him")

    def say(self, options: Sequence[str], **values: int | str) -> None:
        """Adds one of the sentences, filled in."""
        self.text.append(self.pick(options).format(**self.words, **values))

    # -- working ---------------------------------------------------------------------------

    def add(self, label: str, a: int, b: int) -> int:
        return self._line(label, working.plus(a, b))

    def sub(self, label: str, a: int, b: int) -> int:
        return self._line(label, working.minus(a, b))

    def mul(self, label: str, a: int, b: int) -> int:
        return self._line(label, working.times(a, b))

    def div(self, label: str, a: int, b: int) -> int:
        return self._line(label, working.over(a, b))

    def percent(self, label: str, rate: int, value: int) -> int:
        """`rate` percent of `value` by tenths, quarters or halves."""
        if rate in (50, 25):
            return self.div(label, value, 100 // rate)
        if rate == 75:
            return self.mul(label, self.div("25%", value, 4), 3)
        if rate == 10:
            return self.div(label, value, 10)
        tenth = self.div("10%", value, 10)
        return self.div(label, tenth, 2) if rate == 5 else self.mul(label, tenth, rate // 10)

    def total(self, label: str, values: Sequence[int]) -> int:
        """Sum of two or more values, one line per addition."""
        result = values[0]
        for value in values[1:]:
            result = self.add(label, result, value)
        return result

    def _line(self, label: str, step: tuple[str, int]) -> int:
        text, value = step
        self.lines.append(f"{label}: {text}")
        return value


@dataclass(frozen=True)
class Template:
    """A named way to write one kind of problem; `build` fills a Draw and returns the answer."""

    name: str
    operations: int
    build: Callable[[Draw], int]
