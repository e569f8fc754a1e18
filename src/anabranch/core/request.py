"""What a user asks for: sampling parameters, a request, and the one check of both.

Owns the meaning and limits of every request field. `SamplingParams.check` is called by the front
(to answer 400) and again by the brain, so no endpoint can forget it. Knows nothing of HTTP or
tensors.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from math import isfinite

MAX_TOKENS_LIMIT = 2**31 - 1
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024


class FieldError(ValueError):
    """A request field has a value that cannot be served; `field` names it."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.field = name


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    temperature: 0 is greedy; logits are divided by it otherwise. In [0, 100].
    top_k: keep the k most likely tokens; 0 keeps all.
    top_p: keep the smallest set of tokens whose probability reaches top_p. In (0, 1].
    min_p: drop tokens less likely than min_p times the most likely. In [0, 1].
    seed: random numbers are a function of (seed, position); None draws one at submission.
    max_tokens: most tokens to generate; None means up to the context length.
    min_tokens: stop ids and eos cannot be drawn before this many tokens.
    stop: strings that end the text (found by the detokenizer). stop_ids: token ids that end it.
    ignore_eos: the model's own end tokens do not stop the request.
    logprobs: number of top alternatives reported per generated token; None reports none.
    prompt_logprobs: the same for prompt tokens.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def with_ends(self, ends: Iterable[int], vocab_size: int) -> "SamplingParams":
        """The tokenizer's end ids become stop ids, but for those past the model's vocabulary: they
        are never drawn. Unchanged with `ignore_eos`.
        """
        if self.ignore_eos:
            return self
        possible = (end for end in ends if 0 <= end < vocab_size)
        return replace(self, stop_ids=tuple(dict.fromkeys((*self.stop_ids, *possible))))

    def check(self, vocab_size: int | None = None) -> "SamplingParams":
        """Return self, or raise FieldError naming the first field that cannot be served."""
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise FieldError("top_p", "must be above 0 and at most 1, got 0")
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, MAX_TOKENS_LIMIT)
        _integer("min_tokens", self.min_tokens, 0, MAX_TOKENS_LIMIT)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise FieldError(
                "min_tokens", f"{self.min_tokens} is above max_tokens {self.max_tokens}"
            )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None:
                _integer(name, count, 0, MAX_LOGPROBS)
        self._check_stops(vocab_size)
        if not isinstance(self.ignore_eos, bool):
            raise FieldError("ignore_eos", f"must be true or false, got {self.ignore_eos!r}")
        return self

    def _check_stops(self, vocab_size: int | None) -> None:
        if len(self.stop) > MAX_STOPS:
            raise FieldError("stop", f"at most {MAX_STOPS} strings, got {len(self.stop)}")
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_LENGTH:
                raise FieldError(
                    "stop", f"each must be a string of 1 to {MAX_STOP_LENGTH} characters"
                )
        if len(self.stop_ids) > 256:
            raise FieldError("stop_token_ids", f"at most 256 ids, got {len(self.stop_ids)}")
        for token in self.stop_ids:
            _integer("stop_token_ids", token, 0, (vocab_size or 2**31) - 1)


@dataclass(frozen=True)
class Request:
    """One sequence to generate: prompt token ids and how to sample. `n` choices are n requests.

    deadline: seconds from submission after which the request is aborted; None means never.
    score_from: teacher forcing (`LLM.score`): ids are all given, logits of every position are
        returned; the first `score_from` run as prefill, the rest one by one as decode steps.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    deadline: float | None = None
    score_from: int | None = None

    def check(self, vocab_size: int, max_model_len: int) -> "Request":
        """Return self, or raise FieldError naming the field; lengths are in tokens."""
        if not self.prompt:
            raise FieldError("prompt", "is empty; give at least one token")
        for token in (min(self.prompt), max(self.prompt)):
            if not 0 <= token < vocab_size:
                known = f"the vocabulary has ids 0 to {vocab_size - 1}"
                raise FieldError("prompt", f"{known}, got {token}")
        room = 0 if self.score_from is not None else 1
        if len(self.prompt) + room > max_model_len:
            raise FieldError(
                "prompt",
                f"has {len(self.prompt)} tokens; the context length is {max_model_len} tokens, "
                f"so at most {max_model_len - room} fit",
            )
        if self.deadline is not None:
            _number("timeout", self.deadline, 0.0, 1e9)
        if self.score_from is not None:
            _integer("score_from", self.score_from, 1, len(self.prompt))
        self.sampling.check(vocab_size)
        return self

    @property
    def length_limit(self) -> int | None:
        """Most tokens prompt and output may have together, or None."""
        limit = self.sampling.max_tokens
        return None if limit is None else len(self.prompt) + limit


def _number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise FieldError(name, f"must be a number, got {value!r}")
    if not isfinite(value) or not low <= value <= high:
        raise FieldError(name, f"must be between {low:g} and {high:g}, got {value}")


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise FieldError(name, f"must be an integer, got {value!r}")
    if not low <= value <= high:
        raise FieldError(name, f"must be between {low} and {high}, got {value}")


SAMPLING_FIELDS = tuple(f.name for f in fields(SamplingParams))
