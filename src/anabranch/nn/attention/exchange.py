"""How the queries of a segment meet all their keys, wherever these are cached.

One object per exchange, chosen at assembly and bound to its groups: `attend` stores the entries
this rank owns, brings KV to the queries or the queries to KV, and returns the output of the heads
the projection expects. Partial outputs over disjoint keys are merged by log-sum-exp in fp32; a sink
joins there, once.

Protocol: every member of a group enters every exchange, also with zero rows; the rows of a segment
are the same on all members of a stripe group (queries to KV) or known to all (KV to queries).
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from anabranch.comm.group import ALONE, Group
from anabranch.kv.pool import store
from anabranch.nn.attention.kernel import Kernel
from anabranch.nn.step import Block, Brought, Paged, SegmentInputs
from anabranch.ops import Ops
from anabranch.ops.wires import Wire, interleaved, interleaved_views, split, split_views

Sink = Tensor | None


class Exchange(Protocol):
    def attend(
        self, kernel: Kernel, q: Tensor, fresh: Tensor, pool: Tensor, seg: SegmentInputs, sink: Sink
    ) -> Tensor:
        """q [T, h, Dq], fresh entries [T, W] of the segment's rows, a layer's pool -> [T, h',
        Dv].
        """
        ...


class Merge:
    """Running merge of partial outputs per query row; `finish` applies a sink and the dtype."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.whole: tuple[Tensor, Tensor] | None = None

    def add(self, q0: int, q1: int, out: Tensor, lse: Tensor) -> None:
        """Partial out [q1-q0, H, D] and lse [q1-q0, H] of rows [q0, q1)."""
        if self.whole is None:
            if (q0, q1) == (0, self.rows):
                self.whole = out, lse
                return
            shape = (self.rows, *out.shape[1:])
            empty = lse.new_full(shape[:2], -torch.inf)
            self.whole = out.new_zeros(shape, dtype=torch.float32), empty
        total, seen = self.whole
        if total.dtype is not torch.float32:
            total = total.float()
        old = seen[q0:q1]
        new = torch.logaddexp(old, lse)
        shift = torch.where(new == -torch.inf, 0.0, new)
        left, right = torch.exp(old - shift), torch.exp(lse - shift)
        total[q0:q1].mul_(left.unsqueeze(-1)).addcmul_(out.float(), right.unsqueeze(-1))
        seen[q0:q1] = new
        self.whole = total, seen

    def finish(self, sink: Tensor | None, like: Tensor) -> Tensor:
        assert self.whole is not None, "a segment without entries"
        out, lse = self.whole
        return with_sink(out, lse, sink).to(like.dtype)


def with_sink(out: Tensor, lse: Tensor, sink: Tensor | None) -> Tensor:
    """A sink is a key of value zero: it only takes weight. out [T, H, D], lse [T, H], sink [H]."""
    if sink is None:
        return out
    return out * torch.sigmoid(lse - sink).unsqueeze(-1)


@dataclass(frozen=True)
class InPlace:
    """All positions are cached here once this step's entries are stored.

    peers: cp ranks whose rows are others, and whose entries are gathered first (a group of one
    where every rank has all rows).
    """

    peers: Group = ALONE

    def attend(
        self, kernel: Kernel, q: Tensor, fresh: Tensor, pool: Tensor, seg: SegmentInputs, sink: Sink
    ) -> Tensor:
        assert isinstance(seg.reach, Paged)
        fresh = self.peers.all_gather(fresh, seg.reach.counts)
        where = _store_own(pool, fresh, seg)
        out, lse = kernel.paged(q, pool, where)
        return with_sink(out, lse, sink).to(q.dtype)


@dataclass(frozen=True)
class KvToQ:
    """Fresh entries come from the cp peers (gathered, or passed round a ring), cached ones from the
    stripes, a workspace at a time. Each rank stores its own positions from what passes.

    Where keys and values are computed from entries, each rank computes those of all; or, with
    `expand`, those of its own entries, which then travel beside these.
    """

    peers: Group
    stripes: Group
    ring: bool = False
    expand: bool = False

    def attend(
        self, kernel: Kernel, q: Tensor, fresh: Tensor, pool: Tensor, seg: SegmentInputs, sink: Sink
    ) -> Tensor:
        assert isinstance(seg.reach, Brought)
        merge = Merge(q.shape[0])
        passing = fresh
        for step, block in enumerate(seg.reach.fresh):
            if self.ring:
                if step:
                    passing = self.peers.shift(passing, sum(block.counts))
                entries, computed = passing, None
            else:
                entries, computed = self._gather(self.peers, kernel, fresh, block)
            self._meet(kernel, q, entries, computed, block, pool, seg, merge)
        for block in seg.reach.cached:
            assert block.read is not None
            own = pool.index_select(0, block.read)
            entries, computed = self._gather(self.stripes, kernel, own, block)
            self._meet(kernel, q, entries, computed, block, pool, seg, merge)
        if merge.whole is None:
            shape = (q.shape[0], *self._nothing(kernel, q, fresh, seg))
            return q.new_zeros(shape)
        return merge.finish(sink, q)

    def _gather(
        self, group: Group, kernel: Kernel, own: Tensor, block: Block
    ) -> tuple[Tensor, Tensor | None]:
        """Entries of all members, and what was computed of each where that is shared: only among
        ranks that hold the same heads, so over all cp peers.
        """
        shared = self.expand and group.members == self.peers.members
        computed = kernel.computed(own) if shared else None
        if computed is not None:
            computed = group.all_gather(computed, block.counts)
        return group.all_gather(own, block.counts), computed

    @staticmethod
    def _meet(
        kernel: Kernel,
        q: Tensor,
        entries: Tensor,
        computed: Tensor | None,
        block: Block,
        pool: Tensor,
        seg: SegmentInputs,
        merge: Merge,
    ) -> None:
        if block.order is not None:
            entries = entries.index_select(0, block.order)
            computed = None if computed is None else computed.index_select(0, block.order)
        if block.write_slots is not None:
            rows = (
                entries if block.write_rows is None else entries.index_select(0, block.write_rows)
            )
            store(pool, block.write_slots, rows)
        if not block.spans:
            return
        keys, values = kernel.keys_values(entries, computed)
        for s in block.spans:
            mine, theirs = slice(s.q0, s.q1), slice(s.k0, s.k1)
            out, lse = kernel.rows(
                q[mine], keys[theirs], values[theirs], seg.positions[mine], block.k_pos[theirs]
            )
            merge.add(s.q0, s.q1, out, lse)

    @staticmethod
    def _nothing(kernel: Kernel, q: Tensor, fresh: Tensor, seg: SegmentInputs) -> tuple[int, int]:
        """Heads and width of an output of no rows."""
        keys, values = kernel.keys_values(fresh[:0], None)
        out, _ = kernel.rows(q[:0], keys, values, seg.positions[:0], seg.positions[:0])
        return out.shape[1], out.shape[2]


class Route(Protocol):
    """Partials of the group's heads to their owners: out [B, Hg, D], lse [B, Hg] -> [B, h, D]."""

    def __call__(self, out: Tensor, lse: Tensor, sink: Tensor | None) -> Tensor: ...


@dataclass(frozen=True)
class PackRoute:
    """Pack, one all_to_all per buffer, merge in place from the received views.

    flashinfer: the split wire (peer axis inside, stats beside), otherwise the interleaved one.
    """

    group: Group
    ops: Ops
    flashinfer: bool = False

    def __call__(self, out: Tensor, lse: Tensor, sink: Tensor | None) -> Tensor:
        rows, heads, width = out.shape
        make = split if self.flashinfer else interleaved
        wire = make(self.group.size, rows, heads // self.group.size, width, out.dtype, out.device)
        self.ops.pack_partials(out, lse, wire.out, wire.lse)
        got = self._received(wire)
        merged, _ = self.ops.merge_partials(got.out, got.lse, sink=sink)
        return merged

    def _received(self, wire: Wire) -> Wire:
        if self.flashinfer:
            payload, stats = (peer_inside(self.group, b) for b in wire.buffers)
            return split_views(payload, stats)
        (buffer,) = wire.buffers
        ones = [1] * self.group.size
        return interleaved_views(self.group.all_to_all(buffer, ones, ones), wire.out.shape[-1])


def peer_inside(group: Group, x: Tensor) -> Tensor:
    """All-to-all over the peer axis of [B, h, N, D] (FlashInfer's decode_cp_a2a wire), emulated.

    The transports' axis is outside, so this form pays a transposition on each side; it exists to
    carry the wire where FlashInfer's own kernel does not run.
    """
    outside = x.permute(2, 0, 1, 3).contiguous()
    ones = [1] * group.size
    return group.all_to_all(outside, ones, ones).permute(1, 2, 0, 3).contiguous()


@dataclass(frozen=True)
class FusedRoute:
    """Partials go where the peers see them and are merged there in place (fused): no message."""

    group: Group

    def __call__(self, out: Tensor, lse: Tensor, sink: Tensor | None) -> Tensor:
        return self.group.merge_partials(out, lse, sink)


@dataclass(frozen=True)
class GatherScatterRoute:
    """All-gather the lse, weigh the own partial, reduce-scatter over heads (ag_rs)."""

    group: Group

    def __call__(self, out: Tensor, lse: Tensor, sink: Tensor | None) -> Tensor:
        weighed = weigh(self.group, out, lse)
        if sink is not None:
            weighed = weighed * _sink_share(self.group, lse, sink)
        heads = out.shape[1] // self.group.size
        by_owner = weighed.transpose(0, 1).contiguous()
        mine = self.group.reduce_scatter(by_owner, [heads] * self.group.size)
        return mine.transpose(0, 1).to(out.dtype)


def weigh(group: Group, out: Tensor, lse: Tensor) -> Tensor:
    """This member's share of the merged output, fp32: out * exp(lse - total lse)."""
    every = group.all_gather(lse, [lse.shape[0]] * group.size).view(group.size, *lse.shape)
    total = torch.logsumexp(every, 0)
    shift = torch.where(total == -torch.inf, 0.0, total)
    share = torch.exp(lse - shift).unsqueeze(-1)
    return torch.where(share > 0, out.float() * share, 0.0)


def _sink_share(group: Group, lse: Tensor, sink: Tensor) -> Tensor:
    """What the sinks leave of each head: sinks [h] are the own heads', lse [B, Hg] the group's."""
    sinks = group.all_gather(sink, [len(sink)] * group.size)
    every = group.all_gather(lse, [lse.shape[0]] * group.size).view(group.size, *lse.shape)
    return torch.sigmoid(torch.logsumexp(every, 0) - sinks).unsqueeze(-1)


@dataclass(frozen=True)
class QToKv:
    """Queries of the stripe group's heads meet the own stripe; partials go to the heads' owners.

    computed: None where q holds the own heads [T, h, Dq], gathered here; otherwise (ts, cp) sizes:
    q already holds the group's heads, in natural order (ts, cp, h) instead of group order (cp, ts,
    h).
    """

    stripes: Group
    route: Route
    computed: tuple[int, int] | None = None

    def attend(
        self, kernel: Kernel, q: Tensor, fresh: Tensor, pool: Tensor, seg: SegmentInputs, sink: Sink
    ) -> Tensor:
        where = _store_own(pool, fresh, seg)
        out, lse = kernel.paged(self._group_heads(q), pool, where)
        return self.route(out, lse, sink)

    def _group_heads(self, q: Tensor) -> Tensor:
        if self.computed is not None:
            rows, heads, width = q.shape
            ts, cp = self.computed
            by_slice = q.view(rows, ts, cp, heads // (ts * cp), width)
            return by_slice.transpose(1, 2).reshape(rows, heads, width)
        counts = [q.shape[1]] * self.stripes.size
        return self.stripes.all_gather(q.transpose(0, 1).contiguous(), counts).transpose(0, 1)


@dataclass(frozen=True)
class LseOnly:
    """Replicated decode over stripes: only the lse is gathered; the weighed partial is projected
    with the whole output projection and the sum over cp is owed to the boundary."""

    stripes: Group

    def attend(
        self, kernel: Kernel, q: Tensor, fresh: Tensor, pool: Tensor, seg: SegmentInputs, sink: Sink
    ) -> Tensor:
        where = _store_own(pool, fresh, seg)
        out, lse = kernel.paged(q, pool, where)
        every = self.stripes.all_gather(lse, [lse.shape[0]] * self.stripes.size)
        total = torch.logsumexp(every.view(self.stripes.size, *lse.shape), 0)
        if sink is not None:
            total = torch.logaddexp(total, sink)
        shift = torch.where(total == -torch.inf, 0.0, total)
        share = torch.exp(lse - shift).unsqueeze(-1)
        return torch.where(share > 0, out.float() * share, 0.0).to(q.dtype)


def _store_own(pool: Tensor, fresh: Tensor, seg: SegmentInputs) -> Paged:
    where = seg.reach
    assert isinstance(where, Paged)
    rows = fresh if where.write_rows is None else fresh.index_select(0, where.write_rows)
    store(pool, where.write_slots, rows)
    return where
