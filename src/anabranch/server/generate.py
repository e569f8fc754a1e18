"""One choice of an answer: engine outputs in, text deltas out.

Owns what of a sequence is shown when (stop strings, whole characters, logprobs with the text they
belong to), that a choice which ends early is aborted in the engine, and latency measurement. Knows
nothing of JSON or of endpoints.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from anabranch.core.messages import Output, Ready, Stats
from anabranch.core.plan import TokenLogprobs
from anabranch.core.request import Request
from anabranch.server.errors import ApiError, engine_error
from anabranch.server.metrics import Metrics
from anabranch.text.stream import TextStream
from anabranch.text.tokenizer import Tokenizer


class Engine(Protocol):
    """What the server needs of `engine.client.EngineClient`."""

    ready: Ready | None
    failure: str | None

    async def wait_ready(self) -> object: ...
    def submit(self, request: Request) -> AsyncIterator[Output]: ...
    async def abort(self, id: str) -> None: ...
    async def stats(self) -> Stats: ...
    def healthy(self) -> bool: ...
    async def shutdown(self, drain_s: float) -> None: ...


@dataclass(frozen=True)
class Entry:
    """Logprobs of one shown token; `offset` counts characters from the text's begin."""

    logprobs: TokenLogprobs
    offset: int


@dataclass(frozen=True)
class Delta:
    """What a choice adds. The first has `prompt_logprobs` if asked, the last a finish_reason."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    entries: tuple[Entry, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None


class Choice:
    """One engine request and the text it becomes.

    prompt: index of the prompt it continues. drop_output: nothing that is generated is shown.
    keep_all_entries: logprobs for every token (one per returned id), not only for shown text.
    After `deltas` has ended, `generated` and `cached` are the tokens to account for.
    """

    def __init__(
        self,
        index: int,
        prompt: int,
        request: Request,
        tokenizer: Tokenizer,
        *,
        drop_output: bool = False,
        keep_all_entries: bool = False,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.request = request
        self.generated = 0
        self.cached = 0
        self._drop_output = drop_output
        self._keep_all = keep_all_entries
        sampling = request.sampling
        self._stream = TextStream(tokenizer, sampling.stop, stops_after=sampling.min_tokens)
        self._waiting: deque[tuple[int, Entry]] = deque()  # (length of text after it, entry)

    async def deltas(self, engine: Engine, metrics: Metrics) -> AsyncGenerator[Delta]:
        """Deltas until the finish reason. ApiError if the engine cannot serve the request.

        Leaving early (the client hung up, a stop string was found) aborts the engine's request.
        """
        ended = False
        clock = _Clock(metrics)
        outcome = "disconnect"
        try:
            async with aclosing(_generator(engine.submit(self.request))) as outputs:
                async for output in outputs:
                    ended = output.finish_reason is not None
                    if output.finish_reason == "error":
                        raise engine_error(output.error or "the engine could not serve the request")
                    clock.tokens(len(output.tokens))
                    self.cached = max(self.cached, output.cached_tokens)
                    delta = self._take(output)
                    if delta.finish_reason is not None:
                        outcome = delta.finish_reason
                        clock.end()
                    yield delta
                    if delta.finish_reason is not None:
                        return
            raise engine_error(engine.failure or "the engine ended the request without a reason")
        except ApiError:
            outcome = "error"
            raise
        except Exception as error:
            outcome = "error"
            raise engine_error(str(error) or type(error).__name__) from error
        finally:
            if not ended:
                await engine.abort(self.request.id)
            metrics.finish(outcome)
            metrics.prompt_tokens += len(self.request.prompt)
            metrics.generation_tokens += self.generated
            metrics.cached_prompt_tokens += self.cached

    def _take(self, output: Output) -> Delta:
        text = ""
        finish = output.finish_reason
        used: list[int] = []
        for i, token in enumerate(output.tokens):
            self.generated += 1
            used.append(token)
            entry = output.logprobs[i] if i < len(output.logprobs) else None
            last = i == len(output.tokens) - 1
            is_stop = last and finish == "stop" and output.stop_token is not None
            text += self._push(token, entry, shown=not is_stop)
            if self._stream.stop is not None:
                finish = "stop"
                break
        if finish is not None and self._stream.stop is None:
            text += self._stream.finish()
        if self._drop_output:
            self.generated, self._waiting = 0, deque()
            return Delta(prompt_logprobs=output.prompt_logprobs, finish_reason=finish)
        return Delta(
            text, tuple(used), self._release(finish is not None), output.prompt_logprobs, finish
        )

    def _push(self, token: int, logprobs: TokenLogprobs | None, shown: bool) -> str:
        start = self._stream.length
        text = self._stream.push(token) if shown else ""
        if logprobs is not None and (shown or self._keep_all):
            self._waiting.append((self._stream.reach, Entry(logprobs, start)))
        return text

    def _release(self, finished: bool) -> tuple[Entry, ...]:
        """Entries whose text is out; at the end also one that a stop string cuts through."""
        shown = self._stream.shown
        found: list[Entry] = []
        while self._waiting:
            end, entry = self._waiting[0]
            if not (self._keep_all or end <= shown or (finished and entry.offset < shown)):
                break
            self._waiting.popleft()
            found.append(entry)
        return tuple(found)


class _Clock:
    """Latencies of one choice, from its submission."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start = time.perf_counter()
        self._last: float | None = None

    def tokens(self, count: int) -> None:
        if count == 0:
            return
        now = time.perf_counter()
        if self._last is None:
            self._metrics.time_to_first_token.observe(now - self._start)
            gaps, since = count - 1, now
        else:
            gaps, since = count, self._last
        if gaps:
            self._metrics.inter_token_latency.observe((now - since) / gaps, gaps)
        self._last = now

    def end(self) -> None:
        self._metrics.e2e_request_latency.observe(time.perf_counter() - self._start)


async def _generator(outputs: AsyncIterator[Output]) -> AsyncGenerator[Output]:
    """An async generator over any iterator, so that it can be closed."""
    try:
        async for output in outputs:
            yield output
    finally:
        if isinstance(outputs, AsyncGenerator):
            await outputs.aclose()


async def merge(
    choices: Sequence[Choice], engine: Engine, metrics: Metrics
) -> AsyncGenerator[tuple[Choice, Delta]]:
    """Deltas of all choices as they come. The first error ends all of them."""
    if len(choices) == 1:
        async with aclosing(choices[0].deltas(engine, metrics)) as deltas:
            async for delta in deltas:
                yield choices[0], delta
        return
    queue: asyncio.Queue[tuple[Choice, Delta] | BaseException | None] = asyncio.Queue()

    async def pump(choice: Choice) -> None:
        try:
            async with aclosing(choice.deltas(engine, metrics)) as deltas:
                async for delta in deltas:
                    queue.put_nowait((choice, delta))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(choice)) for choice in choices]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
