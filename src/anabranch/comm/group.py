"""A group of ranks and the verbs among them. Rows are dim 0 of every tensor.

A `Transport` moves bytes among the members of one group and needs two verbs, all_gather and
all_to_all; the other verbs are composed here unless the transport brings its own. Sums add in member
order with fp32 accumulation, on every rank and route, so that replicated rows are equal in bits.

Protocol: all members enter the verbs of a group in the same order (the plan's), also with zero rows;
every wait has a deadline, past which `CommError` names group, verb and peer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

Counts = Sequence[int]
Trace = Callable[[str, tuple[int, ...], Tensor], None]


class CommError(RuntimeError):
    """A collective did not complete; the message names group, verb and peer."""


class Transport(Protocol):
    """Moves rows among the members of one group. `counts` are rows per member, in member order."""

    def all_gather(self, x: Tensor, counts: Counts) -> Tensor:
        """x: [counts[me], ...] -> [sum(counts), ...]."""
        ...

    def all_to_all(self, x: Tensor, send: Counts, recv: Counts) -> Tensor:
        """x: [sum(send), ...], rows for member 0 first -> [sum(recv), ...], rows of member 0 first."""
        ...


class Summing(Protocol):
    """A transport that sums by itself (in member order, fp32): no composition needed."""

    def reduce_scatter(self, x: Tensor, counts: Counts) -> Tensor: ...

    def all_reduce(self, x: Tensor) -> Tensor: ...


def sum_in_order(parts: Tensor) -> Tensor:
    """[members, ...] -> [...]: fp32-accumulated sum in member order, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts.dtype)


@dataclass(frozen=True)
class Group:
    """The verbs among `members`; `me` is this rank's index among them. A group of one moves nothing."""

    members: tuple[int, ...]
    me: int
    transport: Transport | None = None
    summing: Summing | None = None
    trace: Trace | None = None

    @property
    def size(self) -> int:
        return len(self.members)

    def _log(self, verb: str, x: Tensor) -> None:
        if self.trace is not None:
            self.trace(verb, self.members, x)

    def all_gather(self, x: Tensor, counts: Counts) -> Tensor:
        """Rows of every member, in member order: [counts[me], ...] -> [sum(counts), ...]."""
        if self.transport is None or not any(counts):
            return x
        self._log("all_gather", x)
        return self.transport.all_gather(x, counts)

    def all_to_all(self, x: Tensor, send: Counts, recv: Counts) -> Tensor:
        """Rows [sum(send), ...] go to their members; returns [sum(recv), ...] in member order."""
        if self.transport is None:
            return x
        self._log("all_to_all", x)
        return self.transport.all_to_all(x, send, recv)

    def reduce_scatter(self, x: Tensor, counts: Counts) -> Tensor:
        """Sum of the members' [sum(counts), ...], of which each keeps its rows [counts[me], ...]."""
        if self.transport is None or not any(counts):
            return x
        self._log("reduce_scatter", x)
        if self.summing is not None:
            return self.summing.reduce_scatter(x, counts)
        mine = counts[self.me]
        parts = self.transport.all_to_all(x, counts, [mine] * self.size)
        return sum_in_order(parts.view(self.size, mine, *x.shape[1:]))

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of the members' tensors, equal in bits on every member."""
        if self.transport is None or not x.numel():
            return x
        self._log("all_reduce", x)
        if self.summing is not None:
            return self.summing.all_reduce(x)
        flat = x.reshape(1, -1) if x.dim() == 0 else x.reshape(x.shape[0], -1)
        rows = flat.shape[0]
        parts = self.transport.all_gather(flat, [rows] * self.size)
        return sum_in_order(parts.view(self.size, *flat.shape)).view(x.shape)

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        """The tensor of member `root`; every member passes one of its shape."""
        if self.transport is None:
            return x
        self._log("broadcast", x)
        rows = x.shape[0]
        counts = [rows if i == root else 0 for i in range(self.size)]
        return self.transport.all_gather(x if self.me == root else x[:0], counts)

    def shift(self, x: Tensor, recv: int, distance: int = 1) -> Tensor:
        """Ring step: x goes to member me + distance, `recv` rows come from member me - distance."""
        if self.transport is None:
            return x
        self._log("exchange", x)
        to, source = (self.me + distance) % self.size, (self.me - distance) % self.size
        send_counts = [x.shape[0] if i == to else 0 for i in range(self.size)]
        recv_counts = [recv if i == source else 0 for i in range(self.size)]
        return self.transport.all_to_all(x, send_counts, recv_counts)


def offsets(counts: Counts) -> list[int]:
    """Start of each member's rows: [0, c0, c0 + c1, ...], one more entry than members."""
    return [0, *accumulate(counts)]


ALONE = Group((0,), 0)


def cat(parts: Sequence[Tensor]) -> Tensor:
    """torch.cat of one or more tensors along rows, without a copy for one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
