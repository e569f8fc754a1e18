"""Which rows each rank holds: a `RowSplit`, made from a plan per segment, in integers.

Rows of a segment have one order, the *layout order*: replica by replica, within a replica cp rank
by cp rank, within that TP rank by TP rank. Shards along dp, along dp and cp, and along all axes are
then contiguous runs of that order, so every move is a concatenation or a cut in member order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anabranch.layout.mesh import EVERY, Axes, Mesh, part

Index = NDArray[np.int64]


@dataclass(frozen=True)
class RowSplit:
    """Rows of one segment (or of several together) over the ranks of a mesh.

    counts: per rank, its rows when sharded along every axis.
    """

    mesh: Mesh
    counts: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.counts)

    def local(self, rank: int, shard: Axes) -> int:
        """Rows that `rank` holds when they are sharded along `shard`."""
        return sum(self.counts[r] for r in self.mesh.group(rank, EVERY - shard))

    def member_counts(self, rank: int, along: Axes, shard: Axes) -> tuple[int, ...]:
        """Rows of each member of the group of `rank` along `along`, when sharded along `shard`."""
        return tuple(self.local(r, shard) for r in self.mesh.group(rank, along))

    def __add__(self, other: "RowSplit") -> "RowSplit":
        assert self.mesh == other.mesh
        pairs = zip(self.counts, other.counts, strict=True)
        return RowSplit(self.mesh, tuple(a + b for a, b in pairs))


def even_split(mesh: Mesh, rows: Sequence[int]) -> RowSplit:
    """rows[r] rows of replica r in contiguous balanced parts over its ranks."""
    size = mesh.replica_size
    cuts = [part(n, size, i) for n in rows for i in range(size)]
    return RowSplit(mesh, tuple(stop - start for start, stop in cuts))


def cp_split(mesh: Mesh, rows_of_cp: Sequence[Sequence[int]]) -> RowSplit:
    """rows_of_cp[r][c] rows of cp rank c of replica r, each in balanced parts over its TP ranks."""
    tp = mesh.attn_tp
    cuts = [part(n, tp, i) for per_cp in rows_of_cp for n in per_cp for i in range(tp)]
    return RowSplit(mesh, tuple(stop - start for start, stop in cuts))


def zigzag(count: int, cp: int, index: int) -> Index:
    """Offsets within a chunk of the rows of cp rank `index`: blocks index and 2*cp-1-index."""
    low = part(count, 2 * cp, index)
    high = part(count, 2 * cp, 2 * cp - 1 - index)
    return np.concatenate([np.arange(*low), np.arange(*high)])


def interleaved(start: int, count: int, cp: int, index: int, interleave: int = 1) -> Index:
    """Offsets of the rows whose absolute position p has (p // interleave) % cp == index."""
    offsets: Index = np.arange(count)
    mine: Index = offsets[(start + offsets) // interleave % cp == index]
    return mine
