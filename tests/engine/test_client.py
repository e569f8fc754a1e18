"""The engine behind its client, with fake workers: alone, as threads, as processes."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Coroutine
from pathlib import Path

import pytest
from fake_maker import KILL, LONG, NAP, RAISE, SLOW, SLOW_SECONDS, STOP, alone
from made_up import prepared

from anabranch.core.messages import Output
from anabranch.core.request import FieldError, Request, SamplingParams
from anabranch.engine.client import EngineClient, EngineError

LAYOUTS = [{}, {"tp": 4, "attn_dp": 2, "ranks": "threads"}, {"tp": 2, "attn_dp": 2}]
TREE = {"tp": 2}


def request(name: str, prompt: tuple[int, ...], count: int = 8, **more: object) -> Request:
    sampling = SamplingParams(max_tokens=count, ignore_eos=True)
    return Request(name, prompt, sampling, **more)  # type: ignore[arg-type]


async def start(maker: str = "FakeMaker", **options: object) -> EngineClient:
    made = prepared(**options)
    return await EngineClient.start(made.run.config, made, f"fake_maker:{maker}")


async def outputs(client: EngineClient, r: Request) -> list[Output]:
    return [output async for output in client.submit(r)]


async def tokens(client: EngineClient, r: Request) -> list[int]:
    return [token for output in await outputs(client, r) for token in output.tokens]


def run(work: Coroutine[object, object, None], limit: float = 60.0) -> None:
    asyncio.run(asyncio.wait_for(work, limit))  # type: ignore[arg-type]


def running(pid: int) -> bool:
    """A process that is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def gone(pids: list[int], limit: float) -> None:
    """Returns when none of `pids` runs; fails after `limit` seconds."""
    begin = time.monotonic()
    while any(running(pid) for pid in pids):
        assert time.monotonic() - begin < limit, f"still there: {[p for p in pids if running(p)]}"
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["one", "threads", "processes"])
def test_serves_many_at_once_and_ends(layout: dict[str, object]) -> None:
    async def work() -> None:
        client = await start(**layout)
        ready = await client.wait_ready()
        assert ready.vocab_size == 1003 and client.healthy()
        requests = [request(f"r{i}", tuple(range(10, 20 + i)), 5 + i) for i in range(40)]
        found = await asyncio.gather(*(tokens(client, r) for r in requests))
        for r, got in zip(requests, found, strict=True):
            assert got == alone(r.prompt, r.sampling.max_tokens or 0)
        stats = await client.stats()
        assert stats.running == stats.waiting == 0 and set(stats.free_pages) == {64}
        pids = client._pulse.pids()
        assert len(pids) == (2 if layout.get("ranks") != "threads" and layout else 1)
        await client.shutdown()
        assert not client.alive and not any(running(pid) for pid in pids)
        with pytest.raises(EngineError, match="shut down"):
            await tokens(client, requests[0])

    run(work())


def test_leaving_early_and_abort_free_everything() -> None:
    async def work() -> None:
        client = await start()
        await client.wait_ready()
        stream = client.submit(request("a", (NAP, 12), 400))
        async for output in stream:
            assert output.tokens
            break
        await stream.aclose()
        task = asyncio.create_task(outputs(client, request("b", (NAP, 13), 400)))
        await asyncio.sleep(0.2)
        await client.abort("b")
        assert (await task)[-1].finish_reason == "abort"
        await client.abort("nobody")
        stats = await client.stats()
        assert stats.running == 0 and stats.free_pages == (64,)
        with pytest.raises(FieldError, match="already running"):
            await asyncio.gather(*(outputs(client, request("c", (11,))) for _ in range(2)))
        await client.shutdown()

    run(work())


def test_bad_requests_are_answered_by_the_brain() -> None:
    async def work() -> None:
        client = await start(max_waiting=1, max_running=1)
        await client.wait_ready()
        for bad in (request("a", (5000,)), request("b", tuple(range(600))), request("c", ())):
            (answer,) = await outputs(client, bad)
            assert answer.finish_reason == "error" and "prompt" in (answer.error or "")
        late = await outputs(client, request("d", (NAP, 12), 500, deadline=0.3))
        assert late[-1].finish_reason == "timeout"
        many = await asyncio.gather(*(outputs(client, request(f"e{i}", (10,))) for i in range(20)))
        reasons = {found[-1].finish_reason for found in many}
        assert reasons == {"length", "error"}
        assert await tokens(client, request("f", (10, 11))) == alone((10, 11), 8)
        await client.shutdown()

    run(work())


@pytest.mark.parametrize("layout", LAYOUTS, ids=["one", "threads", "processes"])
def test_control_reaches_every_rank(layout: dict[str, object]) -> None:
    async def work() -> None:
        client = await start(**layout)
        await client.wait_ready()
        pids = await client.control("pid", b"")
        assert len(pids) == layout.get("tp", 1)
        with pytest.raises(ValueError, match="no control 'dance'"):
            await client.control("dance", b"")
        for payload in (b"", bytes(5_000_000)):  # the second is too long for the plan ring
            await client.control("update_weights", payload)
        got = await tokens(client, request("a", (10, 11), 1))
        assert got == [alone((10, 11), 1)[0] * 2 % 1003]
        await client.shutdown()

    run(work())


def test_drain_lets_running_requests_end() -> None:
    async def work() -> None:
        client = await start()
        await client.wait_ready()
        task = asyncio.create_task(tokens(client, request("a", (NAP, 12), 300)))
        await asyncio.sleep(0.1)
        await client.shutdown(20.0)
        assert await task == alone((NAP, 12), 300)

    run(work())


@pytest.mark.parametrize("layout", LAYOUTS, ids=["one", "threads", "processes"])
def test_failed_step_names_itself(layout: dict[str, object]) -> None:
    async def work() -> None:
        client = await start(**layout)
        await client.wait_ready()
        pids = client._pulse.pids()
        assert await tokens(client, request("a", (10,), 3)) == alone((10,), 3)
        begin = time.monotonic()
        with pytest.raises(EngineError, match="this step was cursed"):
            await asyncio.gather(
                tokens(client, request("b", (RAISE, 11))), tokens(client, request("c", (12,)))
            )
        assert time.monotonic() - begin < 5 and not client.healthy()
        assert "this step was cursed" in (client.failure or "")
        with pytest.raises(EngineError):
            await client.stats()
        await gone(pids, 10)
        await client.shutdown()

    run(work())


def test_model_that_cannot_load(capfd: pytest.CaptureFixture[str]) -> None:
    async def work() -> None:
        for layout in LAYOUTS:
            client = await start("BrokenMaker", **layout)
            with pytest.raises(EngineError, match="truncated"):
                await client.wait_ready()
            await client.shutdown()

    run(work())
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("trouble", [KILL, STOP], ids=["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("layout", [{}, TREE], ids=["brain", "rank"])
def test_death_is_noticed(trouble: int, layout: dict[str, object]) -> None:
    """Streams end with an error and health is bad within 5 s; nothing is left within 10 s."""

    async def work() -> None:
        client = await start(**layout)
        await client.wait_ready()
        pids = client._pulse.pids()
        begin = time.monotonic()
        with pytest.raises(EngineError) as error:
            await tokens(client, request("a", (trouble, 11)))
        assert time.monotonic() - begin < 5 and not client.healthy()
        assert ("rank 1" if layout else "brain" if trouble == STOP else "engine") in str(
            error.value
        )
        await gone(pids, 5)
        await client.shutdown()

    run(work())


@pytest.mark.parametrize("tp", [1, 2])
def test_tree_goes_with_its_front(tp: int) -> None:
    """A front that is killed leaves no process."""
    path = os.pathsep.join(p for p in sys.path if p)
    front = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("front.py")), str(tp)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert front.stdout is not None
    pids = [int(word) for word in front.stdout.readline().split()]
    assert len(pids) == tp and all(running(pid) for pid in pids)
    front.kill()
    front.wait(10)
    run(gone(pids, 5))
    front.stdout.close()


@pytest.mark.parametrize("trouble", [SLOW, pytest.param(LONG, marks=pytest.mark.slow)])
def test_long_step_is_not_a_death(trouble: int) -> None:
    async def work() -> None:
        client = await start(**TREE)
        await client.wait_ready()
        begin = time.monotonic()
        task = asyncio.create_task(tokens(client, request("a", (trouble, 11), 2)))
        while not task.done():
            assert client.healthy()
            await asyncio.sleep(0.25)
        assert await task == alone((trouble, 11), 2)
        assert time.monotonic() - begin > SLOW_SECONDS[trouble] - 1
        await client.shutdown()

    run(work())


@pytest.mark.parametrize("seconds", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_idle_engine_sleeps(seconds: int) -> None:
    """Under 2% of a core per process."""

    def spent(pid: int) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def work() -> None:
        client = await start(**TREE)
        await client.wait_ready()
        await tokens(client, request("a", (10,)))
        pids = [*client._pulse.pids(), os.getpid()]
        before = [spent(pid) for pid in pids]
        await asyncio.sleep(seconds)
        assert all(
            spent(pid) - was <= 0.02 * seconds for pid, was in zip(pids, before, strict=True)
        )
        await client.shutdown()

    run(work())
