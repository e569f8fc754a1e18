"""torch.distributed's gloo: the reference between processes, and the way across hosts.

One process group per group of ranks, made directly over a store: nothing is registered globally, so
two worlds can live in one process. v-forms are padded to the longest member (gloo has no ragged
all-gather); rows travel as bytes, so every dtype is accepted.
"""

import datetime
import time
from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import (  # where torch declares their types
    AllToAllOptions,
    FileStore,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    Work,
)
from torch.distributed.rendezvous import rendezvous

from anabranch.comm.group import CommError, Counts, Transport

GRACE = 2.0
"""Seconds in which the members that still live tell each other so after a failure."""


class Gloo(Protocol):
    """What is used of torch's ProcessGroupGloo, whose stub leaves it out."""

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Work: ...

    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        output_rows: list[int],
        input_rows: list[int],
        options: AllToAllOptions,
    ) -> Work: ...


class GlooTransport(Transport):
    """The verbs of one group; made by `GlooWorld.transport`."""

    def __init__(self, gloo: Gloo, store: Store, members: tuple[int, ...], me: int) -> None:
        self.members = members
        self.me = me
        self._gloo = gloo
        self._store = store

    def all_gather(self, x: Tensor, counts: Counts) -> Tensor:
        size, longest = len(counts), max(counts)
        rows = _bytes(x)
        padded = rows
        if rows.shape[0] < longest:
            padded = rows.new_empty(longest, rows.shape[1])
            padded[: rows.shape[0]] = rows
        out = rows.new_empty(size, longest, rows.shape[1])
        self._wait("all_gather", lambda: self._gloo.allgather([list(out.unbind(0))], [padded]))
        if min(counts) == longest:
            return _typed(out.flatten(0, 1), x)
        return _typed(torch.cat([out[i, :n] for i, n in enumerate(counts)]), x)

    def all_to_all(self, x: Tensor, send: Counts, recv: Counts) -> Tensor:
        rows = _bytes(x)
        out = rows.new_empty(sum(recv), rows.shape[1])
        self._wait(
            "all_to_all",
            lambda: self._gloo.alltoall_base(out, rows, list(recv), list(send), AllToAllOptions()),
        )
        return _typed(out, x)

    def _wait(self, verb: str, start: Callable[[], Work]) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            reason = str(error).partition(". ")[0]
            raise CommError(
                f"{verb} among ranks {self.members}: {self._who_is_missing()} ({reason})"
            ) from error

    def _who_is_missing(self) -> str:
        """gloo names a connection, not a rank: whoever does not say so in time is the one."""
        try:
            self._store.set(f"failed/{self.me}", "1")
            end = time.monotonic() + GRACE
            missing = [i for i in range(len(self.members)) if i != self.me]
            while missing and time.monotonic() < end:
                missing = [i for i in missing if not self._store.check([f"failed/{i}"])]
                time.sleep(0.02)
        except RuntimeError:
            return "the store that joins the ranks is gone"
        if not missing:
            return "all ranks failed together"
        return f"rank {', '.join(str(self.members[i]) for i in missing)} has ended or is stuck"


class GlooWorld:
    """This rank's end of a world over gloo. Every rank asks for its groups in the same order."""

    def __init__(self, store: Store, rank: int, size: int, timeout: float = 120.0) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self._store = store
        self._asked: dict[tuple[int, ...], int] = {}
        everyone = tuple(range(size))
        self._everyone = self.transport(everyone, rank) if size > 1 else None

    def transport(self, members: tuple[int, ...], me: int) -> GlooTransport:
        assert members[me] == self.rank, (members, me, self.rank)
        instance = self._asked.get(members, 0)
        self._asked[members] = instance + 1
        store = PrefixStore(f"{'-'.join(map(str, members))}/{instance}", self._store)
        limit = datetime.timedelta(seconds=self.timeout)
        try:
            gloo = cast(Gloo, ProcessGroupGloo(store, me, len(members), limit))
        except RuntimeError as error:
            raise CommError(
                f"opening group {members}: a rank did not come within {self.timeout:g} s ({error})"
            ) from error
        return GlooTransport(gloo, store, members, me)

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        if self._everyone is not None:
            self._everyone.all_gather(torch.zeros(1, dtype=torch.uint8), [1] * self.size)

    def abort(self) -> None:
        """Nothing to tell: a peer's wait ends when this process does, or at its deadline."""


def file_store(fd: int, size: int) -> Store:
    """A store in an inherited memory file: each rank opens it again, so that locks exclude."""
    return FileStore(f"/proc/self/fd/{fd}", size)


def url_store(url: str, rank: int, size: int, timeout: float) -> Store:
    """A store at `tcp://host:port`, `file:///path` or `env://` (torchrun's variables)."""
    limit = datetime.timedelta(seconds=timeout)
    store, _, _ = next(iter(rendezvous(url, rank, size, timeout=limit)))
    store.set_timeout(limit)
    return cast(Store, store)


def _bytes(x: Tensor) -> Tensor:
    """[rows, ...] -> uint8 [rows, bytes]."""
    if not x.numel():
        return x.new_empty((x.shape[0], _width(x) * x.element_size()), dtype=torch.uint8)
    dense = x.contiguous()  # where a dim of size 1 may still have any stride
    return dense.as_strided((x.numel(),), (1,)).view(torch.uint8).view(x.shape[0], -1)


def _typed(rows: Tensor, like: Tensor) -> Tensor:
    shape = (rows.shape[0], *like.shape[1:])
    return rows.view(like.dtype).view(shape) if rows.numel() else like.new_empty(shape)


def _width(x: Tensor) -> int:
    width = 1
    for n in x.shape[1:]:
        width *= n
    return width
