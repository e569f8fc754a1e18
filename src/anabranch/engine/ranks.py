"""From a process's place in the tree to its workers: how its ranks meet, who holds weights once.

Uses torch; loaded by module path in the processes that run ranks, and nowhere else.
"""

from collections.abc import Callable
from pathlib import Path

from anabranch.comm.transports.threads import ThreadWorld
from anabranch.comm.worlds import open_world
from anabranch.core.resolve import RunConfig
from anabranch.engine.protocol import Endpoint
from anabranch.weights.share import Alone, ProcessShare, Share, ThreadShare
from anabranch.worker.assemble import World, open_worker
from anabranch.worker.runner import Worker

COLLECTIVE_SECONDS = 300.0  # longest wait of a rank for a peer: longer than any step


class RankMaker:
    """Workers of this process. Ranks that are threads meet in memory, processes at an endpoint."""

    def __init__(self, run: RunConfig, path: str, endpoint: Endpoint) -> None:
        self._run, self._path = run, Path(path)
        size = run.layout.mesh.world
        self._world: World | None = None
        self._share: Share = Alone()
        self._abort: list[Callable[[], None]] = []
        if size > 1 and len(endpoint.ranks) == size:
            threads = ThreadWorld(COLLECTIVE_SECONDS)
            self._world, self._share = threads, ThreadShare(size)
            self._abort = [self._share.abort, threads.abort]
        elif size > 1:
            (rank,) = endpoint.ranks
            joined = open_world(endpoint.meeting, rank, size, COLLECTIVE_SECONDS, run.threads)
            self._world = joined
            if endpoint.share_fd >= 0:
                self._share = ProcessShare(endpoint.share_fd, joined.barrier)
            self._abort = [joined.abort]

    def make(self, rank: int) -> Worker:
        return open_worker(self._run, self._path, rank, self._world, self._share)

    def abort(self) -> None:
        for abort in self._abort:
            abort()
