"""The server's life: starting, load, hang-ups, failure of the engine, the end."""

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from server_process import ServerProcess

Start = Callable[..., ServerProcess]
BODY = {"prompt": "hello", "max_tokens": 20, "stream": True}


def metric(url: str, name: str) -> float:
    for line in httpx.get(url + "/metrics", timeout=10).text.splitlines():
        if line.startswith(f"anabranch_{name} "):
            return float(line.split()[1])
    raise AssertionError(f"no metric {name}")


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def children_of(pid: int) -> list[str]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [child for task in tasks for child in task.read_text().split()]


async def read_stream(http: httpx.AsyncClient, body: dict) -> tuple[str, list[str]]:
    """(text, raw events) of a streamed completion."""
    text, events = "", []
    async with http.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200
        async for line in reply.aiter_lines():
            if line.startswith("data: "):
                events.append(line[6:])
                if line[6:] != "[DONE]" and "choices" in (event := json.loads(line[6:])):
                    text += "".join(c["text"] for c in event["choices"])
    return text, events


def test_health_before_and_after_loading(start: Start) -> None:
    server = start("--load", "1.5", ready=False)
    early = httpx.get(server.url + "/health")
    assert early.status_code == 503 and early.json() == {"status": "starting"}
    assert httpx.get(server.url + "/ready").status_code == 503
    refused = httpx.post(server.url + "/v1/completions", json={"prompt": "x"})
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "starting"
    assert httpx.get(server.url + "/metrics").status_code == 200
    server.wait_ready()
    assert httpx.get(server.url + "/health").status_code == 200
    assert httpx.get(server.url + "/ready").json() == {"status": "ready"}
    info = httpx.get(server.url + "/server_info").json()
    assert info["model"] == "tiny" and info["layout"] == {"tp": 1} and info["version"]


def test_a_signal_while_loading_ends_it(start: Start) -> None:
    server = start("--load", "60", ready=False)
    httpx.get(server.url + "/health")
    begin = time.monotonic()
    assert server.end() == 0
    assert time.monotonic() - begin < 8


def test_200_streams_at_once(start: Start) -> None:
    server = start("--step", "0.01")

    async def work() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=60) as http:
            bodies = [{**BODY, "seed": i, "n": 1 + (i % 3 == 0)} for i in range(200)]
            slowest = 0.0

            async def health() -> None:
                nonlocal slowest
                while True:
                    begin = time.perf_counter()
                    assert (await http.get("/health")).status_code == 200
                    slowest = max(slowest, time.perf_counter() - begin)
                    await asyncio.sleep(0.1)

            beside = asyncio.create_task(health())
            results = await asyncio.gather(*(read_stream(http, b) for b in bodies))
            beside.cancel()
            alone = [await read_stream(http, b) for b in bodies[:6]]
            assert [len(r[0]) for r in results[:6]] == [len(r[0]) for r in alone]
            for body, (text, events) in zip(bodies, results, strict=True):
                assert events[-1] == "[DONE]" and text
                assert sum('"finish_reason":"length"' in e for e in events) == body["n"]

    asyncio.run(asyncio.wait_for(work(), 90))
    assert metric(server.url, "requests_in_flight") == 0
    assert metric(server.url, "time_to_first_token_seconds_count") >= 267
    assert metric(server.url, "generation_tokens_total") >= 200 * 20


@pytest.mark.parametrize("stream", [True, False])
def test_100_hang_ups_leave_nothing(start: Start, stream: bool) -> None:
    server = start("--step", "0.02")
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "hello", "max_tokens": 400, "ignore_eos": True, "n": 2,
                       "stream": stream}).encode()  # fmt: skip
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    socks = []
    for i in range(100):
        sock = socket.create_connection((host, int(port)), timeout=5)
        # some leave in the middle of their body, some after it
        sock.sendall(head + (body if i % 5 else body[:20]))
        socks.append(sock)
    assert wait_for(lambda: metric(server.url, "requests_running") == 160, 10)
    for sock in socks:
        sock.close()
    assert wait_for(lambda: metric(server.url, "requests_running") == 0, 5)
    assert wait_for(lambda: metric(server.url, "requests_in_flight") == 0, 1)
    assert 'anabranch_kv_pages_free{replica="0"} 1000' in httpx.get(server.url + "/metrics").text
    assert httpx.post(server.url + "/v1/completions", json={"prompt": "x"}).status_code == 200


def test_pipelined_requests_of_a_closed_connection_leave_nothing(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    server = start("--step", "0.02")
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps(
        {"prompt": "x", "max_tokens": 30, "ignore_eos": True, "stream": True}
    ).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    for _ in range(5):
        with socket.create_connection((host, int(port)), timeout=5) as sock:
            sock.sendall((head + body) * 2)
            time.sleep(0.3)
    assert wait_for(lambda: metric(server.url, "requests_in_flight") == 0, 5)
    time.sleep(1)
    assert server.end() == 0
    assert "Traceback" not in capfd.readouterr().err


def test_a_full_queue_is_429(start: Start) -> None:
    server = start("--step", "0.05", "--max-running", "2", "--max-waiting", "2")

    async def work() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
            four = [asyncio.create_task(read_stream(http, BODY)) for _ in range(4)]
            await asyncio.sleep(0.4)
            full = await http.post("/v1/completions", json={"prompt": "x"})
            assert full.status_code == 429 and full.headers["retry-after"] == "1"
            assert full.json()["error"]["code"] == "queue_full"
            assert (await http.get("/ready")).json() == {"status": "full"}
            assert (await http.get("/health")).status_code == 200
            assert all(events[-1] == "[DONE]" for _, events in await asyncio.gather(*four))
            assert (await http.get("/ready")).status_code == 200
            many = await http.post("/v1/completions", json={"prompt": "x", "n": 5})
            assert many.status_code == 400 and "retry-after" not in many.headers
            assert "5 sequences at once" in many.json()["error"]["message"]
            burst = {"prompt": ["x"] * 4, "max_tokens": 2}  # more than may wait, before any step
            assert (await http.post("/v1/completions", json=burst)).status_code == 200

    asyncio.run(asyncio.wait_for(work(), 40))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_short_streams_end(start: Start, number: int) -> None:
    server = start("--step", "0.05")

    async def work() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
            running = asyncio.create_task(read_stream(http, BODY))
            await asyncio.sleep(0.3)
            os.kill(server.pid, number)
            await asyncio.sleep(0.2)
            late = await http.post("/v1/completions", json={"prompt": "x"})
            assert late.status_code == 503 and late.json()["error"]["code"] == "shutting_down"
            assert (await http.get("/ready")).json() == {"status": "draining"}
            _, events = await running
            assert events[-1] == "[DONE]" and '"finish_reason":"length"' in events[-2]

    asyncio.run(asyncio.wait_for(work(), 30))
    assert server.process.wait(10) == 0


def test_a_signal_ends_long_streams_with_an_error(start: Start) -> None:
    server = start("--step", "0.05", "--drain", "1")
    long = {"prompt": "hello", "max_tokens": 500, "ignore_eos": True}

    async def work() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
            stream = asyncio.create_task(read_stream(http, long | {"stream": True, "n": 2}))
            whole = asyncio.create_task(http.post("/v1/completions", json=long))
            await asyncio.sleep(0.5)
            os.kill(server.pid, signal.SIGTERM)
            _, events = await stream
            assert events[-1] == "[DONE]"
            assert json.loads(events[-2])["error"]["code"] == "shutting_down"
            assert (await whole).status_code == 503

    begin = time.monotonic()
    asyncio.run(asyncio.wait_for(work(), 30))
    assert server.process.wait(10) == 0
    assert time.monotonic() - begin < 10
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as again:  # the port is free
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind((host, int(port)))


def test_an_engine_failure_reaches_every_client_and_ends_the_process(start: Start) -> None:
    server = start("--step", "0.05")
    long = {"prompt": "hello", "max_tokens": 500, "ignore_eos": True}

    async def work() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
            stream = asyncio.create_task(read_stream(http, long | {"stream": True}))
            whole = asyncio.create_task(http.post("/v1/completions", json=long))
            mute = asyncio.create_task(http.post("/v1/completions", json={"prompt": "|"}))
            await asyncio.sleep(0.5)
            begin = time.monotonic()
            killer = await http.post("/v1/completions", json={"prompt": "~"})
            assert killer.status_code in (500, 503)
            health = await http.get("/health")
            assert health.status_code == 503 and health.json() == {"status": "failed"}
            _, events = await stream
            assert "a rank died" in json.loads(events[-2])["error"]["message"]
            assert (await whole).status_code in (500, 503)
            assert (await mute).status_code == 503
            assert time.monotonic() - begin < 5
            assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 503

    asyncio.run(asyncio.wait_for(work(), 30))
    assert server.process.wait(10) == 1
    assert "the engine failed: a rank died" in server.process.stdout.read()


def test_health_stays_quick_beside_long_texts(start: Start) -> None:
    """Tokenising and templating of prompts of 150,000 tokens happen beside the event loop."""
    server = start("--max-body", "50000000")
    text = "the quick brown fox xyzzy " * 15_000

    messages = [{"role": "user", "content": text}]
    bodies = [json.dumps(b).encode() for b in ({"prompt": text}, {"messages": messages})]

    async def work() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:

            async def waits(until: Callable[[], bool]) -> list[float]:
                found = []
                while not until():
                    begin = time.perf_counter()
                    assert (await http.get("/health")).status_code == 200
                    found.append(time.perf_counter() - begin)
                    await asyncio.sleep(0.02)
                return found

            paths = ("/v1/completions", "/v1/chat/completions")
            long = [asyncio.create_task(http.post(path, content=body))
                    for path, body in zip(paths, bodies, strict=True)]  # fmt: skip
            begin = time.perf_counter()
            beside = await waits(lambda: all(task.done() for task in long))
            took = time.perf_counter() - begin
            assert [task.result().status_code for task in long] == [400, 400]
            assert len(beside) > 3
            # in the event loop, one of the two texts would hold it for half of the time or more
            assert max(beside) < max(0.2, 0.4 * took)

    asyncio.run(asyncio.wait_for(work(), 90))


def test_template_errors_are_the_users(start: Start, tmp_path: Path) -> None:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% if messages[0].content == 'loop' %}" + loop + "{% elif messages | length > 1 %}"
        "{{ raise_exception('one message only') }}{% endif %}{{ messages[0].content }}"
    )
    server = start("--chat-template", str(template))
    user = {"role": "user", "content": "hi"}
    for messages, words in (
        ([user, user], "one message only"),
        ([{"role": "user", "content": "loop"}], "limits"),
    ):
        reply = httpx.post(
            server.url + "/v1/chat/completions", json={"messages": messages}, timeout=30
        )
        assert reply.status_code == 400 and words in reply.text
        assert reply.json()["error"]["code"] == "template_error"
    good = httpx.post(server.url + "/v1/chat/completions", json={"messages": [user]}, timeout=30)
    assert good.status_code == 200


def test_no_process_is_left(start: Start) -> None:
    server = start()
    httpx.post(server.url + "/v1/chat/completions",
               json={"messages": [{"role": "user", "content": "hi"}]})  # fmt: skip
    children = children_of(server.pid)
    assert len(children) == 1  # the template's
    assert server.end() == 0
    assert wait_for(lambda: not Path(f"/proc/{children[0]}").exists(), 5)


def test_a_killed_server_leaves_no_template_process(start: Start) -> None:
    server = start()
    httpx.post(server.url + "/v1/chat/completions",
               json={"messages": [{"role": "user", "content": "hi"}]})  # fmt: skip
    children = children_of(server.pid)
    server.process.kill()
    server.process.wait(5)
    assert children and wait_for(lambda: not Path(f"/proc/{children[0]}").exists(), 5)


def test_torch_is_not_in_the_front(tiny_folder: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys, anabranch.server.run, anabranch.text.template, anabranch.cli.main,"
        "anabranch.cli.evals, anabranch.cli.bench, anabranch.cli.score, anabranch.cli.env;"
        "sys.exit('torch' in sys.modules)"
    )
    source = Path(__file__).parent.parent.parent / "src"
    environment = dict(os.environ, PYTHONPATH=str(source))
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=60).returncode == 0


def test_a_second_signal_cuts_the_drain_short(start: Start) -> None:
    server = start("--step", "0.05", "--drain", "60")
    long = {"prompt": "hello", "max_tokens": 500, "ignore_eos": True, "stream": True}

    async def work() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
            stream = asyncio.create_task(read_stream(http, long))
            await asyncio.sleep(0.5)
            os.kill(server.pid, signal.SIGINT)
            await asyncio.sleep(0.5)
            assert not stream.done()
            os.kill(server.pid, signal.SIGINT)
            _, events = await stream
            assert json.loads(events[-2])["error"]["code"] == "shutting_down"

    asyncio.run(asyncio.wait_for(work(), 30))
    assert server.process.wait(10) == 0
