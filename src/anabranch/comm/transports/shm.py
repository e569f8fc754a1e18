"""Ranks as processes (or threads) of one host over one shared memory file: the fast transport.

Owns the mapping of the file and the allocation of results; the verbs are C++ (`comm/shm`). The
file is anonymous and inherited from the launcher: it has no name and no size limit of a mount, and
ends with the last process. What the C++ cannot sum (integers, fp64) is composed.
"""

import mmap
import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anabranch.comm.endpoint import FILE
from anabranch.comm.group import SUMMED, Counts, Transport
from anabranch.ops.cpu.provider import chosen_isa, machine

if TYPE_CHECKING:
    from anabranch.comm.shm import _shm

SLOT = 1 << 20
"""Bytes a member shows its peers at a time; longer payloads go in slices of it."""


Landing = tuple[Tensor, Tensor]


class ShmTransport(Transport):
    """The verbs of one group; made by `ShmWorld.transport`."""

    def __init__(
        self, group: "_shm.Group", memory: Tensor, members: tuple[int, ...], me: int
    ) -> None:
        self.members = members
        self.me = me
        self.native = group
        self._memory = memory
        self._lent: dict[tuple[int, int, int, int, torch.dtype], Landing] = {}

    def accepts(self, verb: str, nbytes: int, dtype: torch.dtype) -> bool:
        summing = verb in ("reduce_scatter", "all_reduce", "merge_partials")
        return dtype in SUMMED if summing else True

    def all_gather(self, x: Tensor, counts: Counts) -> Tensor:
        return self.native.all_gather(x, counts)

    def all_to_all(self, x: Tensor, send: Counts, recv: Counts) -> Tensor:
        return self.native.all_to_all(x, send, recv)

    def reduce_scatter(self, x: Tensor, counts: Counts) -> Tensor:
        out = self.native.reduce_scatter(x, counts)
        return super().reduce_scatter(x, counts) if out is None else out

    def all_reduce(self, x: Tensor) -> Tensor:
        out = self.native.all_reduce(x) if x.dim() else None
        return super().all_reduce(x) if out is None else out

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        return self.native.broadcast(x, root)

    def merge_partials(self, out: Tensor, lse: Tensor, sink: Tensor | None) -> Tensor:
        return self.native.merge_partials(out, lse, sink)

    def landing(self, rows: int, heads: int, width: int, dtype: torch.dtype) -> Landing | None:
        lent = self.native.lend(rows, heads, width * dtype.itemsize)
        if lent is None:
            return None
        key = (lent[0], rows, heads, width, dtype)
        if key not in self._lent:
            at, stats = lent
            out = self._memory[at : at + rows * heads * width * dtype.itemsize].view(dtype)
            lse = self._memory[stats : stats + rows * heads * 4].view(torch.float32)
            self._lent[key] = out.view(rows, heads, width), lse.view(rows, heads)
        return self._lent[key]

    def barrier(self) -> None:
        self.native.barrier()


class ShmWorld:
    """This rank's end of the memory file that all ranks of a model copy map.

    fd: the inherited file; nonce: of the run, from the launcher, by which a file of another run is
    told. Returns when all ranks have joined: `CommError` names those that did not. The ranks' core
    masks are read now, as they decide whether waits spin first.
    """

    def __init__(
        self,
        fd: int,
        nonce: bytes,
        rank: int,
        size: int,
        timeout: float = 120.0,
        *,
        threads: int | None = None,
        slot: int = SLOT,
        spin: float | None = None,
    ) -> None:
        from anabranch.comm.shm import _shm

        here = machine()
        assert here is not None, "the extensions are built together"
        self._native = _shm
        self.rank, self.size = rank, size
        nbytes = _shm.needed(size, slot)
        name = os.readlink(f"/proc/self/fd/{fd}")
        if not name.startswith(f"/memfd:{FILE}"):
            raise ValueError(f"fd {fd} is {name}, not the ranks' memory file; inherit it unchanged")
        if os.fstat(fd).st_size != nbytes:
            os.ftruncate(fd, nbytes)  # sparse; the same size from every rank, so the order is free
        self._memory = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
        self._world = _shm.World(
            self._memory, Tensor, rank, size, slot, nonce, timeout,
            -1.0 if spin is None else spin, chosen_isa(here),
            torch.get_num_threads() if threads is None else threads,
        )  # fmt: skip
        everyone = tuple(range(size))
        self._everyone = self.transport(everyone, rank) if size > 1 else None

    @property
    def spin_seconds(self) -> float:
        """How long a wait spins before it sleeps, now: 0 where ranks share cores."""
        return self._world.spin_seconds

    def transport(self, members: tuple[int, ...], me: int) -> ShmTransport:
        assert members[me] == self.rank, (members, me, self.rank)
        group = self._native.Group(self._world, members)
        return ShmTransport(group, self._memory, members, me)

    def barrier(self) -> None:
        """Returns when every rank has called it, after which their writes are seen."""
        if self._everyone is not None:
            self._everyone.barrier()

    def abort(self) -> None:
        """Ends the waits of all ranks, with an error that names this one."""
        self._world.fail()
