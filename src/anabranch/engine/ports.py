"""Two ways for a synchronous caller to reach a brain: in this thread, or in a tree of processes.

A caller hands in requests with a box; outputs of the request land in its box. `fill` blocks until
the box has something. Boxes let several streams be read in turn.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Coroutine
from queue import SimpleQueue
from typing import Protocol, TypeVar

from anabranch.core.config import EngineConfig
from anabranch.core.messages import Output, Ready, Stats
from anabranch.core.request import Request
from anabranch.engine.brain import Brain
from anabranch.engine.client import EngineClient, EngineError
from anabranch.engine.crew import RANK_MAKER, Crew, LocalCrew
from anabranch.engine.prepare import Prepared
from anabranch.engine.protocol import Endpoint, Launch
from anabranch.engine.remote import MEETING, RemoteRanks, place_of_process
from anabranch.engine.tree import TreeCrew

T = TypeVar("T")


class Box:
    """Outputs waiting for one reader."""

    def __init__(self) -> None:
        self.items: deque[Output] = deque()
        self.arrivals: SimpleQueue[Output | EngineError] = SimpleQueue()


class Port(Protocol):
    """A brain, seen by a synchronous caller."""

    ready: Ready

    def submit(self, request: Request, box: Box) -> None: ...

    def fill(self, box: Box) -> None:
        """Block until `box.items` has something. EngineError if the engine has failed."""
        ...

    def abort(self, request_id: str) -> None: ...

    def control(self, name: str, payload: bytes) -> list[bytes]: ...

    def stats(self) -> Stats: ...

    def close(self) -> None: ...


class InProcess:
    """The brain in the caller's thread: it steps while somebody waits for an output."""

    def __init__(self, prepared: Prepared, maker: str = RANK_MAKER) -> None:
        run, path = prepared.run, str(prepared.path)
        crew: Crew
        if place_of_process(run.config) is not None:
            launch = Launch(run, path, maker, 0, Endpoint((0,), MEETING))
            crew = TreeCrew(launch, RemoteRanks(launch))
        else:
            crew = LocalCrew(run, path, maker, Endpoint(tuple(range(run.layout.mesh.world))))
        self._brain = Brain(run, crew)
        self._boxes: dict[str, Box] = {}
        self._failure: str | None = None
        self.ready = self._brain.ready

    def submit(self, request: Request, box: Box) -> None:
        self._check()
        outputs = self._brain.submit(request)
        if not outputs:  # refused ones, duplicates among them, are answered at once
            self._boxes[request.id] = box
        box.items += outputs

    def fill(self, box: Box) -> None:
        while not box.items:
            self._check()
            assert not self._brain.idle, "waiting for outputs of no request"
            try:
                self._deliver(self._brain.step())
            except Exception as error:
                self._failure = str(error)
                raise EngineError(self._failure) from error

    def abort(self, request_id: str) -> None:
        if self._failure is None:
            self._deliver(self._brain.abort(request_id))

    def control(self, name: str, payload: bytes) -> list[bytes]:
        self._check()
        replies, outputs = self._brain.call(name, payload)
        self._deliver(outputs)
        return replies

    def stats(self) -> Stats:
        return self._brain.stats()

    def close(self) -> None:
        if self._failure is None:
            self._failure = "the engine was closed"
            self._brain.close()

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            box = self._boxes[output.id]
            if output.finish_reason is not None:
                del self._boxes[output.id]
            box.items.append(output)

    def _check(self) -> None:
        if self._failure is not None:
            raise EngineError(self._failure)


class Remote:
    """The brain in a process tree, reached through an event loop in a thread of its own."""

    def __init__(self, config: EngineConfig, prepared: Prepared, maker: str = RANK_MAKER) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="client", daemon=True)
        self._thread.start()
        self._pumps: dict[str, asyncio.Task[None]] = {}
        try:
            self._client = self._wait(EngineClient.start(config, prepared, maker))
            self.ready = self._wait(self._client.wait_ready())
        except BaseException:
            self._stop()
            raise

    def submit(self, request: Request, box: Box) -> None:
        self._loop.call_soon_threadsafe(self._start_pump, request, box)

    def fill(self, box: Box) -> None:
        while not box.items or not box.arrivals.empty():
            item = box.arrivals.get()
            if isinstance(item, EngineError):
                raise item
            box.items.append(item)

    def abort(self, request_id: str) -> None:
        self._wait(self._client.abort(request_id))

    def control(self, name: str, payload: bytes) -> list[bytes]:
        return list(self._wait(self._client.control(name, payload)))

    def stats(self) -> Stats:
        return self._wait(self._client.stats())

    def close(self) -> None:
        if self._thread.is_alive():
            self._wait(self._client.shutdown())
            self._stop()

    def _start_pump(self, request: Request, box: Box) -> None:
        task = self._loop.create_task(self._pump(request, box))
        self._pumps[request.id] = task
        task.add_done_callback(lambda _: self._pumps.pop(request.id, None))

    async def _pump(self, request: Request, box: Box) -> None:
        try:
            async for output in self._client.submit(request):
                box.arrivals.put(output)
        except EngineError as error:
            box.arrivals.put(error)

    def _wait(self, work: Coroutine[object, object, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
