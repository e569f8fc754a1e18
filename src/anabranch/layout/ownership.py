"""Who owns which heads, cached positions and KV heads. Nothing else computes any of this.

Rank (cp, tp) works in prefill on heads [tp*H/A, (tp+1)*H/A). In decode it owns sub-slice cp of that
slice, global slice tp*C + cp of H/(A*C) heads: only so does the slice lie in its resident weights.
Position p belongs to stripe (p // I) % N; the stripe of a rank is ts*C + cp. Ranks that differ only
in cp and ts form a stripe group; *group head order* is the members' owned heads in member order.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anabranch.layout.mesh import NONE, STRIPE, Axes, Mesh

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Stripes:
    """Ownership of positions: N stripes of interleave I. Pages hold `page` logical positions."""

    count: int
    interleave: int = 1
    page: int = 64

    def __post_init__(self) -> None:
        if self.page % (self.count * self.interleave):
            raise ValueError(
                f"a page of {self.page} positions cannot be cut into {self.count} stripes of "
                f"interleave {self.interleave}; use a multiple of {self.count * self.interleave}"
            )

    @property
    def local_page(self) -> int:
        """Slots of a page on each rank."""
        return self.page // self.count

    def stripe_of(self, position: Ints) -> Ints:
        return position // self.interleave % self.count

    def slot_of(self, position: Ints) -> Ints:
        """Index of a position among those of its own stripe, in position order."""
        cycle = self.count * self.interleave
        return position // cycle * self.interleave + position % self.interleave

    def local_len(self, length: Ints, stripe: int) -> Ints:
        """Positions below `length` that `stripe` owns."""
        cycle, rest = np.divmod(np.asarray(length), self.count * self.interleave)
        extra = np.clip(rest - stripe * self.interleave, 0, self.interleave)
        result: Ints = cycle * self.interleave + extra
        return result

    def positions(self, low: int, high: int, stripe: int) -> Ints:
        """Positions of [low, high) that `stripe` owns, ascending."""
        every: Ints = np.arange(low, high)
        mine: Ints = every[self.stripe_of(every) == stripe]
        return mine


@dataclass(frozen=True)
class Ownership:
    """Head ranges and stripe groups of every rank. heads, kv_heads: of the whole model."""

    mesh: Mesh
    heads: int
    kv_heads: int
    stripes: Stripes
    split_decode: bool = True
    """Decode heads are cut over cp too (attention TP from replicated weights)."""

    @property
    def striped(self) -> bool:
        return self.stripes.count > 1

    @property
    def stripe_axes(self) -> Axes:
        """Axes along which ranks own different positions."""
        return self.mesh.live(STRIPE) if self.striped else NONE

    def stripe(self, rank: int) -> int:
        """The stripe whose positions `rank` stores."""
        here = self.mesh.coord(rank)
        return here.ts * self.mesh.cp + here.cp if self.striped else 0

    def group(self, rank: int) -> tuple[int, ...]:
        """The stripe group of `rank`, in member (rank) order."""
        return self.mesh.group(rank, self.stripe_axes)

    def group_stripes(self, rank: int) -> tuple[int, ...]:
        """The stripe of each member of the stripe group, in member order."""
        return tuple(self.stripe(r) for r in self.group(rank))

    def prefill_heads(self, rank: int) -> range:
        """Heads whose weights are resident on `rank`."""
        width = self.heads // self.mesh.attn_tp
        start = self.mesh.coord(rank).tp * width
        return range(start, start + width)

    def decode_heads(self, rank: int) -> range:
        """Heads that `rank` owns in decode: a sub-slice of its resident ones."""
        resident = self.prefill_heads(rank)
        if not self.split_decode:
            return resident
        width = len(resident) // self.mesh.cp
        start = resident.start + self.mesh.coord(rank).cp * width
        return range(start, start + width)

    def group_heads(self, rank: int) -> tuple[int, ...]:
        """All heads of the stripe group, in group head order."""
        return tuple(h for r in self.group(rank) for h in self.decode_heads(r))

    def kv_range(self, rank: int) -> range:
        """KV heads that `rank` stores: its th index's slice (replicated if th exceeds them)."""
        th, size = self.mesh.coord(rank).th, self.mesh.th
        if self.kv_heads % size == 0:
            width = self.kv_heads // size
            return range(th * width, (th + 1) * width)
        start = th * self.kv_heads // size
        return range(start, start + 1)

    def kv_map(self, rank: int, heads: tuple[int, ...] | range) -> tuple[int, ...]:
        """For each query head, the index of its KV head among those `rank` stores."""
        stored = self.kv_range(rank)
        mapped = tuple(h * self.kv_heads // self.heads - stored.start for h in heads)
        assert all(0 <= kv < len(stored) for kv in mapped), (rank, heads, stored)
        return mapped

    @property
    def copies(self) -> int:
        """How many ranks of a replica store each cached KV head of a position."""
        return (
            self.mesh.replica_size * len(self.kv_range(0)) // (self.kv_heads * self.stripes.count)
        )


def within(inner: range, outer: range) -> tuple[int, int]:
    """Bounds of `inner` counted from the start of `outer`, which holds it."""
    assert outer.start <= inner.start and inner.stop <= outer.stop, (inner, outer)
    return inner.start - outer.start, inner.stop - outer.start
