"""The front process: binds early, starts the service, and ends in order.

Owns sockets, signals, the watch over the engine and the exit code. Knows nothing of routes.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator

import uvicorn
import uvloop

from anabranch.server.app import create_app
from anabranch.server.errors import unavailable
from anabranch.server.options import ServeOptions
from anabranch.server.service import Service

_WATCH_SECONDS = 0.25
_FAILED_SECONDS = 3.0  # how long /health tells of a failure before the process ends
_CLOSE_SECONDS = 2


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: it would end by the signal, not with our exit code."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(options: ServeOptions) -> socket.socket:
    """A bound, listening socket. OSError names the address."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((options.host.strip("[]"), options.port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        where = f"{options.host} port {options.port}"
        raise OSError(f"cannot listen on {where}: {error.strerror}") from None
    return sock


def address(sock: socket.socket) -> str:
    """The URL of a listening socket, without a slash at its end."""
    host, port = sock.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


@contextlib.asynccontextmanager
async def hosting(service: Service, sock: socket.socket) -> AsyncIterator[None]:
    """Serve on `sock` while the block runs; the service is started and ended by the caller."""
    server = _server(service)
    serving = asyncio.create_task(server.serve([sock]))
    try:
        yield
    finally:
        server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await serving


def serve(
    service: Service, sock: socket.socket, on_ready: Callable[[str], None] = lambda url: None
) -> int:
    """Serve on `sock` until a signal; returns the exit code.

    A second signal cuts the drain short. Errors of start-up are raised, as is RuntimeError when the
    engine fails later. on_ready gets the address when requests can be served.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(service, sock, on_ready))


async def _serve(service: Service, sock: socket.socket, on_ready: Callable[[str], None]) -> int:
    loop = asyncio.get_running_loop()
    told, hurry = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: (hurry if told.is_set() else told).set())
    server = _server(service)
    serving = asyncio.create_task(server.serve([sock]))
    starting = asyncio.create_task(service.start())
    stopping = asyncio.create_task(told.wait())
    try:
        await asyncio.wait((starting, stopping, serving), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            on_ready(address(sock))
            failed = asyncio.create_task(_failure(service))
            await asyncio.wait((failed, stopping, serving), return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                reason = f"the engine failed: {failed.result()}"
                await service.end_all(unavailable(reason, "engine_error"))
                await asyncio.sleep(_FAILED_SECONDS)
                raise RuntimeError(reason)
            failed.cancel()
        await service.stop(service.options.drain if starting.done() else 0.0, hurry)
        return 0
    finally:
        starting.cancel()
        stopping.cancel()
        server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        await asyncio.gather(starting, return_exceptions=True)
        await service.close()


def _server(service: Service) -> _Server:
    return _Server(
        uvicorn.Config(
            create_app(service),
            http="httptools",
            ws="none",
            lifespan="off",
            log_level="info" if service.options.log_requests else "warning",
            access_log=service.options.log_requests,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=_CLOSE_SECONDS,
        )
    )


async def _failure(service: Service) -> str:
    """Ends with the reason when the engine has failed for good."""
    while service.failure is None:
        await asyncio.sleep(_WATCH_SECONDS)
    return service.failure
