"""Generated word problems, split strictly by template and by numbers.

Owns the splits. A template is held out by its name, a set of numbers by its hash, so that

    train          trained templates, trained numbers
    new-numbers    trained templates, numbers that no training problem has
    held-out       templates that were never trained, and such numbers

Knows nothing of models, tokenizers or servers.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

from anabranch.demo import relations, scenes, stock
from anabranch.demo.draw import Draw, Template
from anabranch.demo.working import Unfit

Split = Literal["train", "new-numbers", "held-out"]

NEVER_TRAINED = stock.NEVER_TRAINED | scenes.NEVER_TRAINED
"""Settings whose templates are all held out."""

WEIGHTS = {"buy": 12, "trip": 10, "time": 8, "ages": 7, "compare": 8, "share": 5, "ratio": 3,
           "percent": 5, "shape": 4}  # fmt: skip
OTHER_WEIGHTS = {"stock": 24, "work": 14}
LONGEST = 300
"""Most characters of a solution; longer ones are drawn again."""

_ANSWER = re.compile(r"####\s*\$?(-?[\d,]*\d)")


@dataclass(frozen=True)
class Problem:
    """One problem; `solution` ends with `#### answer`."""

    question: str
    solution: str
    answer: str
    template: str


def extract_answer(text: str) -> str | None:
    """The number after the last `####`, without commas, or None."""
    found = _ANSWER.findall(text)
    return found[-1].replace(",", "") if found else None


def held_out(template: str) -> bool:
    """Whether a template is kept from training."""
    return template.split("/")[0] in NEVER_TRAINED or zlib.crc32(template.encode()) % 7 == 0


def kept_numbers(numbers: Sequence[int]) -> bool:
    """Whether a set of numbers is kept from training."""
    return zlib.crc32(",".join(map(str, numbers)).encode()) % 8 == 0


def problems(split: Split, n: int | None, seed: int) -> Iterator[Problem]:
    """`n` problems of a split (endless if None). Equal arguments give equal problems."""
    if split not in get_args(Split):
        raise ValueError(f"split {split!r}: one of {', '.join(get_args(Split))}")
    families, weights = _families(split == "held-out")
    rng = random.Random(f"{split}/{seed}")
    made = 0
    while n is None or made < n:
        (family,) = rng.choices(families, weights)
        problem = _attempt(family[int(rng.random() * len(family))], rng, split == "train")
        if problem is not None:
            made += 1
            yield problem


def _attempt(
    template: Template, rng: random.Random, train: bool, tries: int = 40
) -> Problem | None:
    """One problem of a template with numbers of the right side of the split."""
    for _ in range(tries):
        draw = Draw(rng)
        try:
            answer = template.build(draw)
        except Unfit:
            continue
        solution = "\n".join((*draw.lines, f"#### {answer}"))
        if answer > 0 and len(solution) <= LONGEST and kept_numbers(draw.numbers) != train:
            return Problem(" ".join(draw.text), solution, str(answer), template.name)
    return None


@cache
def _families(held: bool) -> tuple[list[list[Template]], list[float]]:
    """Templates of a side of the split by family, and the families' weights."""
    groups: dict[str, list[Template]] = {}
    for template in (*stock.templates(), *scenes.templates(), *relations.templates()):
        if held_out(template.name) == held:
            groups.setdefault(_family(template.name), []).append(template)
    everywhere = WEIGHTS | OTHER_WEIGHTS
    return list(groups.values()), [float(everywhere[name]) for name in groups]


def _family(template: str) -> str:
    head = template.split("/")[0]
    if head in WEIGHTS:
        return head
    return "work" if head in scenes.JOBS else "stock"
