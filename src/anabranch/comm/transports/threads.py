"""Ranks as threads of one process: the transport of the matrix, of tests and of debugging.

Every group has a `Hub` shared by its members. A verb puts its tensors on the board, meets the
others at a barrier, reads what it needs, and meets again before anyone may reuse its tensors.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from anabranch.comm.group import CommError, Counts, Transport, offsets
from anabranch.ops.reference.partials import merge_partials
from anabranch.ops.signatures import MergePartials

Shown = tuple[Tensor, ...]


class Hub:
    """What the members of one group share: a board of tensors and a barrier with a deadline."""

    def __init__(self, members: tuple[int, ...], timeout: float) -> None:
        self.members = members
        self.timeout = timeout
        self.board: list[Shown] = [()] * len(members)
        self.barrier = threading.Barrier(len(members))
        self._verbs: list[str | None] = [None] * len(members)

    def meet(self, me: int, verb: str) -> None:
        self._verbs[me] = verb
        try:
            self.barrier.wait(self.timeout)
        except threading.BrokenBarrierError:
            absent = [r for r, v in zip(self.members, self._verbs, strict=True) if v is None]
            raise CommError(
                f"{verb} among ranks {self.members}: a peer did not arrive within "
                f"{self.timeout:g} s, or failed: rank {', '.join(map(str, absent)) or 'unknown'}"
            ) from None
        self._verbs[me] = None


@dataclass
class ThreadWorld:
    """Hubs of all groups of one model copy; `abort` wakes every waiting rank when one fails."""

    timeout: float = 60.0
    merge: MergePartials = merge_partials
    _hubs: dict[tuple[tuple[int, ...], int], Hub] = field(default_factory=dict)
    _asked: dict[tuple[tuple[int, ...], int], int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def transport(self, members: tuple[int, ...], me: int) -> "ThreadTransport":
        with self._lock:
            instance = self._asked.get((members, me), 0)
            self._asked[members, me] = instance + 1
            hub = self._hubs.setdefault((members, instance), Hub(members, self.timeout))
        return ThreadTransport(hub, me, self.merge)

    def abort(self) -> None:
        with self._lock:
            for hub in self._hubs.values():
                hub.barrier.abort()


class ThreadTransport(Transport):
    """The verbs of one group; made by `ThreadWorld.transport`. Peers' tensors are read in place."""

    def __init__(self, hub: Hub, me: int, merge: MergePartials) -> None:
        self.hub = hub
        self.members = hub.members
        self.me = me
        self._merge = merge

    def accepts(self, verb: str, nbytes: int, dtype: torch.dtype) -> bool:
        return verb == "merge_partials" or super().accepts(verb, nbytes, dtype)

    def _exchange(self, verb: str, shown: Shown, read: Callable[[list[Shown]], Tensor]) -> Tensor:
        self.hub.board[self.me] = shown
        self.hub.meet(self.me, verb)
        try:
            return read(self.hub.board)
        finally:
            self.hub.meet(self.me, verb)

    def all_gather(self, x: Tensor, counts: Counts) -> Tensor:
        assert x.shape[0] == counts[self.me], (x.shape, counts, self.me)
        return self._exchange("all_gather", (x,), lambda board: torch.cat([x for (x,) in board]))

    def all_to_all(self, x: Tensor, send: Counts, recv: Counts) -> Tensor:
        """Peers show their send counts too: a disagreement is an error, not a mix-up."""
        assert x.shape[0] == sum(send), (x.shape, send)

        def read(board: list[Shown]) -> Tensor:
            parts = []
            for peer, (rows, starts) in enumerate(board):
                low, high = list(pairwise(starts.tolist()))[self.me]
                assert high - low == recv[peer], (self.members, peer, high - low, recv[peer])
                parts.append(rows[low:high])
            return torch.cat(parts)

        return self._exchange("all_to_all", (x, torch.tensor(offsets(send))), read)

    def merge_partials(self, out: Tensor, lse: Tensor, sink: Tensor | None) -> Tensor:
        heads = out.shape[1] // len(self.members)
        low, high = self.me * heads, (self.me + 1) * heads

        def read(board: list[Shown]) -> Tensor:
            partials = torch.stack([out[:, low:high] for out, _ in board])
            stats = torch.stack([lse[:, low:high] for _, lse in board])
            return self._merge(partials, stats, sink=sink)[0]

        return self._exchange("merge_partials", (out, lse), read)
