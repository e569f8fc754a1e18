"""The real server over the packaged model: OpenAI's client, 200 streams, hang-ups, rest, the end.

The rules of the API in full are tests/server's, over a made-up engine; here the engine is real.
"""

import asyncio
import json
import math
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator

import httpx
import openai
import pytest
from tests.e2e.serving import (
    alive,
    comes_true,
    cpu_seconds,
    descendants,
    metric,
    running,
)
from tests.e2e.streams import Stream, client, read, read_all

FLAGS = ("--device", "cpu", "--dtype", "float32", "--threads", "1", "--max-model-len", "512")
QUESTION = [{"role": "user", "content": "Tom has 12 apples. He buys 3 bags of 8 apples each. "
             "How many apples does Tom have now?"}]  # fmt: skip
LONG = {"prompt": "Tom has 12 apples.", "max_tokens": 400, "ignore_eos": True, "temperature": 0}

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    with running(*FLAGS) as found:
        yield found


@pytest.fixture(scope="module")
def url(server: tuple[str, "subprocess.Popen[bytes]"]) -> str:
    return server[0]


@pytest.fixture(scope="module")
def api(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


class TestOpenAIClient:
    def test_chat_and_its_stream(self, api: openai.OpenAI) -> None:
        ask = {"model": "anabranch-demo", "messages": QUESTION, "temperature": 0}
        whole = api.chat.completions.create(**ask, logprobs=True, top_logprobs=3)
        (choice,) = whole.choices
        assert choice.finish_reason == "stop" and choice.message.content.endswith("#### 36")
        content = choice.logprobs.content
        assert b"".join(bytes(e.bytes) for e in content).decode() == choice.message.content
        for entry in content:
            assert entry.logprob <= 0 and entry.top_logprobs[0].token == entry.token
            assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob, abs=1e-5)
            assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1 + 1e-6
        events = list(
            api.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
        )
        text = "".join(e.choices[0].delta.content or "" for e in events[:-1])
        assert text == choice.message.content
        assert events[-2].choices[0].finish_reason == "stop"
        assert events[-1].usage.completion_tokens == whole.usage.completion_tokens

    def test_completions_score_themselves(self, api: openai.OpenAI) -> None:
        """Logprobs of generated tokens are those of the same tokens given as a prompt."""
        ask = {"model": "anabranch-demo", "temperature": 0, "logprobs": 2}
        extra = {"return_token_ids": True, "ignore_eos": True}
        first, again = (
            api.completions.create(**ask, prompt="Ann has 7 pens.", max_tokens=12, extra_body=extra)
            for _ in range(2)
        )
        made = first.choices[0]
        assert made.finish_reason == "length" and len(made.token_ids) == 12
        assert again.choices[0].token_ids == made.token_ids
        given = [*made.prompt_token_ids, *made.token_ids]
        echoed = api.completions.create(**ask, prompt=given, max_tokens=0, echo=True).choices[0]
        values = echoed.logprobs.token_logprobs
        assert len(values) == len(given) and values[0] is None
        assert values[-12:] == pytest.approx(made.logprobs.token_logprobs, abs=1e-3)

    def test_three_choices_with_a_seed(self, api: openai.OpenAI) -> None:
        ask = {"model": "anabranch-demo", "messages": QUESTION, "temperature": 6.0, "seed": 11,
               "max_tokens": 24}  # fmt: skip
        three = api.chat.completions.create(**ask, n=3)
        texts = [c.message.content for c in three.choices]
        assert [c.index for c in three.choices] == [0, 1, 2] and len(set(texts)) > 1
        again = api.chat.completions.create(**ask, n=3)
        assert [c.message.content for c in again.choices] == texts
        assert api.chat.completions.create(**ask).choices[0].message.content == texts[0]

    def test_stop_strings(self, api: openai.OpenAI) -> None:
        ask = {"model": "anabranch-demo", "messages": QUESTION, "temperature": 0}
        whole = api.chat.completions.create(**ask).choices[0].message.content
        for stop in ("####", whole[10:14], "\n"):
            found = api.chat.completions.create(**ask, stop=stop).choices[0]
            assert found.message.content == whole.split(stop)[0] and found.finish_reason == "stop"

    def test_errors(self, api: openai.OpenAI, url: str) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            api.completions.create(model="anabranch-demo", prompt="x", temperature=-1)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.BadRequestError, match="512"):
            api.completions.create(model="anabranch-demo", prompt="word " * 600)
        with pytest.raises(openai.NotFoundError):
            api.completions.create(model="gpt-4", prompt="x")
        for value in ("NaN", "1e39", '"x"', "[]", "-Infinity", "null", "true", str(2**63)):
            body = f'{{"prompt": "x", "max_tokens": 2, "min_p": {value}, "top_k": {value}}}'
            assert httpx.post(f"{url}/v1/completions", content=body, timeout=60).status_code in (
                200, 400,
            ), value  # fmt: skip
        assert api.completions.create(model="anabranch-demo", prompt="x").choices


def test_200_streams_are_each_alone(url: str) -> None:
    """32 ids each, greedy and seeded, equal to what the same request gets by itself."""
    rng = random.Random(2)
    kinds = [
        {
            "prompt": f"Ann has {rng.randint(2, 99)} {thing} and buys {rng.randint(2, 99)} more. "
            * rng.randint(1, 6),
            "max_tokens": 32, "ignore_eos": True, "seed": i,
            "temperature": 0 if i % 2 else 0.9, "top_p": 0.95 if i % 3 else 1.0,
        }
        for i, thing in enumerate(["pens", "apples", "books", "cards", "eggs"] * 8)
    ]  # fmt: skip
    together = asyncio.run(read_all(url, kinds * 5, at_once=200))
    alone = asyncio.run(read_all(url, kinds, at_once=1))
    assert len(together) == 200
    for i, stream in enumerate(together):
        assert len(stream.tokens) == 32 and stream.end == "length" and stream.done
        assert stream.tokens == alone[i % 40].tokens, kinds[i % 40]


def test_100_hang_ups_leave_nothing(url: str) -> None:
    pages = 'kv_pages_free{replica="0"}'
    before = metric(url, pages)
    host, port = url.removeprefix("http://").split(":")
    rng = random.Random(6)
    for part in range(4):
        socks = []
        for i in range(25):
            body = json.dumps(
                {**LONG, "prompt": f"{part} {i} " * 20, "stream": i % 2 == 0}
            ).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
            sock = socket.create_connection((host, int(port)), timeout=10)
            sock.sendall(head % len(body) + body[: len(body) - 3 * (i % 5 == 0)])
            socks.append(sock)
        comes_true(lambda: metric(url, "requests_running") > 0, 10)
        for sock in socks:
            time.sleep(rng.random() / 50)
            sock.close()
    assert comes_true(lambda: metric(url, "requests_running") == 0, 5)
    assert comes_true(lambda: metric(url, "requests_in_flight") == 0, 1)
    assert metric(url, pages) == before and metric(url, "requests_waiting") == 0


def test_an_idle_server_rests(server: tuple[str, "subprocess.Popen[bytes]"]) -> None:
    """Less than 2% of a core for every process of the tree, over 10 s."""
    pids = [server[1].pid, *descendants(server[1].pid)]
    assert len(pids) >= 2
    before = [cpu_seconds(pid) for pid in pids]
    time.sleep(10)
    used = [cpu_seconds(pid) - b for pid, b in zip(pids, before, strict=True)]
    assert max(used) < 0.2, dict(zip(pids, used, strict=True))


def test_sigterm_ends_20_streams_in_order() -> None:
    with running(*FLAGS, "--drain", "3") as (url, server):
        pids = [server.pid, *descendants(server.pid)]

        async def work() -> tuple[list[Stream], float]:
            streams = [Stream() for _ in range(20)]
            async with client(url) as http:
                bodies = [{**LONG, "max_tokens": 30 if i % 4 == 0 else 400} for i in range(20)]
                reads = [
                    asyncio.create_task(read(http, b, s))
                    for b, s in zip(bodies, streams, strict=True)
                ]
                while not all(s.tokens for s in streams):
                    await asyncio.sleep(0.02)
                server.send_signal(signal.SIGTERM)
                told = time.monotonic()
                return list(await asyncio.gather(*reads)), told

        streams, told = asyncio.run(asyncio.wait_for(work(), 120))
        assert server.wait(60) == 0
        seconds = time.monotonic() - told
        assert all(s.done and s.end in ("length", "error") for s in streams)
        assert seconds < 10, f"{seconds:.1f} s from the signal to the end"
        assert not [pid for pid in pids if alive(pid)]
