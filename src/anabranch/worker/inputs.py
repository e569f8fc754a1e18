"""From a `StepPlan` and a rank's place to its `StepInputs`: every index of a step is made here.

Nothing below this file asks which phase a segment has. Attention's host-side planning (which
entries are brought where, what is stored, how long each row's local stripe is) happens here too,
once a step.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.comm.group import Group
from anabranch.comm.moves import BoundMove, RowForm, bind_move
from anabranch.core.plan import Phase, StepPlan
from anabranch.layout.choice import Layout
from anabranch.layout.decide import StepShape, residual_layout
from anabranch.layout.mesh import DP, EVERY, REPLICA, Axes
from anabranch.layout.ownership import Ownership
from anabranch.layout.phases import FFN_TENSOR, RESIDUAL, Exchange, Form
from anabranch.layout.rows import Rows
from anabranch.layout.split import RowSplit
from anabranch.nn.step import Brought, Paged, Picked, SegmentInputs, StepInputs
from anabranch.worker.blocks import BlockMaker, SegmentView
from anabranch.worker.rows import Ints, SegmentRows, StepRows, step_rows
from anabranch.worker.seats import Seats


@dataclass(frozen=True)
class InputMaker:
    """Makes inputs for one rank. row_form: how rows travel into the FFN and back. row_bytes: of a
    row between blocks. pad_lens: what kernels now want padded rows to see. windows: the distinct
    sliding windows of the layers. row_ids: a router asks for the rows' token ids."""

    layout: Layout
    own: Ownership
    rank: int
    group_of: Callable[[Axes], Group]
    device: torch.device
    blocks: BlockMaker
    row_form: RowForm
    row_bytes: int
    pad_lens: Callable[[], Collection[int]]
    windows: tuple[int, ...] = ()
    row_ids: bool = False

    def make(self, plan: StepPlan, seats: Seats) -> StepInputs:
        rows = step_rows(self.layout, plan, seats.pad)
        residual = RESIDUAL[self._residual(rows)]
        segments, ids, embed, low = [], [], [], 0
        for seg in rows.segments:
            high = low + seg.split.local(self.rank, residual.shard)
            segments.append(self._segment(seg, seats, residual, low, high))
            tokens, moved = self._embedded(seg, seats, residual)
            ids.append(tokens)
            embed.append(moved)
            low = high
        joint = rows.joint(residual.shard)
        return StepInputs(
            number=plan.number,
            ids=tuple(ids),
            embed=tuple(embed),
            segments=tuple(segments),
            enter_ffn=self._bind_ffn(residual, FFN_TENSOR[0], joint),
            leave_ffn=self._bind_ffn(FFN_TENSOR[1], residual, joint),
            enter_rows=self._bind(residual, Rows(EVERY), joint),
            leave_rows=self._bind(Rows(EVERY), residual, joint),
            picked=self._picked(rows, residual),
            row_ids=self._row_ids(rows, ids, residual) if self.row_ids else None,
        )

    def _residual(self, rows: StepRows) -> str:
        """Where rows live between blocks in this step: as set, or as the table of costs says."""
        if self.layout.residual != "auto":
            return self.layout.residual
        segments = tuple(
            (self._form(seg.phase), tuple(c.rows for c in seg.chunks)) for seg in rows.segments
        )
        gathers = self.layout.moe_dispatch == "gather"
        shape = StepShape(segments, self.row_bytes, gathers)
        return residual_layout(self.layout.mesh, shape, self.layout.costs)

    def _form(self, phase: Phase) -> Form:
        return self.layout.prefill if phase is Phase.PREFILL else self.layout.decode

    @property
    def replica(self) -> int:
        return self.layout.mesh.coord(self.rank).dp

    @cached_property
    def _bind(self) -> Callable[[Rows, Rows, RowSplit], BoundMove]:
        """Moves of ragged rows. The last are kept: steps of a steady decode have the same."""
        return lru_cache(64)(partial(bind_move, rank=self.rank, group_of=self.group_of))

    @cached_property
    def _bind_ffn(self) -> Callable[[Rows, Rows, RowSplit], BoundMove]:
        """Moves into the FFN and back, kept in the same way."""
        bind = partial(bind_move, rank=self.rank, group_of=self.group_of, form=self.row_form)
        return lru_cache(16)(bind)

    def _index(self, values: Ints) -> Tensor:
        return self.blocks.index(values)

    def _embedded(self, seg: SegmentRows, seats: Seats, residual: Rows) -> tuple[Tensor, BoundMove]:
        """Ids to embed and the move of what was embedded: ids move if the embedding is whole."""
        chunks, order = seg.chunks[self.replica], seg.order[self.replica]
        given = self._index(chunks.tokens[order].astype(np.int64))
        seat = np.repeat(chunks.seat, chunks.count)[order].astype(np.int64)
        last = seats.tokens.index_select(0, self._index(seat))
        tokens = torch.where(given < 0, last, given)
        if self.layout.embedding == "whole":
            return self._bind(Rows(DP), residual, seg.split)(tokens), BoundMove(())
        return tokens, self._bind(Rows(DP, REPLICA), residual, seg.split)

    def _row_ids(self, rows: StepRows, ids: Sequence[Tensor], residual: Rows) -> Tensor:
        """Token ids of the residual rows; where the embedding is whole they are there already."""
        if self.layout.embedding != "whole":
            ids = [
                self._bind(Rows(DP), residual, seg.split)(tokens)
                for seg, tokens in zip(rows.segments, ids, strict=True)
            ]
        return torch.cat(list(ids))

    def _picked(self, rows: StepRows, residual: Rows) -> Picked:
        mesh = self.layout.mesh
        target = Rows() if self.layout.lm_head == "all" else Rows(DP)
        shard = residual.shard | target.shard
        ids = {r: rows.wanted_ids(r, shard) for r in mesh.group(self.rank, shard - target.shard)}
        split = RowSplit(mesh, tuple(len(ids.get(r, ())) for r in range(mesh.world)))
        gathered = np.concatenate(list(ids.values()))
        ascending = bool((gathered[1:] > gathered[:-1]).all())
        order = None if ascending else np.argsort(gathered)
        first, last = rows.replica_ids(self.replica)
        own = np.searchsorted(gathered, [first, last], sorter=order)
        held = rows.residual_ids(self.rank, residual.shard)
        mine = rows.wanted[held]
        if shard != residual.shard:  # every replica's rows are here, this one's are picked
            mine &= (held >= first) & (held < last)
        return Picked(
            rows=self._index(np.flatnonzero(mine)),
            gather=self._bind(Rows(shard), target, split),
            order=None if order is None else self._index(order),
            total=len(gathered),
            own=(int(own[0]), int(own[1])),
        )

    # attention ---------------------------------------------------------------------------------

    def _segment(
        self, seg: SegmentRows, seats: Seats, residual: Rows, low: int, high: int
    ) -> SegmentInputs:
        form = self._form(seg.phase)
        view = SegmentView.of(seg, self.replica)
        cp = self.layout.mesh.coord(self.rank).cp
        mine = view.of_cp(cp) if "cp" in form.rows_in.shard else slice(0, len(view.order))
        brought = form.exchange is Exchange.KV_TO_Q
        reach = self._brought(view, seats, cp) if brought else self._in_place(view, seats, mine)
        return SegmentInputs(
            phase=seg.phase,
            low=low,
            high=high,
            enter=self._bind(residual, form.rows_in, seg.split),
            leave=self._bind(form.rows_out, residual, seg.split),
            positions=self._index(view.position[mine]),
            longest=max(view.per_cp),
            reach=reach,
        )

    def _brought(self, view: SegmentView, seats: Seats, cp: int) -> Brought:
        """KV comes to the queries of this cp rank: fresh entries from peers, cached from
        stripes.
        """
        make = self.blocks
        if self.layout.kv_to_q == "ring" and self.layout.mesh.cp > 1:
            fresh = make.ring(view, cp, seats)
        else:
            fresh = (make.gathered(view, cp, seats),)
        return Brought(fresh, make.cached(view, cp, seats))

    def _in_place(self, view: SegmentView, seats: Seats, mine: slice) -> Paged:
        """Each of this rank's rows sees the own stripe's entries up to its own position."""
        stripes, stripe = self.own.stripes, self.own.stripe(self.rank)
        seen = view.position[mine] + 1
        lens = stripes.local_len(seen, stripe)
        padded, pad_lens = view.seat[mine] == seats.pad, self.pad_lens()
        assert all(0 <= n <= 1 for n in pad_lens), f"{pad_lens}: padding stores one entry"
        most = max(1, -(-int(lens.max(initial=0)) // stripes.local_page))
        starts = None
        if self.windows:
            hidden = {w: np.maximum(seen - w, 0) for w in self.windows}
            starts = {w: self._int32(stripes.local_len(h, stripe)) for w, h in hidden.items()}
        if seats.pad is None:
            rows, slots = self.blocks.stored(view.seat, view.position, seats)
        else:
            rows = None
            slots = self.blocks.everywhere(view.seat, view.position, seats, seats.pad)
        return Paged(
            page_table=self._int32(seats.pages[view.seat[mine], :most]),
            lens={n: self._int32(np.where(padded, n, lens)) for n in pad_lens},
            local_page=stripes.local_page,
            starts=starts or {},
            write_rows=rows,
            write_slots=slots,
            counts=view.per_cp,
        )

    def _int32(self, values: Ints | NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(self.device)
