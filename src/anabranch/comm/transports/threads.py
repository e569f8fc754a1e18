"""Ranks as threads of one process: the transport of the matrix, of tests and of debugging.

Every group has a `Hub` shared by its members. A verb puts the tensor on the board, meets the others
at a barrier, reads what it needs, and meets again before anyone may reuse its tensor.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from anabranch.comm.group import CommError, Counts, offsets


class Hub:
    """What the members of one group share: a board of tensors and a barrier with a deadline."""

    def __init__(self, members: tuple[int, ...], timeout: float) -> None:
        self.members = members
        self.timeout = timeout
        self.board: list[Tensor | None] = [None] * len(members)
        self.barrier = threading.Barrier(len(members))

    def meet(self, verb: str) -> None:
        try:
            self.barrier.wait(self.timeout)
        except threading.BrokenBarrierError:
            raise CommError(
                f"{verb} among ranks {self.members}: a peer did not arrive within "
                f"{self.timeout:g} s, or failed"
            ) from None


@dataclass
class ThreadWorld:
    """Hubs of all groups of one model copy; `abort` wakes every waiting rank when one fails."""

    timeout: float = 60.0
    _hubs: dict[tuple[int, ...], Hub] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def transport(self, members: tuple[int, ...], me: int) -> "ThreadTransport":
        with self._lock:
            hub = self._hubs.setdefault(members, Hub(members, self.timeout))
        return ThreadTransport(hub, me)

    def abort(self) -> None:
        with self._lock:
            for hub in self._hubs.values():
                hub.barrier.abort()


@dataclass(frozen=True)
class ThreadTransport:
    hub: Hub
    me: int

    def _exchange(self, verb: str, x: Tensor, read: Callable[[list[Tensor]], Tensor]) -> Tensor:
        self.hub.board[self.me] = x
        self.hub.meet(verb)
        board = [t for t in self.hub.board if t is not None]
        try:
            return read(board)
        finally:
            self.hub.meet(verb)

    def all_gather(self, x: Tensor, counts: Counts) -> Tensor:
        assert x.shape[0] == counts[self.me], (x.shape, counts, self.me)
        return self._exchange("all_gather", x, torch.cat)

    def all_to_all(self, x: Tensor, send: Counts, recv: Counts) -> Tensor:
        """Peers put their send counts beside the rows, so a disagreement is an error, not a mix-up."""
        assert x.shape[0] == sum(send), (x.shape, send)
        starts = torch.tensor(offsets(send))
        peers = self._board_of_starts(starts)

        def read(board: list[Tensor]) -> Tensor:
            parts = []
            for peer, rows in enumerate(board):
                low, high = peers[peer][self.me], peers[peer][self.me + 1]
                assert high - low == recv[peer], (self.hub.members, peer, high - low, recv[peer])
                parts.append(rows[low:high])
            return torch.cat(parts)

        return self._exchange("all_to_all", x, read)

    def _board_of_starts(self, starts: Tensor) -> list[list[int]]:
        found: list[list[int]] = []

        def read(board: list[Tensor]) -> Tensor:
            found.extend([int(v) for v in t] for t in board)
            return starts

        self._exchange("all_to_all", starts, read)
        return found
