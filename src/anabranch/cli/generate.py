"""`anabranch generate`: many prompts at once, answers in order.

Owns where prompts come from and how answers are printed.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx

from anabranch.cli.front import client, model_name, post
from anabranch.cli.lines import lines_of
from anabranch.core.config import EngineConfig
from anabranch.core.request import SamplingParams
from anabranch.text.tokenizer import Json

T = TypeVar("T")
U = TypeVar("U")
Prompt = str | list[Json]  # a text, or a chat's messages


@dataclass(frozen=True)
class Settings:
    """What to generate from, and how. chat: texts are sent as one user message each."""

    prompts: Sequence[str]
    file: Path | None
    max_tokens: int
    temperature: float
    chat: bool
    concurrency: int


def run(
    config: EngineConfig, settings: Settings, url: str | None, key: str | None, as_json: bool
) -> int:
    """Generate and print: texts with their prompts, or one JSON object a line."""
    prompts: list[Prompt] = [*settings.prompts, *read_prompts(settings.file)]
    if not prompts and not sys.stdin.isatty():
        prompts = [line for line in sys.stdin.read().splitlines() if line.strip()]
    if not prompts:
        raise ValueError("no prompt: give --prompt TEXT or --file FILE")
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise ValueError(f"prompt {number} of {len(prompts)} is empty")
    SamplingParams(temperature=settings.temperature, max_tokens=settings.max_tokens).check()

    async def work() -> list[dict[str, Json]]:
        async with client(url, key, config) as http:
            name = await model_name(http, None)

            async def one(prompt: Prompt) -> dict[str, Json]:
                try:
                    return await _answer(http, name, settings, prompt)
                except (RuntimeError, httpx.HTTPError) as error:  # the others' answers are kept
                    return {"prompt": prompt, "error": str(error) or type(error).__name__}

            return await in_parallel(one, prompts, settings.concurrency, "generating")

    answers = asyncio.run(work())
    for number, answer in enumerate(answers, 1):
        if "error" in answer:
            print(f"anabranch: prompt {number}: {answer['error']}", file=sys.stderr)
        if as_json:
            print(json.dumps(answer, ensure_ascii=False))
        elif "error" not in answer:
            shown = answer["prompt"]
            head = shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)
            print(f"{head}\n--> {answer['text']}\n")
    return 1 if any("error" in answer for answer in answers) else 0


def read_prompts(file: Path | None) -> list[Prompt]:
    """Prompts of a .jsonl (`prompt`, `messages`, `question` or `text`), or a line each."""
    if file is None:
        return []
    lines = lines_of(file)
    if file.suffix not in (".jsonl", ".json"):
        return [line for _, line in lines]
    found: list[Prompt] = []
    for number, line in lines:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{file}:{number}: not JSON ({error})") from None
        value = row if isinstance(row, str) else None
        for name in ("prompt", "messages", "question", "text"):
            if isinstance(row, dict) and value is None:
                value = row.get(name)
        if not isinstance(value, str | list):
            raise ValueError(f"{file}:{number}: no prompt, messages, question or text")
        if not _encodes(value):
            raise ValueError(f"{file}:{number}: half of a surrogate pair, which is no text")
        found.append(value)
    return found


def _encodes(value: Json) -> bool:
    """JSON may hold half of a surrogate pair, of which there is no UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_ids(prompt: Prompt) -> bool:
    return all(isinstance(token, int) for token in prompt)


async def _answer(
    http: httpx.AsyncClient, name: str, settings: Settings, prompt: Prompt
) -> dict[str, Json]:
    body: dict[str, Json] = {
        "model": name,
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
    }
    if settings.chat or not (isinstance(prompt, str) or _is_ids(prompt)):
        messages: list[Json] = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        )
        reply = await post(http, "/v1/chat/completions", {**body, "messages": messages})
    else:
        reply = await post(http, "/v1/completions", {**body, "prompt": prompt})
    choice, usage = first_choice(reply), reply.get("usage")
    return {
        "prompt": prompt,
        "text": choice_text(choice),
        "finish_reason": choice.get("finish_reason"),
        "usage": usage,
    }


def first_choice(reply: dict[str, Json]) -> dict[str, Json]:
    choices = reply.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise RuntimeError("the server's answer has no choices")
    return choices[0]


def choice_text(choice: dict[str, Json]) -> str:
    """The text of a completion's or a chat's choice."""
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    return text if isinstance(text, str) else ""


async def in_parallel(
    work: Callable[[T], Awaitable[U]], items: Sequence[T], most: int, label: str
) -> list[U]:
    """Results in the items' order, at most `most` at a time, with a progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    gate = asyncio.Semaphore(most)
    with Progress(
        *columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as progress:
        bar = progress.add_task(label, total=len(items))

        async def one(item: T) -> U:
            async with gate:
                result = await work(item)
            progress.advance(bar)
            return result

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(item)) for item in items]
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
        return [task.result() for task in tasks]
