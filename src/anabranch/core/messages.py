"""Messages between the front (HTTP, text) and the brain, and from the brain back.

Plain frozen dataclasses of numbers, strings and tuples, so that `wire` can carry them as msgpack.
"""

from dataclasses import dataclass, field

from anabranch.core.plan import TokenLogprobs
from anabranch.core.request import Request


@dataclass(frozen=True)
class Submit:
    """Start a request. The brain answers with `Output`s for its id, the last of them finished."""

    request: Request


@dataclass(frozen=True)
class Abort:
    """Stop a request at once; an `Output` with finish_reason "abort" follows if it was running."""

    id: str


@dataclass(frozen=True)
class StatsQuery:
    """Ask for a `Stats` message."""


@dataclass(frozen=True)
class Shutdown:
    """End the engine; `drain` seconds are given to running requests first."""

    drain: float = 0.0


@dataclass(frozen=True)
class Output:
    """New tokens of one request, in order.

    tokens: ids drawn since the last Output. logprobs: one per token if asked.
    prompt_logprobs: set once, with the first token, if asked: entries for prompt positions
    1..len-1.
    finish_reason: None while running; then "stop", "length", "abort", "timeout" or "error".
    stop_token: the id that ended it when finish_reason is "stop" (it is part of `tokens`).
    cached_tokens: prompt tokens served by the prefix cache (known from the first Output on).
    error: message when finish_reason is "error".
    logits: for scoring requests, (first position, float32 [rows, vocab] as bytes) pieces.
    """

    id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_token: int | None = None
    cached_tokens: int = 0
    error: str | None = None
    logits: tuple[tuple[int, bytes], ...] = ()


@dataclass(frozen=True)
class Stats:
    """Counters and gauges of the brain, for /metrics, /health and tests."""

    running: int
    waiting: int
    free_pages: tuple[int, ...]
    total_pages: int
    page_size: int
    steps: int
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    preemptions: int
    assigned_tokens: tuple[int, ...] = ()
    running_per_replica: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ready:
    """The model is loaded on every rank and steps can run. `info` is /server_info's content as
    JSON.
    """

    vocab_size: int
    max_model_len: int
    eos_ids: tuple[int, ...]
    info: str = "{}"


@dataclass(frozen=True)
class Fatal:
    """The engine ends: a rank died, a step failed, or start-up was refused."""

    message: str
    detail: dict[str, str] = field(default_factory=dict)
