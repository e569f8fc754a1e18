"""Which entries are brought to which queries where KV comes to Q, and what is stored on the way.

Fresh blocks are what the cp ranks computed in this step, gathered at once or passed round a ring;
cached blocks are the prefixes, read from the stripes of the group a workspace at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anabranch.layout.ownership import Ownership
from anabranch.nn.step import Block, Span
from anabranch.worker.rows import Ints, SegmentRows
from anabranch.worker.seats import Seats


@dataclass(frozen=True)
class SegmentView:
    """All rows of a segment on one replica, in layout order: seat, position and chunk of each.

    start, count, chunk_seat: per chunk. per_cp: rows of each cp rank. order: plan row of each row.
    """

    seat: Ints
    position: Ints
    chunk: Ints
    order: Ints
    start: Ints
    count: Ints
    chunk_seat: Ints
    per_cp: tuple[int, ...]

    @staticmethod
    def of(seg: SegmentRows, dp: int) -> "SegmentView":
        chunks, order = seg.chunks[dp], seg.order[dp]
        start, count = chunks.start.astype(np.int64), chunks.count.astype(np.int64)
        chunk = np.repeat(np.arange(len(count)), count)
        first = np.cumsum(count) - count
        position = start[chunk] + np.arange(len(chunk)) - first[chunk]
        chunk = chunk[order]
        seat = chunks.seat.astype(np.int64)
        return SegmentView(
            seat[chunk], position[order], chunk, order, start, count, seat, seg.per_cp[dp]
        )

    def of_cp(self, cp: int) -> slice:
        return slice(sum(self.per_cp[:cp]), sum(self.per_cp[: cp + 1]))


@dataclass(frozen=True)
class BlockMaker:
    """Blocks for one rank. workspace: most cached positions brought at a time."""

    own: Ownership
    rank: int
    workspace: int
    device: torch.device

    def index(self, values: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(self.device)

    def slots(self, seat: Ints, position: Ints, seats: Seats) -> Ints:
        """Pool slots of positions this rank owns."""
        local, size = self.own.stripes.slot_of(position), self.own.stripes.local_page
        slots: Ints = seats.pages[seat, local // size].astype(np.int64) * size + local % size
        return slots

    def stored(self, seat: Ints, position: Ints, seats: Seats) -> tuple[Tensor | None, Tensor]:
        """Of rows with these seats and positions: those this rank stores (None: all), their
        slots.
        """
        mine = self.own.stripes.stripe_of(position) == self.own.stripe(self.rank)
        rows = np.flatnonzero(mine)
        slots = self.index(self.slots(seat[rows], position[rows], seats))
        return (None if len(rows) == len(mine) else self.index(rows)), slots

    def everywhere(self, seat: Ints, position: Ints, seats: Seats, pad: int) -> Tensor:
        """Slots of all rows, as a step of a fixed size stores them: rows that this rank does not
        keep go to the page of the seat `pad`."""
        mine = self.own.stripes.stripe_of(position) == self.own.stripe(self.rank)
        kept, at = np.where(mine, seat, pad), np.where(mine, position, 0)
        return self.index(self.slots(kept, at, seats))

    def gathered(self, view: SegmentView, cp: int, seats: Seats) -> Block:
        """Entries of all cp ranks at once, put into plan order: chunk by chunk, ascending."""
        to_plan = np.argsort(view.order)
        seat, position = view.seat[to_plan], view.position[to_plan]
        first = np.cumsum(view.count) - view.count
        spans = tuple(_spans(view, view.of_cp(cp), position, first, first + view.count))
        rows, slots = self.stored(seat, position, seats)
        return Block(
            counts=view.per_cp,
            spans=spans,
            k_pos=self.index(position),
            order=None if len(view.per_cp) == 1 else self.index(to_plan),
            write_rows=rows,
            write_slots=slots,
        )

    def ring(self, view: SegmentView, cp: int, seats: Seats) -> tuple[Block, ...]:
        """One block per cp rank, in the order in which they pass this one: its own, then cp-1,
        ...
        """
        blocks = []
        for step in range(len(view.per_cp)):
            piece = view.of_cp((cp - step) % len(view.per_cp))
            chunk, position = view.chunk[piece], view.position[piece]
            low = np.searchsorted(chunk, np.arange(len(view.count)))
            high = np.searchsorted(chunk, np.arange(len(view.count)), side="right")
            rows, slots = self.stored(view.seat[piece], position, seats)
            blocks.append(
                Block(
                    counts=(len(position),),
                    spans=tuple(_spans(view, view.of_cp(cp), position, low, high)),
                    k_pos=self.index(position),
                    write_rows=rows,
                    write_slots=slots,
                )
            )
        return tuple(blocks)

    def cached(self, view: SegmentView, cp: int, seats: Seats) -> tuple[Block, ...]:
        """The prefixes of all chunks, in rounds of at most `workspace` positions."""
        return tuple(self._round(r, view, cp, seats) for r in self._rounds(view))

    def _rounds(self, view: SegmentView) -> Iterator[list[tuple[int, int, int]]]:
        """Lists of (chunk, low, high): positions [low, high) of the chunk's prefix."""
        pieces: list[tuple[int, int, int]] = []
        room = self.workspace
        for chunk, length in enumerate(view.start.tolist()):
            low = 0
            while low < length:
                high = min(length, low + room)
                pieces.append((chunk, low, high))
                room -= high - low
                low = high
                if room == 0:
                    yield pieces
                    pieces, room = [], self.workspace
        if pieces:
            yield pieces

    def _round(
        self, pieces: list[tuple[int, int, int]], view: SegmentView, cp: int, seats: Seats
    ) -> Block:
        stripes = self.own.group_stripes(self.rank)
        held = [[self.own.stripes.positions(a, b, s) for _, a, b in pieces] for s in stripes]
        counts = tuple(sum(len(p) for p in per) for per in held)
        own = held[self.own.group(self.rank).index(self.rank)]
        seat = np.repeat(view.chunk_seat[[c for c, _, _ in pieces]], [len(p) for p in own])
        position = np.concatenate([p for per in held for p in per])
        order = None
        if len(stripes) > 1 and len(pieces) > 1:  # of one request, they may lie as they come
            piece = np.concatenate([np.full(len(p), i) for per in held for i, p in enumerate(per)])
            order = np.lexsort((position, piece))
            position = position[order]
        spans, at = [], 0
        here = view.chunk[view.of_cp(cp)]
        for chunk, low, high in pieces:
            q0, q1 = np.searchsorted(here, [chunk, chunk + 1]).tolist()
            if q0 < q1:
                spans.append(Span(q0, q1, at, at + high - low))
            at += high - low
        return Block(
            counts=counts,
            spans=tuple(spans),
            k_pos=self.index(position),
            read=self.index(self.slots(seat, np.concatenate(own), seats)),
            order=None if order is None else self.index(order),
        )


def _spans(view: SegmentView, mine: slice, k_pos: Ints, low: Ints, high: Ints) -> Iterator[Span]:
    """Rows of this cp rank, in runs of consecutive positions, against the keys [low, high) of their
    chunk: keys ascend, so those past a run's last position are cut off here, the rest is the
    mask's.
    """
    chunk, position = view.chunk[mine], view.position[mine]
    if not len(chunk):
        return
    breaks = np.flatnonzero(np.diff(chunk) != 0) + 1
    jumps = np.flatnonzero(np.diff(position) > len(view.per_cp)) + 1
    edges = np.unique(np.concatenate([[0], breaks, jumps, [len(chunk)]]))
    for q0, q1 in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        k0, k1 = int(low[chunk[q0]]), int(high[chunk[q0]])
        k1 = k0 + int(np.searchsorted(k_pos[k0:k1], position[q1 - 1], side="right"))
        if k0 < k1:
            yield Span(q0, q1, k0, k1)
