"""Collectives of one rank, as a trial compares them."""

from collections import defaultdict
from dataclasses import dataclass, field

from torch import Tensor


def _lists() -> "defaultdict[tuple[int, ...], list[tuple[str, str, tuple[int, ...]]]]":
    return defaultdict(list)


@dataclass
class Trace:
    """Per group, (verb, dtype, shape past dim 0) in order."""

    entries: dict[tuple[int, ...], list[tuple[str, str, tuple[int, ...]]]] = field(
        default_factory=_lists
    )

    def __call__(self, verb: str, members: tuple[int, ...], x: Tensor) -> None:
        self.entries[members].append((verb, str(x.dtype), tuple(x.shape[1:])))
