"""A planned move bound to groups and counts: what turns rows of one layout into another.

Owns the three forms in which rows of unequal counts travel: native ragged verbs (v), padded to the
longest member (max), or placed in a zeroed buffer and summed (sum). Padding never reaches a result;
under poison it is filled with NaN so that a leak shows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from anabranch.comm.group import Group, offsets
from anabranch.layout.costs import Costs
from anabranch.layout.decide import row_form
from anabranch.layout.mesh import DP, DP_CP, EVERY, NONE, Axes, Mesh
from anabranch.layout.rows import Rows, Verb, plan_move
from anabranch.layout.split import RowSplit
from anabranch.ops.signatures import CopyRows

GroupOf = Callable[[Axes], Group]


class RowForm(Protocol):
    """How rows of unequal counts are gathered and scattered; results are as of ragged verbs."""

    def all_gather(self, group: Group, x: Tensor, counts: Sequence[int]) -> Tensor:
        """x [counts[me], ...] -> [sum(counts), ...]."""
        ...

    def reduce_scatter(self, group: Group, x: Tensor, counts: Sequence[int]) -> Tensor:
        """x [sum(counts), ...] -> the members' sum of the own rows [counts[me], ...]."""
        ...


class Ragged:
    """The transport's own v-forms: nothing is padded or zero-filled."""

    def all_gather(self, group: Group, x: Tensor, counts: Sequence[int]) -> Tensor:
        return group.all_gather(x, counts)

    def reduce_scatter(self, group: Group, x: Tensor, counts: Sequence[int]) -> Tensor:
        return group.reduce_scatter(x, counts)


@dataclass(frozen=True)
class Longest:
    """MAX_LEN: every member's rows are padded to the longest, so verbs have one fixed size."""

    copy_rows: CopyRows
    poison: bool = False

    def all_gather(self, group: Group, x: Tensor, counts: Sequence[int]) -> Tensor:
        if min(counts) == max(counts):
            return group.all_gather(x, counts)
        longest, size = max(counts), len(counts)
        padded = self._buffer(longest, x)
        self.copy_rows(padded, x, 0, x.shape[0], "gather")
        every = group.all_gather(padded, [longest] * size)
        packed = x.new_empty(sum(counts), *x.shape[1:])
        for i, (start, n) in enumerate(zip(offsets(counts), counts, strict=False)):
            self.copy_rows(packed, every[i * longest :], start, n, "gather")
        return packed

    def reduce_scatter(self, group: Group, x: Tensor, counts: Sequence[int]) -> Tensor:
        if min(counts) == max(counts):
            return group.reduce_scatter(x, counts)
        longest, size = max(counts), len(counts)
        padded = self._buffer(longest * size, x)
        for i, (start, n) in enumerate(zip(offsets(counts), counts, strict=False)):
            self.copy_rows(padded[i * longest :], x, start, n, "scatter")
        return group.reduce_scatter(padded, [longest] * size)[: counts[group.me]]

    def _buffer(self, rows: int, like: Tensor) -> Tensor:
        buffer = like.new_empty(rows, *like.shape[1:])
        if self.poison:
            wrong = float("nan") if buffer.is_floating_point() else torch.iinfo(buffer.dtype).min
            buffer.fill_(wrong)
        return buffer


@dataclass(frozen=True)
class Placed:
    """SUM_LEN: rows lie at their offset in a zeroed buffer; one all_reduce adds the members'."""

    copy_rows: CopyRows

    def all_gather(self, group: Group, x: Tensor, counts: Sequence[int]) -> Tensor:
        if group.size == 1:
            return x
        every = x.new_zeros(sum(counts), *x.shape[1:])
        self.copy_rows(every, x, offsets(counts)[group.me], counts[group.me], "gather")
        return group.all_reduce(every)

    def reduce_scatter(self, group: Group, x: Tensor, counts: Sequence[int]) -> Tensor:
        start = offsets(counts)[group.me]
        return group.all_reduce(x)[start : start + counts[group.me]]


@dataclass(frozen=True)
class Cheapest:
    """The form that the table says is cheapest for the counts at hand; equal on every member."""

    forms: dict[str, RowForm]
    costs: Costs

    def _of(self, verb: Verb, x: Tensor, counts: Sequence[int]) -> RowForm:
        width = x.element_size()
        for n in x.shape[1:]:
            width *= n
        return self.forms[row_form(verb, counts, width, self.costs)]

    def all_gather(self, group: Group, x: Tensor, counts: Sequence[int]) -> Tensor:
        return self._of(Verb.ALL_GATHER, x, counts).all_gather(group, x, counts)

    def reduce_scatter(self, group: Group, x: Tensor, counts: Sequence[int]) -> Tensor:
        return self._of(Verb.REDUCE_SCATTER, x, counts).reduce_scatter(group, x, counts)


RAGGED = Ragged()


def row_moves(name: str, copy_rows: CopyRows, costs: Costs, poison: bool = False) -> RowForm:
    """The form of --row-moves {auto,max,sum,v}."""
    forms: dict[str, RowForm] = {
        "v": RAGGED, "max": Longest(copy_rows, poison), "sum": Placed(copy_rows),
    }  # fmt: skip
    return Cheapest(forms, costs) if name == "auto" else forms[name]


@dataclass(frozen=True)
class Hop:
    """One verb of a move. counts: rows of each member of the group, on the sharded side."""

    verb: Verb
    group: Group
    counts: tuple[int, ...]
    form: RowForm = field(default=RAGGED)

    def __call__(self, x: Tensor) -> Tensor:
        if self.verb is Verb.ALL_GATHER:
            return self.form.all_gather(self.group, x, self.counts)
        if self.verb is Verb.REDUCE_SCATTER:
            return self.form.reduce_scatter(self.group, x, self.counts)
        if self.verb is Verb.ALL_REDUCE:
            return self.group.all_reduce(x)
        start = offsets(self.counts)[self.group.me]
        return x[start : start + self.counts[self.group.me]]


@dataclass(frozen=True)
class BoundMove:
    """The hops of one move on one rank, for one split."""

    hops: tuple[Hop, ...]

    def __call__(self, x: Tensor) -> Tensor:
        for hop in self.hops:
            x = hop(x)
        return x


def bind_move(
    src: Rows, dst: Rows, split: RowSplit, rank: int, group_of: GroupOf, form: RowForm = RAGGED
) -> BoundMove:
    """Bind `plan_move(src, dst)` for the rows of `split` as `rank` sees them."""
    hops, runs = [], _runs(split.mesh)
    for verb, along in plan_move(src, dst, split.mesh):
        sharded = src.shard if verb is Verb.ALL_GATHER else _sharded_after(src, dst, verb)
        assert split.mesh.live(sharded) in runs, f"{src} -> {dst}: {verb} cuts no runs of rows"
        counts = split.member_counts(rank, along, sharded)
        hops.append(Hop(verb, group_of(along), counts, form))
    return BoundMove(tuple(hops))


def _runs(mesh: Mesh) -> tuple[Axes, ...]:
    """Shards that are contiguous runs of a split's layout order."""
    return tuple(mesh.live(along) for along in (NONE, DP, DP_CP, EVERY))


def _sharded_after(src: Rows, dst: Rows, verb: Verb) -> Axes:
    """Axes along which rows are sharded once `verb` is done (gathers come last)."""
    sliced = src.shard | (dst.shard - src.shard - (src.partial - dst.partial))
    if verb is Verb.SLICE:
        return sliced
    return sliced | (dst.shard & (src.partial - dst.partial))
