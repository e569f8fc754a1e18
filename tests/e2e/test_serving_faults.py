"""A process of a two-rank server dies or stops: everyone is told, and nothing is left.

Error events and /health 503 within 5 s, no process within 10 s, the port free again.
"""

import asyncio
import os
import signal
import socket
import time

import httpx
import pytest
from tests.e2e.serving import alive, comes_true, descendants, running
from tests.e2e.streams import Stream, client, read

FLAGS = ("--device", "cpu", "--dtype", "float32", "--threads", "1", "--max-model-len", "512",
         "--tp", "2")  # fmt: skip
LONG = {"prompt": "Tom has 12 apples.", "max_tokens": 400, "ignore_eos": True, "temperature": 0}


def victims(front: int) -> dict[str, int]:
    """The brain (it is the parent of the other rank) and the rank, by their command lines."""
    engines = [pid for pid in descendants(front) if b"anabranch.engine.main" in _command(pid)]
    assert len(engines) == 2, engines
    return {"brain": engines[0], "rank": engines[1]}


def _command(pid: int) -> bytes:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()


async def end_of_streams(url: str, victim: int, number: int) -> list[float]:
    """Seconds from the signal until: every stream had its error event; /health said 503."""
    streams = [Stream() for _ in range(3)]
    async with client(url) as http:
        reads = [asyncio.create_task(read(http, LONG, s)) for s in streams]
        while not all(s.tokens for s in streams):
            await asyncio.sleep(0.02)
        os.kill(victim, number)
        begin = time.monotonic()

        async def unhealthy() -> float:
            while (await http.get("/health")).status_code == 200:
                await asyncio.sleep(0.05)
            return time.monotonic() - begin

        health = asyncio.create_task(unhealthy())
        await asyncio.gather(*reads)
        told = time.monotonic() - begin
        assert all(s.done and s.end == "error" for s in streams), streams
        return [told, await health]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("who", "number"),
    [
        ("rank", signal.SIGKILL),
        ("brain", signal.SIGSTOP),
        pytest.param("brain", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("rank", signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_a_dead_or_stopped_process_ends_the_tree(
    who: str, number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with running(*FLAGS) as (url, server):
        pids = [server.pid, *descendants(server.pid)]
        victim = victims(server.pid)[who]
        told, health = asyncio.run(asyncio.wait_for(end_of_streams(url, victim, number), 120))
        begin = time.monotonic() - max(told, health)
        assert server.wait(30) != 0
        assert comes_true(lambda: not any(alive(pid) for pid in pids), 10)
        gone = time.monotonic() - begin
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/health", timeout=2)
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", int(url.rsplit(":", 1)[1])))
    assert told < 5 and health < 5 and gone < 10, (told, health, gone)
    said = capfd.readouterr()
    assert "anabranch: the engine failed" in said.err
    assert "KV cache: " in said.out and "bytes a token on each rank" in said.out
