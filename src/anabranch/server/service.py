"""The server's one state: engine, text, names, counts, and whether requests are taken.

Owns admission (the queue limit), the way from an `Ask` to engine requests, and how everything in
flight is ended. Knows nothing of routes or of JSON.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from anabranch.core.config import EngineConfig
from anabranch.core.messages import Ready
from anabranch.core.request import FieldError, Request, SamplingParams
from anabranch.server.errors import ApiError, bad_field, from_field_error, unavailable
from anabranch.server.fields import check_text
from anabranch.server.generate import Choice, Engine
from anabranch.server.metrics import Metrics
from anabranch.server.options import ServeOptions
from anabranch.server.schema import Ask
from anabranch.server.shapes import PromptText
from anabranch.text.template import ChatTemplate, TemplateError
from anabranch.text.tokenizer import Tokenizer

T = TypeVar("T")
State = Literal["starting", "ready", "draining", "failed"]
Texts = tuple[Tokenizer, ChatTemplate | None]
_TEXT_THREADS = 2
_INLINE_CHARACTERS = 2048  # shorter texts are tokenised at once: a thread costs more
_STATS_SECONDS = 5.0


@dataclass(frozen=True)
class Job:
    """One HTTP request on its way: its prompts, and a choice for each engine request."""

    id: str
    ask: Ask
    prompts: tuple[PromptText, ...]
    choices: tuple[Choice, ...]


class Service:
    """connect: starts the engine. load_text: loads tokenizer and template (in a thread)."""

    def __init__(
        self,
        config: EngineConfig,
        options: ServeOptions,
        names: Sequence[str],
        connect: Callable[[EngineConfig], Awaitable[Engine]],
        load_text: Callable[[], Texts],
    ) -> None:
        self.options = options
        self.names = tuple(names)
        self.metrics = Metrics()
        self.draining = False
        self._config = config
        self._connect = connect
        self._load_text = load_text
        self._engine: Engine | None = None
        self._texts: Texts | None = None
        self._capacity = config.max_running * config.attn_dp + config.max_waiting
        self._in_flight = 0
        self._tasks: set[asyncio.Task[object]] = set()
        self._ending: ApiError | None = None
        self._pool = ThreadPoolExecutor(_TEXT_THREADS, "text")

    # -- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load text and engine side by side; returns when requests can be served."""
        loading = asyncio.get_running_loop().run_in_executor(self._pool, self._load_text)
        try:
            engine = self._engine = await self._connect(self._config)
            await engine.wait_ready()
        finally:
            with suppress(asyncio.CancelledError):
                texts = await loading
        self._texts = texts

    async def stop(self, drain_s: float, hurry: asyncio.Event) -> None:
        """Take nothing new, give running requests `drain_s` seconds, then end them.

        hurry: when it is set, the seconds are over.
        """
        self.draining = True
        deadline = asyncio.get_running_loop().time() + drain_s
        while self._in_flight and asyncio.get_running_loop().time() < deadline:
            if hurry.is_set():
                break
            await asyncio.sleep(0.02)
        await self.end_all(unavailable("the server is shutting down", "shutting_down"))

    async def end_all(self, error: ApiError) -> None:
        """Everything in flight, and everything that comes, is answered with `error`."""
        self._ending = error
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=2.0)

    async def close(self) -> None:
        """End engine, template process and threads."""
        if self._engine is not None:
            await self._engine.shutdown(0.0)
        if self._texts is not None and self._texts[1] is not None:
            self._texts[1].close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def failure(self) -> str | None:
        return None if self._engine is None else self._engine.failure

    @property
    def state(self) -> State:
        """Never waits on the engine."""
        if self._engine is None or self._texts is None or self._engine.ready is None:
            return "failed" if self.failure else "starting"
        if self._engine.failure is not None or not self._engine.healthy():
            return "failed"
        return "draining" if self.draining else "ready"

    @property
    def accepts(self) -> bool:
        return self.state == "ready" and self._in_flight < self._capacity

    @property
    def in_flight(self) -> int:
        return self._in_flight

    # -- what routes use -------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        return self._serving()[0]

    @property
    def tokenizer(self) -> Tokenizer:
        return self._serving()[1][0]

    @property
    def ready(self) -> Ready | None:
        return None if self._engine is None else self._engine.ready

    def _serving(self) -> tuple[Engine, Texts]:
        """ApiError 503 unless requests can be served."""
        if self._ending is not None:
            raise self._ending
        state = self.state
        if state == "draining":
            raise unavailable("the server is shutting down", "shutting_down")
        if state == "failed":
            raise unavailable(f"the engine has failed: {self.failure or 'it does not answer'}",
                              "engine_error")  # fmt: skip
        if self._engine is None or self._texts is None or state == "starting":
            raise unavailable("the model is still loading", "starting")
        return self._engine, self._texts

    def check_model(self, name: str | None) -> str:
        """The name to answer with. ApiError 404 for a model that is not served."""
        if name is None or name in self.names:
            return name or self.names[0]
        known = ", ".join(self.names)
        raise ApiError(404, f"model: {name!r} is not served here; served: {known}",
                       code="model_not_found", param="model")  # fmt: skip

    def admit(self, count: int) -> None:
        """Take `count` places in the queue; undone by `release`. ApiError 429 if it is full, 400 if
        it never has so many."""
        self._serving()
        if count > self._capacity:
            raise ApiError(
                400,
                f"prompt, n: {count} sequences at once, where this server runs or queues "
                f"{self._capacity}; send fewer a request",
                param="n",
            )
        if self._in_flight + count > self._capacity:
            raise ApiError(
                429,
                f"the queue is full: {self._in_flight} of {self._capacity} places are taken, "
                f"{count} more asked",
                type="rate_limit_error",
                code="queue_full",
                retry_after=1,
            )
        self._in_flight += count

    def release(self, count: int) -> None:
        self._in_flight -= count

    async def attend(self, work: Coroutine[object, object, T], gone: Awaitable[object]) -> T | None:
        """Run `work`; None if the client is gone first. ApiError if everything is being ended."""
        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(gone)
        self._tasks.add(task)
        try:
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                return None
            if task.cancelled():
                raise self._ending or unavailable("the request was ended", "aborted")
            return task.result()
        finally:
            self._tasks.discard(task)
            for unfinished in (task, watch):
                if not unfinished.done():
                    unfinished.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)

    async def stats_page(self) -> str:
        stats = None
        if self._engine is not None and self.state in ("ready", "draining"):
            with suppress(Exception):  # the page must come even where the brain is stuck
                stats = await asyncio.wait_for(self._engine.stats(), _STATS_SECONDS)
        return self.metrics.render(stats, self._in_flight)

    async def beside(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread: the event loop goes on."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def prepare(self, ask: Ask) -> Job:
        """Tokens of every prompt, and the engine requests. ApiError 400 for what cannot fit."""
        engine, (tokenizer, _) = self._serving()
        assert engine.ready is not None, "serving before ready"
        chat = bool(ask.messages)
        id = ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex
        prompts = (await self._chat(ask),) if chat else await self._prompts(ask)
        choices: list[Choice] = []
        for p, prompt in enumerate(prompts):
            await asyncio.sleep(0)  # many long prompts do not hold up others' requests
            for i in range(ask.n):
                index = p * ask.n + i
                sampling = self._sampling(ask, i, engine.ready.vocab_size)
                request = Request(f"{id}-{index}", prompt.ids, sampling, ask.timeout)
                try:
                    request.check(engine.ready.vocab_size, engine.ready.max_model_len)
                except FieldError as error:
                    names = {"prompt": "messages"} if chat else {}
                    raise from_field_error(error, names) from None
                choices.append(
                    Choice(
                        index,
                        p,
                        request,
                        tokenizer,
                        drop_output=ask.drop_output,
                        keep_all_entries=ask.return_token_ids,
                    )
                )
        return Job(id, ask, prompts, tuple(choices))

    def _sampling(self, ask: Ask, choice: int, vocab_size: int) -> SamplingParams:
        """The tokenizer's end tokens become stop ids; choices get different seeds."""
        sampling = ask.sampling.with_ends(self.tokenizer.eos_ids, vocab_size)
        if sampling.seed is not None and choice:
            seed = (sampling.seed + choice + 2**63) % 2**64 - 2**63
            sampling = replace(sampling, seed=seed)
        return sampling

    async def _prompts(self, ask: Ask) -> tuple[PromptText, ...]:
        if ask.sampling.stop and not self.tokenizer.knows_text:
            raise bad_field("stop", "this model has no tokenizer; give stop_token_ids")
        found: list[PromptText] = []
        for prompt in ask.prompts:
            if isinstance(prompt, str):
                if not self.tokenizer.knows_text:
                    raise bad_field("prompt", "this model has no tokenizer; give token ids")
                found.append(PromptText(prompt, await self._encode(prompt, add_special=True)))
            else:
                text = self.tokenizer.decode(prompt, skip_special=False) if ask.echo else ""
                found.append(PromptText(text, prompt))
        return tuple(found)

    async def _chat(self, ask: Ask) -> PromptText:
        template = self._serving()[1][1]
        if template is None:
            raise bad_field(
                "messages",
                "this model has no chat template; start the server with --chat-template FILE, "
                "or use /v1/completions",
            )

        def render() -> str:
            return template.render(ask.messages, variables=ask.template_variables)

        try:
            text = await self.beside(render)
        except TemplateError as error:
            raise bad_field("messages", str(error), "template_error") from None
        check_text("messages", text)
        return PromptText(text, await self._encode(text, add_special=False))

    async def _encode(self, text: str, add_special: bool) -> tuple[int, ...]:
        tokenizer = self.tokenizer
        if len(text) <= _INLINE_CHARACTERS:
            return tuple(tokenizer.encode(text, add_special))
        return tuple(await self.beside(lambda: tokenizer.encode(text, add_special)))
