"""Which rows of a plan a rank holds, in which order: the integers behind a step's inputs.

Every row of a step has an id: replica by replica, prefill before decode, in plan order. Results
come back in that order, whatever the layout in between. numpy only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anabranch.core.plan import Chunks, Phase, StepPlan
from anabranch.layout.choice import Layout
from anabranch.layout.mesh import DP, EVERY, Axes
from anabranch.layout.split import RowSplit, cp_split, even_split, interleaved, zigzag

Ints = NDArray[np.int64]
NONE: Ints = np.zeros(0, np.int64)


@dataclass(frozen=True)
class SegmentRows:
    """Rows of one phase over all replicas.

    chunks: per replica. order: per replica, its plan rows in layout order (cp rank by cp rank).
    per_cp: per replica, rows of each cp rank. base: per replica, id of its first plan row.
    """

    phase: Phase
    chunks: tuple[Chunks, ...]
    order: tuple[Ints, ...]
    per_cp: tuple[tuple[int, ...], ...]
    base: tuple[int, ...]
    split: RowSplit

    def ids(self, dp: int) -> Ints:
        """Ids of replica `dp`'s rows in layout order."""
        return self.order[dp] + self.base[dp]


@dataclass(frozen=True)
class StepRows:
    layout: Layout
    segments: tuple[SegmentRows, ...]
    wanted: NDArray[np.bool_]
    """Per id, whether its logits are needed."""

    def residual_ids(self, rank: int, shard: Axes) -> Ints:
        """Ids of the residual rows of `rank`, in the order it holds them."""
        mesh = self.layout.mesh
        here = mesh.coord(rank).dp
        parts = []
        for seg in self.segments:
            if shard == EVERY:
                first = mesh.rank(dp=here)
                start = sum(seg.split.counts[first:rank])
                parts.append(seg.ids(here)[start : start + seg.split.counts[rank]])
            elif shard == DP:
                parts.append(seg.ids(here))
            else:
                parts += [seg.ids(dp) for dp in range(mesh.dp)]
        return np.concatenate(parts) if parts else NONE

    def wanted_ids(self, rank: int, shard: Axes) -> Ints:
        """Ids of the rows of `rank` whose logits are needed, in the order it holds them."""
        held = self.residual_ids(rank, shard)
        return held[self.wanted[held]]

    def replica_ids(self, dp: int) -> tuple[int, int]:
        """(start, stop) of the ids of replica `dp`."""
        sizes = [sum(seg.chunks[d].rows for seg in self.segments) for d in range(dp + 1)]
        return sum(sizes[:dp]), sum(sizes)

    def joint(self, shard: Axes) -> RowSplit:
        """Rows of all segments together, as FFN blocks see them."""
        splits = [seg.split for seg in self.segments]
        if shard == EVERY:
            total = splits[0]
            for split in splits[1:]:
                total = total + split
            return total
        mesh = self.layout.mesh
        leads = [mesh.rank(dp=r) for r in range(mesh.dp)]
        return even_split(mesh, [sum(s.local(r, DP) for s in splits) for r in leads])


def bucket(rows: int) -> int:
    """The padded size of `rows` >= 1 rows: a power of two."""
    return 1 << (rows - 1).bit_length()


def step_rows(layout: Layout, plan: StepPlan, pad: int | None = None) -> StepRows:
    """Lay out the rows of a plan. Phases without a row on any replica have no segment.

    pad: the seat of padded rows. Given it, a step that is decode on every replica has one bucket of
    rows on each of them.
    """
    phases = [p for p in Phase if any(r.chunks(p).rows for r in plan.replicas)]
    chunks = {p: [r.chunks(p) for r in plan.replicas] for p in phases}
    if pad is not None and phases == [Phase.DECODE]:
        size = bucket(max(c.rows for c in chunks[Phase.DECODE]))
        chunks[Phase.DECODE] = [_padded(c, size - c.rows, pad) for c in chunks[Phase.DECODE]]
    bases: dict[Phase, list[int]] = {p: [] for p in phases}
    wanted, at = [], 0
    for replica in range(len(plan.replicas)):
        for phase in phases:
            here = chunks[phase][replica]
            flags = np.zeros(here.rows, bool)
            flags[here.logit_rows] = True
            wanted.append(flags)
            bases[phase].append(at)
            at += here.rows
    segments = tuple(_segment(layout, p, chunks[p], bases[p]) for p in phases)
    return StepRows(layout, segments, np.concatenate(wanted) if wanted else np.zeros(0, bool))


def _padded(chunks: Chunks, rows: int, seat: int) -> Chunks:
    """`rows` chunks of one row are added, which nobody reads: token 0 at position 0 of `seat`."""
    zeros, flags = np.zeros(rows, np.int32), np.zeros(rows, np.uint8)
    return Chunks(
        seat=np.append(chunks.seat, zeros + np.int32(seat)),
        start=np.append(chunks.start, zeros),
        count=np.append(chunks.count, zeros + np.int32(1)),
        tokens=np.append(chunks.tokens, zeros),
        logits=np.append(chunks.logits, flags),
        sample=np.append(chunks.sample, flags),
    )


def _segment(
    layout: Layout, phase: Phase, chunks: Sequence[Chunks], base: list[int]
) -> SegmentRows:
    mesh = layout.mesh
    if phase is Phase.PREFILL:
        every = [_cp_rows(layout, c) for c in chunks]
        per_cp = tuple(tuple(len(rows) for rows in per) for per in every)
        order = tuple(np.concatenate(per) for per in every)
        split = cp_split(mesh, per_cp)
    else:
        split = even_split(mesh, [c.rows for c in chunks])
        order = tuple(np.arange(c.rows) for c in chunks)
        tp = mesh.attn_tp
        counts = [split.counts[r : r + tp] for r in range(0, mesh.world, tp)]
        sums = [sum(c) for c in counts]
        per_cp = tuple(tuple(sums[r : r + mesh.cp]) for r in range(0, len(sums), mesh.cp))
    return SegmentRows(phase, tuple(chunks), order, per_cp, tuple(base), split)


def _cp_rows(layout: Layout, chunks: Chunks) -> list[Ints]:
    """Plan rows of each cp rank of a replica, chunk by chunk."""
    size = layout.mesh.cp
    first = np.cumsum(chunks.count) - chunks.count
    if size == 1:
        return [np.arange(chunks.rows)]
    rows: list[list[Ints]] = [[NONE] for _ in range(size)]
    for at, start, count in zip(first, chunks.start, chunks.count, strict=True):
        for c in range(size):
            if layout.cp_split == "zigzag":
                mine = zigzag(int(count), size, c)
            else:
                step = layout.stripes.interleave
                mine = interleaved(int(start), int(count), size, c, step)
            rows[c].append(mine + int(at))
    return [np.concatenate(r) for r in rows]
