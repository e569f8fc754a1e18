"""Ranks as threads of one process: the transport of the matrix, of tests and of debugging.

Every group has a `Hub` shared by its members. A verb puts its tensors on the board, meets the
others, reads what it needs, and meets again before anyone may reuse its tensors.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise

import torch
from torch import Tensor

from anabranch.comm.group import CommError, Counts, Transport, offsets
from anabranch.ops.reference.partials import merge_partials
from anabranch.ops.signatures import MergePartials

Shown = tuple[Tensor, ...]


class _Gate(threading.local):
    """What a thread waits at, and whether it is its turn."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()
        self.held = False


class Turns:
    """Threads run one at a time and hand over where they wait.

    Threads that run small tensor operations side by side spend their time passing the
    interpreter's lock about; in turns they pass it once a wait. A thread that took no turn runs
    beside the others and takes one for its meetings only.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.aborted = False
        self._guard = threading.Lock()
        self._running = False
        self._ready: deque[threading.Lock] = deque()
        self._gate = _Gate()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """It is the caller's turn inside, but for its waits. TimeoutError after the deadline."""
        gate = self._gate
        if gate.held:
            yield
            return
        with self._guard:
            free, self._running = not self._running, True
            if not free:
                self._ready.append(gate.lock)
        if not free:
            self._wait()
        gate.held = True
        try:
            yield
        finally:
            if gate.held:
                self._hand_over()

    def pause(self, waiting: list[threading.Lock]) -> None:
        """Wait, as one more of `waiting`, for whoever calls `resume`. TimeoutError, as above."""
        waiting.append(self._gate.lock)
        self._hand_over()
        self._wait()
        self._gate.held = True

    def resume(self, waiting: list[threading.Lock]) -> None:
        """Those that paused go on when it is their turn."""
        with self._guard:
            self._ready.extend(waiting)
        waiting.clear()

    def abort(self, *waiting: list[threading.Lock]) -> None:
        """Every wait of every thread ends in TimeoutError, from now on and at once."""
        with self._guard:
            self.aborted = True
            for gates in (self._ready, *waiting):
                while gates:
                    gates.pop().release()

    def _hand_over(self) -> None:
        self._gate.held = False
        with self._guard:
            if self._ready:
                self._ready.popleft().release()
            else:
                self._running = False

    def _wait(self) -> None:
        if self.aborted or not self._gate.lock.acquire(timeout=self.timeout) or self.aborted:
            raise TimeoutError


class Hub:
    """What the members of one group share: a board of tensors and a meeting with a deadline."""

    def __init__(self, members: tuple[int, ...], turns: Turns) -> None:
        self.members = members
        self.turns = turns
        self.board: list[Shown] = [()] * len(members)
        self.waiting: list[threading.Lock] = []
        self._verbs: list[str | None] = [None] * len(members)

    def meet(self, me: int, verb: str) -> None:
        """Returns when every member has come. CommError past the deadline, or after an abort."""
        try:
            with self.turns.taken():
                self._verbs[me] = verb
                if len(self.waiting) + 1 < len(self.members):
                    self.turns.pause(self.waiting)
                else:
                    self._verbs = [None] * len(self.members)
                    self.turns.resume(self.waiting)
        except TimeoutError:
            absent = [r for r, v in zip(self.members, self._verbs, strict=True) if v is None]
            raise CommError(
                f"{verb} among ranks {self.members}: a peer did not arrive within "
                f"{self.turns.timeout:g} s, or failed: "
                f"rank {', '.join(map(str, absent)) or 'unknown'}"
            ) from None


class ThreadWorld:
    """Hubs of all groups of one model copy; `abort` wakes every waiting rank when one fails."""

    def __init__(self, timeout: float = 60.0, merge: MergePartials = merge_partials) -> None:
        self._turns = Turns(timeout)
        self._merge = merge
        self._hubs: dict[tuple[tuple[int, ...], int], Hub] = {}
        self._asked: dict[tuple[tuple[int, ...], int], int] = {}
        self._lock = threading.Lock()

    def transport(self, members: tuple[int, ...], me: int) -> "ThreadTransport":
        with self._lock:
            instance = self._asked.get((members, me), 0)
            self._asked[members, me] = instance + 1
            hub = self._hubs.setdefault((members, instance), Hub(members, self._turns))
        return ThreadTransport(hub, me, self._merge)

    def taken(self) -> AbstractContextManager[None]:
        """Ranks inside run in turns; see `Turns`."""
        return self._turns.taken()

    def abort(self) -> None:
        with self._lock:
            self._turns.abort(*(hub.waiting for hub in self._hubs.values()))


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
