"""From a process's place in the tree to its workers: how its ranks meet, who holds weights once.

Uses torch; loaded by module path in the processes that run ranks, and nowhere else.
"""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore  # where torch declares their types

from anabranch.comm.transports.gloo import GlooTransport
from anabranch.comm.transports.threads import ThreadWorld
from anabranch.core.plan import ReplicaResult, StepPlan
from anabranch.core.resolve import RunConfig
from anabranch.engine.protocol import Endpoint
from anabranch.weights.share import Alone, ProcessShare, Share, ThreadShare
from anabranch.worker.assemble import World, open_worker
from anabranch.worker.runner import Worker

COLLECTIVE_SECONDS = 300.0  # longest wait of a rank for a peer: longer than any step
_TIMEOUT = timedelta(seconds=COLLECTIVE_SECONDS)


@dataclass(frozen=True)
class Rank:
    """A worker as the crew sees it."""

    worker: Worker

    def step(self, plan: StepPlan) -> ReplicaResult | None:
        return self.worker.step(plan)

    def control(self, name: str, payload: bytes) -> bytes:
        """ValueError for a verb that workers do not have."""
        raise ValueError(f"workers have no control {name!r} ({len(payload)} bytes)")

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


class GlooWorld:
    """Groups over torch.distributed; the process group is joined already."""

    def transport(self, members: tuple[int, ...], me: int) -> GlooTransport:
        group = dist.new_group(list(members), backend="gloo", use_local_synchronization=True)
        return GlooTransport(group, me)


def _join(endpoint: Endpoint, world: int) -> GlooWorld:
    """Meet the other ranks at the store, kept by the process that was given its socket."""
    host, port, fd = "127.0.0.1", endpoint.port, endpoint.listen_fd
    store: Store
    if fd < 0:
        store = TCPStore(host, port, world, is_master=False, timeout=_TIMEOUT)
    else:
        store = TCPStore(
            host, port, world, is_master=True, timeout=_TIMEOUT, wait_for_workers=False,
            master_listen_fd=fd,
        )  # fmt: skip
    (rank,) = endpoint.ranks
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=_TIMEOUT)
    return GlooWorld()


class RankMaker:
    """Workers of this process. Ranks that are threads meet in memory, processes through a store."""

    def __init__(self, run: RunConfig, path: str, endpoint: Endpoint) -> None:
        self._run, self._path = run, Path(path)
        world = run.layout.mesh.world
        self._threads: ThreadWorld | None = None
        self._world: World | None = None
        self._share: Share = Alone()
        if world > 1 and len(endpoint.ranks) == world:
            self._threads = ThreadWorld(COLLECTIVE_SECONDS)
            self._world, self._share = self._threads, ThreadShare(world)
        elif world > 1:
            self._world = _join(endpoint, world)
            self._share = ProcessShare(endpoint.share_fd, dist.barrier)

    def make(self, rank: int) -> Rank:
        return Rank(open_worker(self._run, self._path, rank, self._world, self._share))

    def abort(self) -> None:
        self._share.abort()
        if self._threads is not None:
            self._threads.abort()
