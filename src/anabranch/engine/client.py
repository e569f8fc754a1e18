"""The front's view of an engine: start the tree, submit, abort, stream, watch, shut down (asyncio).

Owns the process tree from outside: it starts it, watches its pulse and its exit, and kills it when
it fails. Every stream then ends with an EngineError. Imports no torch.
"""

import asyncio
import contextlib
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from typing import TypeVar

from anabranch.core.config import EngineConfig
from anabranch.core.messages import Abort, Fatal, Output, Ready, Shutdown, Stats, StatsQuery, Submit
from anabranch.core.request import FieldError, Request
from anabranch.engine.crew import RANK_MAKER
from anabranch.engine.early import Early
from anabranch.engine.prepare import Prepared, prepare
from anabranch.engine.processes import how_it_ended, kill_group, spawn
from anabranch.engine.protocol import (
    FROM_BRAIN,
    TO_BRAIN,
    Control,
    ControlReply,
    Endpoint,
    Launch,
    Outputs,
)
from anabranch.engine.pulse import Pulse
from anabranch.engine.remote import MEETING, place_of_process
from anabranch.wire.stream import AsyncChannel

T = TypeVar("T")
WATCH_SECONDS = 0.25
END_SECONDS = 5.0


class EngineError(ConnectionError):
    """The engine has ended, or could not start; `detail` are the numbers, if any."""

    def __init__(self, message: str, detail: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.detail = dict(detail or {})


class _Process:
    """The engine's process, started and awaited by a thread of its own.

    The kernel takes the end of the thread that starts a process for the end of its parent; this
    thread lives as long as the process.
    """

    def __init__(self, start: Callable[[], "subprocess.Popen[bytes]"]) -> None:
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._start = start
        threading.Thread(target=self._live, name="engine process", daemon=True).start()

    async def pid(self) -> int:
        return await self._started

    def _live(self) -> None:
        try:
            process = self._start()
        except BaseException as error:
            self._tell(self._started.set_exception, error)
            return
        self._tell(self._started.set_result, process.pid)
        self._tell(self._set_exited, process.wait())

    def _set_exited(self, code: int) -> None:
        if not self.exited.done():
            self.exited.set_result(code)

    def _tell(self, function: Callable[[T], object], value: T) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is over
            self._loop.call_soon_threadsafe(function, value)


class EngineClient:
    """One running engine. Made by `start`; all methods belong to the event loop that made it."""

    def __init__(self, channel: AsyncChannel, pulse: Pulse, process: _Process, pid: int) -> None:
        self.ready: Ready | None = None
        self.failure: str | None = None
        self._detail: dict[str, str] = {}
        self._channel = channel
        self._pulse = pulse
        self._process = process
        self._pid = pid
        self._settled = asyncio.Event()  # ready or failed
        self._ending = False
        self._streams: dict[str, asyncio.Queue[Output | EngineError]] = {}
        self._stats: deque[asyncio.Future[Stats]] = deque()
        self._replies: deque[asyncio.Future[ControlReply]] = deque()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]

    @staticmethod
    async def start(
        config: EngineConfig,
        prepared: Prepared | None = None,
        maker: str = RANK_MAKER,
        early: Early | None = None,
    ) -> "EngineClient":
        """Resolve the configuration and start the process tree; `wait_ready` waits for the model.

        Raises ValueError or Refusal, before any process starts, for what cannot run. prepared:
        the configuration resolved before; maker: what makes the workers; early: the engine's
        process, if it runs already.
        """
        if prepared is None:
            prepared = await asyncio.get_running_loop().run_in_executor(None, prepare, config)
        run = prepared.run
        world = run.layout.mesh.world
        together = world == 1 or run.config.ranks == "threads"
        remote = place_of_process(run.config) is not None
        if early is not None:
            mine, pulse = early.channel, early.pulse
            process = _Process(lambda: early.process)
        else:
            mine, theirs = socket.socketpair()
            pulse = Pulse.create(1 if together or remote else world)
            process = _Process(partial(_spawn, theirs, pulse.fd))
        channel = await AsyncChannel.open(mine)
        client = EngineClient(channel, pulse, process, await process.pid())
        endpoint = Endpoint(tuple(range(world)) if together else (0,), MEETING if remote else "")
        client._send(TO_BRAIN.encode(_launch(prepared, maker, endpoint, together)))
        return client

    async def wait_ready(self) -> Ready:
        """Returns when the model is loaded on every rank. EngineError if it cannot be."""
        await self._settled.wait()
        if self.ready is None:
            raise self._error()
        return self.ready

    async def submit(self, request: Request) -> AsyncGenerator[Output]:
        """Outputs until one has a finish_reason. Leaving early aborts the request.

        EngineError if the engine has failed or fails meanwhile; FieldError for an id in use.
        """
        if request.id in self._streams:
            raise FieldError("id", f"{request.id!r} is already running")
        self._send(TO_BRAIN.encode(Submit(request)))
        queue: asyncio.Queue[Output | EngineError] = asyncio.Queue()
        self._streams[request.id] = queue
        ended = False
        try:
            while not ended:
                item = await queue.get()
                ended = isinstance(item, EngineError) or item.finish_reason is not None
                if isinstance(item, EngineError):
                    raise item
                yield item
        finally:
            del self._streams[request.id]
            if not ended:
                await self.abort(request.id)

    async def abort(self, id: str) -> None:
        """End a request; unknown and ended ids, and a failed engine, are no error."""
        with contextlib.suppress(EngineError):
            self._send(TO_BRAIN.encode(Abort(id)))

    async def stats(self) -> Stats:
        future: asyncio.Future[Stats] = asyncio.get_running_loop().create_future()
        self._send(TO_BRAIN.encode(StatsQuery()))
        self._stats.append(future)
        return await future

    async def control(self, name: str, payload: bytes) -> tuple[bytes, ...]:
        """A worker's control verb on every rank, between steps. ValueError if they refuse."""
        future: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()
        self._send(TO_BRAIN.encode(Control(name, payload)))
        self._replies.append(future)
        reply = await future
        if reply.error is not None:
            raise ValueError(reply.error)
        return reply.replies

    @property
    def alive(self) -> bool:
        """The engine runs and has not failed; it may still be loading."""
        return self.failure is None and not self._process.exited.done()

    def healthy(self) -> bool:
        """Alive, loaded, no process of the tree is silent, and no step takes too long."""
        return self.alive and self.ready is not None and self._pulse.problem() is None

    async def shutdown(self, drain_s: float = 0.0) -> None:
        """Give running requests `drain_s` seconds, then end the tree and wait until it is gone."""
        if not self._ending:
            self._ending = True
            with contextlib.suppress(EngineError):
                self._send(TO_BRAIN.encode(Shutdown(drain_s)))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._process.exited), drain_s + END_SECONDS)
        self._kill()
        await self._process.exited
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail("the engine was shut down")
        self._channel.close()

    # ---- inside ----

    def _send(self, frame: bytes) -> None:
        if self.failure is not None:
            raise self._error()
        try:
            self._channel.send(frame)
        except ConnectionError:
            raise EngineError("the engine is gone") from None

    def _error(self) -> EngineError:
        return EngineError(self.failure or "the engine is gone", self._detail)

    async def _read(self) -> None:
        try:
            while True:
                self._take(FROM_BRAIN.decode(await self._channel.recv()))
        except ConnectionError:
            if not self._ending:
                await self._after_end()

    async def _after_end(self) -> None:
        """The channel is closed: the process is ending; say how."""
        with contextlib.suppress(TimeoutError):
            code = await asyncio.wait_for(asyncio.shield(self._process.exited), END_SECONDS)
            self._fail(self._pulse.failure() or f"the engine process {how_it_ended(code)}")
        self._fail("the engine process closed its channel and did not end")

    def _take(self, message: object) -> None:
        match message:
            case Outputs(items):
                for output in items:
                    if (queue := self._streams.get(output.id)) is not None:
                        queue.put_nowait(output)
            case Stats():
                _settle(self._stats.popleft(), message)
            case ControlReply():
                _settle(self._replies.popleft(), message)
            case Ready():
                self.ready = message
                self._settled.set()
            case Fatal(text, detail):
                self._fail(text, detail)
            case _:
                raise AssertionError(f"{type(message).__name__} from the brain")

    async def _watch(self) -> None:
        """Fail when a process of the tree is dead, stopped or stuck.

        After a pause of this process itself (a stopped terminal) others get time to stamp again.
        """
        judged_from = seen = time.monotonic()
        while self.failure is None and not self._ending:
            await asyncio.sleep(WATCH_SECONDS)
            now = time.monotonic()
            if now - seen > 1.0:
                judged_from = now + 1.0
            seen = now
            if now < judged_from and self._pulse.failure() is None:
                continue
            if (problem := self._pulse.problem()) is not None:
                self._fail(problem)

    def _fail(self, message: str, detail: Mapping[str, str] | None = None) -> None:
        """The engine is over: say so to everyone who waits, and leave no process."""
        if self.failure is not None:
            return
        self.failure, self._detail = message, dict(detail or {})
        self._settled.set()
        for queue in self._streams.values():
            queue.put_nowait(self._error())
        for stats in self._stats:
            _refuse(stats, self._error())
        for reply in self._replies:
            _refuse(reply, self._error())
        self._kill()

    def _kill(self) -> None:
        if not self._process.exited.done():
            kill_group(self._pid)


def _spawn(theirs: socket.socket, pulse_fd: int) -> "subprocess.Popen[bytes]":
    with theirs:
        return spawn(theirs, pulse_fd)


def _launch(prepared: Prepared, maker: str, endpoint: Endpoint, together: bool) -> Launch:
    """The brain's first message: its process gets the cores of the ranks that live in it."""
    ranks = () if prepared.masks is None else prepared.masks.ranks
    mine = sorted({cpu for mask in (ranks if together else ranks[:1]) for cpu in mask})
    return Launch(
        prepared.run, str(prepared.path), maker, 0, endpoint, tuple(mine), () if together else ranks
    )


def _settle(future: "asyncio.Future[T]", value: T) -> None:
    if not future.done():
        future.set_result(value)


def _refuse(future: "asyncio.Future[T]", error: EngineError) -> None:
    if not future.done():
        future.set_exception(error)
