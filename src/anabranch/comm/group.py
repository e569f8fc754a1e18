"""A group of ranks and the verbs among them. Rows are dim 0 of every tensor.

A `Transport` moves bytes among the members of one group and needs two verbs, all_gather and
all_to_all; the other verbs are composed from these unless the transport brings its own. Sums add in
member order with fp32 accumulation, on every rank and route, so that replicated rows are equal in
bits.

Protocol: all members enter the verbs of a group in the same order (the plan's), also with zero
rows; every wait has a deadline, past which `CommError` names group, verb and peer.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from anabranch.ops.reference.partials import merge_partials, pack_partials
from anabranch.ops.wires import interleaved, interleaved_views

Counts = Sequence[int]
Trace = Callable[[str, tuple[int, ...], Tensor], None]

SUMMED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes whose sums accumulate in fp32; others (integers, fp64) accumulate in themselves."""


class CommError(RuntimeError):
    """A collective did not complete; the message names group, verb and peer."""


class Transport(ABC):
    """Moves rows among the members of one group. `counts` are rows per member, in member order."""

    members: tuple[int, ...]
    me: int

    @abstractmethod
    def all_gather(self, x: Tensor, counts: Counts) -> Tensor:
        """x: [counts[me], ...] -> [sum(counts), ...]."""

    @abstractmethod
    def all_to_all(self, x: Tensor, send: Counts, recv: Counts) -> Tensor:
        """x: [sum(send), ...], rows for member 0 first -> [sum(recv), ...], rows from 0 first."""

    def accepts(self, verb: str, nbytes: int, dtype: torch.dtype) -> bool:
        """Whether the transport has the verb itself for a payload of `nbytes` per rank."""
        return verb in ("all_gather", "all_to_all")

    def landing(
        self, rows: int, heads: int, width: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor] | None:
        """Memory that peers read: (out [rows, heads, width], lse [rows, heads] fp32), or None.

        What is written there and then given to `merge_partials` is not copied. Between the two no
        other verb of the group may run.
        """
        return None

    def reduce_scatter(self, x: Tensor, counts: Counts) -> Tensor:
        mine = counts[self.me]
        size = len(self.members)
        parts = self.all_to_all(x, counts, [mine] * size)
        return sum_in_order(parts.view(size, mine, *x.shape[1:]))

    def all_reduce(self, x: Tensor) -> Tensor:
        size = len(self.members)
        flat = x.reshape(1, -1)
        parts = self.all_gather(flat, [1] * size)
        return sum_in_order(parts.view(size, *x.shape))

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        counts = [x.shape[0] if i == root else 0 for i in range(len(self.members))]
        return self.all_gather(x if self.me == root else x[:0], counts)

    def merge_partials(self, out: Tensor, lse: Tensor, sink: Tensor | None) -> Tensor:
        rows, heads, width = out.shape
        size = len(self.members)
        wire = interleaved(size, rows, heads // size, width, out.dtype, out.device)
        pack_partials(out, lse, wire.out, wire.lse)
        (buffer,) = wire.buffers
        got = interleaved_views(self.all_to_all(buffer, [1] * size, [1] * size), width)
        return merge_partials(got.out, got.lse, sink=sink)[0]


def sum_in_order(parts: Tensor) -> Tensor:
    """[members, ...] -> [...]: fp32-accumulated sum in member order, rounded once."""
    wide = torch.float32 if parts.dtype in SUMMED else parts.dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts.dtype)


@dataclass(frozen=True)
class Group:
    """The verbs among `members`; `me` is this rank's index in it. A group of one moves nothing."""

    members: tuple[int, ...]
    me: int
    transport: Transport | None = None
    trace: Trace | None = None

    @property
    def size(self) -> int:
        return len(self.members)

    def _log(self, verb: str, x: Tensor) -> None:
        if self.trace is not None:
            self.trace(verb, self.members, x)

    def accepts(self, verb: str, nbytes: int = 0, dtype: torch.dtype = torch.float32) -> bool:
        """Whether the verb runs without being composed from others."""
        return self.transport is None or self.transport.accepts(verb, nbytes, dtype)

    def all_gather(self, x: Tensor, counts: Counts) -> Tensor:
        """Rows of every member, in member order: [counts[me], ...] -> [sum(counts), ...]."""
        if self.transport is None or not (counts[0] or any(counts)):
            return x
        if self.trace is not None:
            self._log("all_gather", x)
        return self.transport.all_gather(x, counts)

    def all_to_all(self, x: Tensor, send: Counts, recv: Counts) -> Tensor:
        """Rows [sum(send), ...] go to their members; returns [sum(recv), ...] in member order."""
        if self.transport is None:
            return x
        if self.trace is not None:
            self._log("all_to_all", x)
        return self.transport.all_to_all(x, send, recv)

    def reduce_scatter(self, x: Tensor, counts: Counts) -> Tensor:
        """Sum of the members' [sum(counts), ...], each keeps its rows [counts[me], ...]."""
        if self.transport is None or not (counts[0] or any(counts)):
            return x
        if self.trace is not None:
            self._log("reduce_scatter", x)
        return self.transport.reduce_scatter(x, counts)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of the members' tensors, equal in bits on every member."""
        if self.transport is None or not x.numel():
            return x
        if self.trace is not None:
            self._log("all_reduce", x)
        return self.transport.all_reduce(x)

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        """The tensor of member `root`; every member passes one of its shape."""
        if self.transport is None or not x.numel():
            return x
        self._log("broadcast", x)
        return self.transport.broadcast(x, root)

    def shift(self, x: Tensor, recv: int, distance: int = 1) -> Tensor:
        """Ring step: x goes to member me + distance, `recv` rows come from member me - distance."""
        if self.transport is None:
            return x
        self._log("exchange", x)
        to, source = (self.me + distance) % self.size, (self.me - distance) % self.size
        send_counts = [x.shape[0] if i == to else 0 for i in range(self.size)]
        recv_counts = [recv if i == source else 0 for i in range(self.size)]
        return self.transport.all_to_all(x, send_counts, recv_counts)

    def landing(
        self, rows: int, heads: int, width: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor] | None:
        """See `Transport.landing`."""
        if self.transport is None:
            return None
        return self.transport.landing(rows, heads, width, dtype)

    def merge_partials(self, out: Tensor, lse: Tensor, sink: Tensor | None) -> Tensor:
        """Partials of the group's heads, out [B, Hg, D] and lse [B, Hg] fp32 (natural), merged on
        their owners: [B, h, D] of the own heads. sink [h] fp32 joins once."""
        if self.transport is None:
            return merge_partials(out.unsqueeze(0), lse.unsqueeze(0), sink=sink)[0]
        if self.trace is not None:
            self._log("merge_partials", out)
        return self.transport.merge_partials(out, lse, sink)


def offsets(counts: Counts) -> list[int]:
    """Start of each member's rows: [0, c0, c0 + c1, ...], one more entry than members."""
    return [0, *accumulate(counts)]


ALONE = Group((0,), 0)
