"""Memory for weights: private arenas, and one arena that the ranks of a host hold together.

A host has one rank (`Alone`), ranks that are threads of one process (`ThreadShare`) or processes
that were handed one memory file (`ProcessShare`). Knows nothing of parameters: `weights.load` says
where each lies and who writes it.
"""

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import torch

ALIGN = 64  # bytes: a cache line, and the widest vector register
_HUGE = 2 << 20


class Share(Protocol):
    """One arena per host. Every rank calls `arena` once with the same size, then `barrier`."""

    def arena(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes], the same memory on every rank."""
        ...

    def barrier(self) -> None:
        """Returns when every rank has called it, after which their writes are seen."""
        ...

    def abort(self) -> None:
        """Called by a rank that failed, so that others do not wait for it."""
        ...


@contextmanager
def aborting(share: Share) -> Iterator[None]:
    """Aborts the share if the body raises."""
    try:
        yield
    except BaseException:
        share.abort()
        raise


def _tensor(memory: mmap.mmap, nbytes: int) -> torch.Tensor:
    """The mapping as uint8 [nbytes]; asks for huge pages where the kernel has them."""
    with suppress(OSError):  # a kernel built without huge pages refuses the advice
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)


def private_arena(nbytes: int) -> torch.Tensor:
    """Anonymous memory, uint8 [nbytes], taken from the system page by page as it is written."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    # whole huge pages, so that the last one can be huge too
    size = -(-nbytes // _HUGE) * _HUGE if nbytes >= _HUGE else nbytes
    return _tensor(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), nbytes)


class Alone:
    """The one rank of a host: nothing is shared."""

    def arena(self, nbytes: int) -> torch.Tensor:
        assert nbytes == 0, f"{nbytes} shared bytes on a host with one rank"
        return torch.empty(0, dtype=torch.uint8)

    def barrier(self) -> None:
        return

    def abort(self) -> None:
        return


class ThreadShare:
    """Ranks that are threads of one process. deadline: seconds a rank waits for the others."""

    def __init__(self, ranks: int, deadline: float = 600.0) -> None:
        self._lock = threading.Lock()
        self._arena: torch.Tensor | None = None
        self._barrier = threading.Barrier(ranks, timeout=deadline)

    def arena(self, nbytes: int) -> torch.Tensor:
        with self._lock:
            if self._arena is None:
                self._arena = private_arena(nbytes)
            assert self._arena.numel() == nbytes, "ranks disagree about the shared bytes"
            return self._arena

    def barrier(self) -> None:
        """RuntimeError (threading.BrokenBarrierError) if a rank failed or did not come in time."""
        self._barrier.wait()

    def abort(self) -> None:
        self._barrier.abort()


class ProcessShare:
    """Ranks that are processes of one host, over a memory file (memfd) that all were handed.

    fd: of `memory_file()`, inherited. wait: a barrier over the host's ranks, with its own deadline.
    A memory file is not bound by the size of /dev/shm.
    """

    def __init__(self, fd: int, wait: Callable[[], None]) -> None:
        self._fd = fd
        self._wait = wait

    def arena(self, nbytes: int) -> torch.Tensor:
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        os.ftruncate(self._fd, nbytes)  # the same size from every rank, so the order is free
        return _tensor(mmap.mmap(self._fd, nbytes, flags=mmap.MAP_SHARED), nbytes)

    def barrier(self) -> None:
        self._wait()

    def abort(self) -> None:
        return  # the process ends, and with it the tree of ranks


def memory_file() -> int:
    """A new memory file for `ProcessShare`: a file descriptor that child processes may inherit."""
    return os.memfd_create("anabranch-weights", 0)
