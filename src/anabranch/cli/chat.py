"""`anabranch chat`: a plain conversation in the terminal, streamed.

Owns the loop of turns and its few commands.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator

import httpx

from anabranch.cli.front import client, model_name, words_of
from anabranch.core.config import EngineConfig
from anabranch.text.tokenizer import Json

_HELP = "/new begins again, /exit (or Ctrl-D) ends"


def run(
    config: EngineConfig,
    system: str | None,
    max_tokens: int,
    temperature: float,
    url: str | None,
    key: str | None,
    name: str | None,
) -> int:
    """Talk until the input ends."""

    async def work() -> None:
        async with client(url, key, config) as http:
            model = await model_name(http, name)
            print(f"{model}: {_HELP}", file=sys.stderr)
            body: dict[str, Json] = {
                "model": model,
                "max_tokens": max_tokens,
                "temperature": temperature,
                "stream": True,
            }
            await _talk(http, body, system)

    asyncio.run(work())
    return 0


async def _talk(http: httpx.AsyncClient, body: dict[str, Json], system: str | None) -> None:
    begin: list[Json] = [] if system is None else [{"role": "system", "content": system}]
    messages = list(begin)
    while True:
        try:
            # in a thread: the server of this process must go on answering
            line = (await asyncio.to_thread(input, "> " if sys.stdin.isatty() else "")).strip()
        except EOFError:
            return
        if line in ("/exit", "/quit"):
            return
        if line == "/new":
            messages = list(begin)
        elif line:
            asked: list[Json] = [*messages, {"role": "user", "content": line}]
            answer = ""
            async for text in stream_text(http, {**body, "messages": asked}):
                answer += text
                print(text, end="", flush=True)
            print()
            messages = [*asked, {"role": "assistant", "content": answer}]


async def stream_text(http: httpx.AsyncClient, body: dict[str, Json]) -> AsyncIterator[str]:
    """Text deltas of a streamed chat completion. RuntimeError with the server's words."""
    async for event in events(http, "/v1/chat/completions", body):
        choices = event.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            delta = choices[0].get("delta")
            text = delta.get("content") if isinstance(delta, dict) else None
            if isinstance(text, str):
                yield text


async def events(
    http: httpx.AsyncClient, path: str, body: dict[str, Json]
) -> AsyncIterator[dict[str, Json]]:
    """JSON bodies of a stream of server-sent events, up to [DONE]."""
    async with http.stream("POST", path, json=body) as reply:
        if reply.status_code != 200:
            await reply.aread()
            raise RuntimeError(f"the server answered {reply.status_code}: {words_of(reply)}")
        async for line in reply.aiter_lines():
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:") or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise RuntimeError(str(event["error"].get("message", event["error"])))
            yield event
