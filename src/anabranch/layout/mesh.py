"""Rank arithmetic: the P ranks of one model copy as a grid of named axes. Integers only."""

from dataclasses import dataclass
from functools import cached_property

Axes = frozenset[str]

AXES = ("dp", "cp", "th", "ts")
"""Outermost first. Attention TP is th x ts: th cuts KV heads, ts shares them, may stripe the KV."""


def axes(*names: str) -> Axes:
    return frozenset(names)


NONE = axes()
DP = axes("dp")
DP_CP = axes("dp", "cp")
CP = axes("cp")
TP = axes("th", "ts")
REPLICA = axes("cp", "th", "ts")
STRIPE = axes("cp", "ts")
EVERY = axes(*AXES)


@dataclass(frozen=True)
class Coord:
    """Where a rank stands. `tp` is its attention-TP index, th * S + ts."""

    dp: int
    cp: int
    th: int
    ts: int
    tp: int


@dataclass(frozen=True)
class Mesh:
    """rank = ((dp * cp_size + cp) * th_size + th) * ts_size + ts."""

    dp: int = 1
    cp: int = 1
    th: int = 1
    ts: int = 1

    @property
    def world(self) -> int:
        return self.dp * self.cp * self.th * self.ts

    @property
    def attn_tp(self) -> int:
        """A: ranks over which the heads of one row are cut in prefill."""
        return self.th * self.ts

    @property
    def replica_size(self) -> int:
        return self.cp * self.attn_tp

    def size(self, axis: str) -> int:
        return self.sizes[axis]

    @cached_property
    def sizes(self) -> dict[str, int]:
        return {"dp": self.dp, "cp": self.cp, "th": self.th, "ts": self.ts}

    def live(self, along: Axes) -> Axes:
        """The given axes without those of size 1, which never move anything."""
        return frozenset(a for a in along if self.sizes[a] > 1)

    def coord(self, rank: int) -> Coord:
        rest, ts = divmod(rank, self.ts)
        rest, th = divmod(rest, self.th)
        dp, cp = divmod(rest, self.cp)
        return Coord(dp, cp, th, ts, th * self.ts + ts)

    def rank(self, dp: int = 0, cp: int = 0, th: int = 0, ts: int = 0) -> int:
        return ((dp * self.cp + cp) * self.th + th) * self.ts + ts

    def group(self, rank: int, along: Axes) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along the given axes, in rank order."""
        here = self.coord(rank)
        spans = [range(self.sizes[a]) if a in along else (getattr(here, a),) for a in AXES]
        dps, cps, ths, tss = spans
        return tuple(self.rank(d, c, h, s) for d in dps for c in cps for h in ths for s in tss)

    def replica(self, dp: int) -> tuple[int, ...]:
        """The ranks that share the requests of replica `dp`; the first of them leads it."""
        first = dp * self.replica_size
        return tuple(range(first, first + self.replica_size))


def part(total: int, parts: int, index: int, unit: int = 1) -> tuple[int, int]:
    """Balanced contiguous cut: (start, stop) of part `index`; cuts fall on multiples of `unit`."""
    units = -(-total // unit)
    share, extra = divmod(units, parts)
    start = index * share + min(index, extra)
    stop = start + share + (index < extra)
    return min(start * unit, total), min(stop * unit, total)
