"""Test harness: ranks as processes (or threads) that run one body each, with a hard limit.

Processes come from a fork server that has imported torch once. A body is a module-level function of
(world, rank, size, *args); what it returns comes back in rank order, an exception as its text.
"""

import faulthandler
import multiprocessing
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import DupFd

import torch

from anabranch.comm.endpoint import Endpoint, make_endpoint
from anabranch.comm.transports.shm import ShmWorld
from anabranch.comm.transports.threads import ThreadWorld
from anabranch.comm.worlds import World, open_world
from anabranch.ops.reference.partials import merge_partials
from anabranch.ops.signatures import MergePartials

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "tests.comm.ranks", "anabranch.comm.transports.gloo"])

Body = Callable[..., object]


@dataclass(frozen=True)
class Failed:
    """What a body raised, or how its process ended."""

    why: str


class InheritedFd:
    """A file descriptor that a child gets under a number of its own."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self):
        return _detach, (DupFd(self.fd),)


def _detach(dup) -> int:
    return dup.detach()


def text_with(endpoint: str, fd: int) -> str:
    kind, _, rest = endpoint.partition(":")
    _, _, nonce = rest.partition(":")
    return f"{kind}:{fd}:{nonce}" if nonce else f"{kind}:{fd}"


def join(text: str, rank: int, size: int, timeout: float, slot: int | None) -> World:
    if slot is None:
        return open_world(text, rank, size, timeout)
    _, fd, nonce = text.split(":")
    return ShmWorld(int(fd), bytes.fromhex(nonce), rank, size, timeout, slot=slot)


def _child(pipe: Connection, text: str, fd: int, rank: int, size: int, limit: float, timeout: float,
           slot: int | None, body: Body, args: tuple) -> None:  # fmt: skip
    faulthandler.dump_traceback_later(limit, exit=True)
    torch.set_num_threads(1)
    warnings.simplefilter("error", FutureWarning)  # on every torch of the range
    try:
        world = join(text_with(text, fd), rank, size, timeout, slot)
        result = body(world, rank, size, *args)
    except BaseException as error:
        traceback.print_exc()
        result = Failed(f"{type(error).__name__}: {error}")
    pipe.send(result)
    faulthandler.cancel_dump_traceback_later()


class Processes:
    """Started ranks. `pids` in rank order; `results` waits for those that are to end."""

    def __init__(
        self, kind: str, size: int, body: Body, *args, limit: float = 60.0, timeout: float = 30.0,
        slot: int | None = None,
    ) -> None:  # fmt: skip
        self.endpoint: Endpoint = make_endpoint(kind)
        self.limit = limit
        (fd,) = self.endpoint.fds
        self.processes, self.pipes = [], []
        for rank in range(size):
            mine, theirs = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(
                target=_child,
                args=(theirs, self.endpoint.text, InheritedFd(fd), rank, size, limit, timeout, slot,
                      body, args),
                daemon=True,
            )  # fmt: skip
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(mine)
        self.endpoint.close()

    @property
    def pids(self) -> list[int]:
        return [p.pid for p in self.processes]

    def results(self, ranks=None) -> list[object]:
        found = []
        for rank in range(len(self.pipes)) if ranks is None else ranks:
            try:
                ready = wait([self.pipes[rank]], self.limit + 10)
                found.append(self.pipes[rank].recv() if ready else Failed("no result in time"))
            except EOFError:
                found.append(Failed("the process ended without a result"))
        return found

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_processes(kind: str, size: int, body: Body, *args, **options) -> list[object]:
    with Processes(kind, size, body, *args, **options) as ranks:
        results = ranks.results()
    failures = [r for r in results if isinstance(r, Failed)]
    assert not failures, failures
    return results


def run_threads(
    kind: str, size: int, body: Body, *args, slot: int | None = None,
    merge: MergePartials = merge_partials,
) -> list[object]:  # fmt: skip
    """Ranks as threads: over `threads`, or over the shared memory of `shm` in one process."""
    shared = ThreadWorld(30.0, merge)
    endpoint = make_endpoint("shm") if kind == "shm" else None
    results: list[object] = [None] * size

    def run(rank: int) -> None:
        try:
            world = shared if endpoint is None else join(endpoint.text, rank, size, 30.0, slot)
            results[rank] = body(world, rank, size, *args)
        except BaseException as error:
            shared.abort()
            traceback.print_exc()
            results[rank] = Failed(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(90)
    assert not any(t.is_alive() for t in threads), "a rank hangs"
    if endpoint is not None:
        endpoint.close()
    failures = [r for r in results if isinstance(r, Failed)]
    assert not failures, failures
    return results
