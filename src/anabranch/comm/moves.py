"""A planned move bound to groups and counts: what turns rows of one layout into another at run time."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from anabranch.comm.group import Group, offsets
from anabranch.layout.mesh import Axes
from anabranch.layout.rows import Rows, Verb, plan_move
from anabranch.layout.split import RowSplit

GroupOf = Callable[[Axes], Group]


@dataclass(frozen=True)
class Hop:
    """One verb of a move. counts: rows of each member of the group, on the sharded side."""

    verb: Verb
    group: Group
    counts: tuple[int, ...]

    def __call__(self, x: Tensor) -> Tensor:
        if self.verb is Verb.ALL_GATHER:
            return self.group.all_gather(x, self.counts)
        if self.verb is Verb.REDUCE_SCATTER:
            return self.group.reduce_scatter(x, self.counts)
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


def bind_move(src: Rows, dst: Rows, split: RowSplit, rank: int, group_of: GroupOf) -> BoundMove:
    """Bind `plan_move(src, dst)` for the rows of `split` as `rank` sees them."""
    hops = []
    for verb, along in plan_move(src, dst, split.mesh):
        sharded = src.shard if verb is Verb.ALL_GATHER else _sharded_after(src, dst, verb)
        counts = split.member_counts(rank, along, sharded)
        hops.append(Hop(verb, group_of(along), counts))
    return BoundMove(tuple(hops))


def _sharded_after(src: Rows, dst: Rows, verb: Verb) -> Axes:
    """Axes along which rows are sharded once `verb` is done (gathers come last)."""
    sliced = src.shard | (dst.shard - src.shard - (src.partial - dst.partial))
    if verb is Verb.SLICE:
        return sliced
    return sliced | (dst.shard & (src.partial - dst.partial))
