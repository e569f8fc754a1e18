"""`anabranch bench serve`: a load on any OpenAI-compatible server, and what it felt like.

Owns how requests arrive and how latencies are counted: TTFT from sending to the first text, ITL
between chunks that carry text, E2E to the last byte.
"""

import asyncio
import json
import random
import time
from dataclasses import dataclass, field

import httpx

from anabranch.cli.chat import events
from anabranch.cli.front import client, model_name
from anabranch.core.config import EngineConfig
from anabranch.text.tokenizer import Json

_WORDS = (
    *("time", "year", "people", "way", "day", "thing", "life", "child", "world", "school"),
    *("state", "family", "student", "group", "country", "problem", "hand", "part", "place"),
)
_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Load:
    """How requests look and arrive. Lengths of prompts in words, of answers in tokens."""

    n: int
    concurrency: int
    rate: float | None
    input_len: int
    output_len: int
    prefix_len: int
    ignore_eos: bool
    seed: int


@dataclass
class Felt:
    """One request as its client felt it; seconds."""

    ttft: float = 0.0
    gaps: list[float] = field(default_factory=list)
    e2e: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


def run(url: str, key: str | None, model: str | None, load: Load, as_json: bool) -> int:
    """Send the load, print the report. Exit code 1 if no request was completed."""
    if load.rate is not None and not load.rate > 0:
        raise ValueError(f"--rate {load.rate}: must be above 0")

    async def work() -> tuple[list[Felt], float]:
        async with client(url, key, EngineConfig()) as http:
            return await send(http, await model_name(http, model), load)

    felt, seconds = asyncio.run(work())
    result = report(felt, seconds)
    if as_json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:16}", json.dumps(value))
        for error in sorted({f.error for f in felt if f.error is not None})[:5]:
            print(f"failed: {error}")
    return 0 if result["completed"] else 1


async def send(http: httpx.AsyncClient, model: str, load: Load) -> tuple[list[Felt], float]:
    """All requests, and the seconds from the first to the last byte of all."""
    rng = random.Random(load.seed)
    prefix = _text(rng, load.prefix_len)
    prompts = [f"{prefix} {_text(rng, load.input_len)}".strip() for _ in range(load.n)]
    gate = asyncio.Semaphore(load.concurrency if load.rate is None else load.n)

    async def one(prompt: str) -> Felt:
        async with gate:
            return await _one(http, model, prompt, load)

    begin = time.perf_counter()
    tasks: list[asyncio.Task[Felt]] = []
    for prompt in prompts:
        tasks.append(asyncio.create_task(one(prompt)))
        if load.rate is not None:
            await asyncio.sleep(rng.expovariate(load.rate))
    felt = [await task for task in tasks]
    return felt, time.perf_counter() - begin


async def _one(http: httpx.AsyncClient, model: str, prompt: str, load: Load) -> Felt:
    body: dict[str, Json] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": load.output_len,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if load.ignore_eos:
        body["ignore_eos"] = True
    felt, chunks = Felt(), 0
    begin = last = time.perf_counter()
    try:
        async for event in events(http, "/v1/completions", body):
            now = time.perf_counter()
            usage, choices = event.get("usage"), event.get("choices")
            if isinstance(usage, dict):
                felt.prompt_tokens = _count(usage.get("prompt_tokens"))
                felt.output_tokens = _count(usage.get("completion_tokens"))
            choice = choices[0] if isinstance(choices, list) and choices else None
            if not isinstance(choice, dict) or not choice.get("text"):
                continue
            if chunks:
                felt.gaps.append(now - last)
            else:
                felt.ttft = now - begin
            chunks, last = chunks + 1, now
    except (httpx.HTTPError, RuntimeError, ValueError) as error:
        felt.error = f"{type(error).__name__}: {error}"
    felt.e2e = time.perf_counter() - begin
    if chunks == 0 and felt.error is None:
        felt.error = "no text came"
    felt.output_tokens = felt.output_tokens or chunks
    return felt


def report(felt: list[Felt], seconds: float) -> dict[str, Json]:
    """{completed, failed, ttft_ms, itl_ms, e2e_ms, output_tok_s, total_tok_s, ...}."""
    good = [f for f in felt if f.error is None]
    output = sum(f.output_tokens for f in good)
    prompt = sum(f.prompt_tokens for f in good)
    return {
        "completed": len(good),
        "failed": len(felt) - len(good),
        "seconds": seconds,
        "ttft_ms": _percentiles([f.ttft for f in good]),
        "itl_ms": _percentiles([gap for f in good for gap in f.gaps]),
        "e2e_ms": _percentiles([f.e2e for f in good]),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "output_tok_s": output / seconds,
        "total_tok_s": (output + prompt) / seconds,
        "req_s": len(good) / seconds,
    }


def _percentiles(seconds: list[float]) -> Json:
    """Milliseconds by nearest rank; null where nothing was measured."""
    ordered = sorted(seconds)
    found: dict[str, Json] = {}
    for p in _PERCENTILES:
        rank = max(0, -(-len(ordered) * p // 100) - 1)
        found[f"p{p}"] = 1000 * ordered[rank] if ordered else None
    return found


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(words))


def _count(value: Json) -> int:
    return value if isinstance(value, int) else 0
