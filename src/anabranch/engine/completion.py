"""From a request's outputs to what `LLM` returns: text, tokens, reasons, logprobs."""

from dataclasses import dataclass

from anabranch.core.messages import Output
from anabranch.core.plan import TokenLogprobs
from anabranch.core.request import Request
from anabranch.text.stream import TextStream
from anabranch.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Delta:
    """What one step added to a stream; the last has a finish_reason ("stop", "length", ...)."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: str | None = None


@dataclass(frozen=True)
class Completion:
    """A finished request.

    text: of the generated tokens, without special tokens, ended before a stop string; "" for a
    checkpoint without a tokenizer. tokens: every id that was drawn, an end token too.
    prompt: its token ids. logprobs: one per token if asked. prompt_logprobs: of prompt[1:], if
    asked.
    cached_tokens: prompt tokens served by the prefix cache.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    prompt: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    cached_tokens: int = 0


class Collector:
    """Outputs of one request in, deltas out; `result` when `finish_reason` is set.

    After a stop string was found `stopped` is true: the engine should abort the request, and what
    still comes is ignored.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.finish_reason: str | None = None
        self.stopped = False
        sampling = request.sampling
        self._text = (
            None
            if tokenizer is None
            else TextStream(tokenizer, sampling.stop, stops_after=sampling.min_tokens)
        )
        self._parts: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self._cached = 0

    def take(self, output: Output) -> Delta:
        """ValueError if the engine refused the request."""
        if output.finish_reason == "error":
            raise ValueError(output.error or "the engine refused the request")
        if self.finish_reason is not None:
            return Delta("", ())
        self._cached = max(self._cached, output.cached_tokens)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs
        self._logprobs += output.logprobs
        text, count = self._push(output.tokens)
        self._tokens += output.tokens[:count]
        self.finish_reason = "stop" if self.stopped else output.finish_reason
        if self.finish_reason is not None and self._text is not None and not self.stopped:
            text += self._text.finish()
        self._parts.append(text)
        return Delta(text, output.tokens[:count], self.finish_reason)

    def result(self) -> Completion:
        assert self.finish_reason is not None, "the request has not ended"
        return Completion(
            "".join(self._parts),
            tuple(self._tokens),
            self.finish_reason,
            self.request.prompt,
            tuple(self._logprobs[: len(self._tokens)]),
            self._prompt_logprobs,
            self._cached,
        )

    def _push(self, tokens: tuple[int, ...]) -> tuple[str, int]:
        """Text of `tokens` and how many of them count, if a stop string ends them early."""
        if self._text is None:
            return "", len(tokens)
        text = ""
        for count, token in enumerate(tokens, 1):
            text += self._text.push(token)
            if self._text.stop is not None:
                self.stopped = True
                return text, count
        return text, len(tokens)
