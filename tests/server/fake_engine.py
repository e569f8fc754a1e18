"""An engine that answers with set words: deterministic, no model, the client's seam exactly."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from math import exp, log

from anabranch.core.messages import Output, Ready, Stats
from anabranch.core.plan import TokenLogprobs
from anabranch.core.request import Request
from anabranch.text.tokenizer import Tokenizer

REPLY = (
    "the quick brown fox — naïve café 🦙🎉 jumps over a lazy dog END of text and more words here"
)
PAGES = 1000


class FakeEngine:
    """Replies with REPLY's tokens, begun at a token chosen by the seed, then an end token.

    step_s: seconds between tokens. A prompt that holds the token of "~" makes it fail for good,
    one with "^" makes that request alone fail, one with "|" never gets an answer.
    """

    def __init__(self, tokenizer: Tokenizer, step_s: float = 0.0, max_model_len: int = 512) -> None:
        self.tokenizer = tokenizer
        self.step_s = step_s
        self.ready: Ready | None = None
        self.failure: str | None = None
        self.stopped = asyncio.Event()
        self.running: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.seen: set[str] = set()
        self.max_model_len = max_model_len
        self._reply = tokenizer.encode(REPLY, False)
        self._fatal, self._bad, self._mute = (tokenizer.encode(c, False)[0] for c in "~^|")

    async def wait_ready(self) -> None:
        await asyncio.sleep(self.step_s)
        self.ready = Ready(self.tokenizer.vocab_size, self.max_model_len, self.tokenizer.eos_ids,
                           '{"layout": {"tp": 1}}')  # fmt: skip

    def healthy(self) -> bool:
        return self.failure is None

    async def shutdown(self, drain_s: float) -> None:
        self.stopped.set()

    async def abort(self, id: str) -> None:
        self.aborted.add(id)
        self.running.pop(id, None)

    async def stats(self) -> Stats:
        return Stats(len(self.running), 0, (PAGES - len(self.running),), PAGES, 64, 1, 2, 3, 4, 5)

    def reply(self, request: Request) -> list[int]:
        begin = (request.sampling.seed or 0) % len(self._reply)
        return self._reply[begin:] + self._reply[:begin]

    async def submit(self, request: Request) -> AsyncIterator[Output]:
        self.running[request.id] = request
        try:
            if self._fatal in request.prompt:
                self.failure = "a rank died"
            if self._mute in request.prompt:
                await asyncio.Event().wait()
            if self._bad in request.prompt:
                yield Output(request.id, finish_reason="error", error="this request is cursed")
                return
            async for output in self._outputs(request):
                yield output
        finally:
            self.running.pop(request.id, None)

    async def _outputs(self, request: Request) -> AsyncIterator[Output]:
        sampling = request.sampling
        most = min(sampling.max_tokens or 10**9, self.max_model_len - len(request.prompt))
        tokens = self.reply(request)
        if sampling.ignore_eos:
            stream = itertools.islice(itertools.cycle(tokens), most)
        else:
            stream = itertools.islice([*tokens, self.tokenizer.eos_ids[0]], most)
        cached = len(request.prompt) - 1 if request.prompt in self.seen else 0
        self.seen.add(request.prompt)
        for count, token in enumerate(stream, 1):
            await asyncio.sleep(self.step_s)
            if self.failure is not None:
                raise ConnectionError(self.failure)
            ended = token in sampling.stop_ids and count > sampling.min_tokens
            reason = "stop" if ended else "length" if count == most else None
            prompt = sampling.prompt_logprobs if count == 1 else None
            yield Output(
                request.id,
                (token,),
                () if sampling.logprobs is None else (self.logprobs(token, sampling.logprobs),),
                None if prompt is None
                else tuple(self.logprobs(t, prompt) for t in request.prompt[1:]),
                reason,
                token if ended else None,
                cached,
            )  # fmt: skip
            if reason is not None:
                return

    def logprobs(self, token: int, count: int) -> TokenLogprobs:
        """A made-up distribution: the token first at 0.5, the next ids at 0.1."""
        size = self.tokenizer.vocab_size
        top = [(token, log(0.5))] + [((token + i) % size, log(0.1 * exp(-i))) for i in range(1, 21)]
        return TokenLogprobs(token, log(0.5), 1, tuple(top[:count]))
