"""Streams of a server over asyncio: many at once, and what each of them received."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

Body = dict[str, object]


@dataclass
class Stream:
    """What one streamed completion received; `end`: its finish reason, or "error"."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    end: str | None = None
    done: bool = False


@asynccontextmanager
async def client(url: str, timeout: float = 300.0) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout) as http:
        yield http


async def read(http: httpx.AsyncClient, body: Body, stream: Stream) -> Stream:
    """Follow one stream to its last event. A broken connection is an error of httpx."""
    body = {**body, "stream": True, "return_token_ids": True}
    async with http.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                stream.done = True
                break
            event = json.loads(line[6:])
            if "error" in event:
                stream.end = "error"
                continue
            for choice in event["choices"]:
                stream.tokens += choice["token_ids"]
                stream.text += choice["text"]
                stream.end = choice["finish_reason"] or stream.end
    return stream


async def read_all(url: str, bodies: Sequence[Body], at_once: int) -> list[Stream]:
    """All streams in order, `at_once` at a time."""
    places = asyncio.Semaphore(at_once)
    async with client(url) as http:

        async def one(body: Body) -> Stream:
            async with places:
                return await read(http, body, Stream())

        return list(await asyncio.gather(*(one(body) for body in bodies)))
