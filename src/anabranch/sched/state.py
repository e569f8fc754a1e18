"""What the scheduler remembers of a request, and of a step that is under way.

Plain records. `Sequence.tokens` are known, kept tokens only; what is planned but not yet applied is
counted in the seat arrays of replica.py.
"""

from dataclasses import dataclass, field, replace

from anabranch.core.plan import Ints, Join, TokenLogprobs
from anabranch.core.request import Request


@dataclass(frozen=True)
class SchedulerConfig:
    """Sizes of one model copy.

    replicas, pages, max_running: attention-DP replicas (R), and KV pages and seats of each.
    prefill_rows: token budget of a step per replica; decode rows come first, see
        policy.prefill_share.
    extend_rows: a prompt's last chunk of at most this many rows, over a prefix at least 8 times as
        long, runs in the decode segment with several rows per request; 0 never does that.
    reach: cached positions with which a row costs twice what it costs alone; while others decode,
        later chunks of a long prompt are shorter, so that their steps take no longer. None: never.
    depth: plans that may be under way at once (1: plan, run, apply in turn; 2: CUDA).
    vocab_size: None skips the check of token ids (tests).
    """

    pages: int
    replicas: int = 1
    page_size: int = 64
    max_running: int = 128
    max_waiting: int = 1024
    prefill_rows: int = 1024
    max_model_len: int = 4096
    vocab_size: int | None = None
    eos_ids: tuple[int, ...] = ()
    prefix_cache: bool = True
    extend_rows: int = 8
    reach: int | None = None
    depth: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("pages", "replicas", "page_size", "max_running", "prefill_rows", "depth"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def capacity(self) -> int:
        """Cached positions a replica can hold, and so the most one request can use."""
        return self.pages * self.page_size

    @property
    def places(self) -> int:
        """Requests that may run or wait."""
        return self.max_running * self.replicas + self.max_waiting


@dataclass(slots=True, eq=False)
class Sequence:
    """A request from submission to its last output.

    arrival: submission order. limit: total tokens at which it ends with "length".
    replica: where it is bound, or -1; need, uncached: pages and tokens that it was bound for.
    seat: -1 until it has one. pages: page table, in order; the first `registered` of them are in
    the prefix cache.
    computed: leading positions whose KV is written by applied steps.
    scored: for scoring; leading positions whose logits went out.
    hashable: False once its KV no longer matches its tokens (weights were replaced under it).
    """

    request: Request
    arrival: int
    limit: int
    seed: int
    stop_ids: frozenset[int]
    tokens: list[int]
    replica: int = -1
    seat: int = -1
    need: int = 0
    uncached: int = 0
    pages: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    registered: int = 0
    computed: int = 0
    cached_tokens: int = 0
    admissions: int = 0
    scored: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    hashable: bool = True
    ended: bool = False

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def scoring(self) -> bool:
        return self.request.score_from is not None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Prompt positions must all be computed here and now: until its first token is out."""
        return (
            self.request.sampling.prompt_logprobs is not None
            and len(self.tokens) == self.prompt_len
        )

    def join(self) -> Join:
        """What the workers are told when it takes its seat."""
        sampling = self.request.sampling
        if self.scoring:
            sampling = replace(sampling, prompt_logprobs=None, logprobs=None)
        generated = len(self.tokens) - self.prompt_len
        stops = tuple(sorted(self.stop_ids))
        return Join(self.seat, sampling, self.prompt_len, generated, self.seed, stops)

    def restart(self) -> None:
        """Preempted: everything computed is given up, everything known is kept."""
        self.replica = self.seat = -1
        self.computed = self.registered = 0
        self.hashable = True
        self.prompt_logprobs.clear()


@dataclass(frozen=True, slots=True)
class ChunkFlight:
    """A planned chunk of known tokens: when it is applied, `end` leading positions are computed."""

    seq: Sequence
    end: int


@dataclass(frozen=True, slots=True)
class ReplicaFlight:
    """One replica's part of a step under way, in terms of sequences.

    seats, drawing: who draws a token, in plan order. decode: the sequences of plain decode rows
    (each computes one position). chunks: the chunks of known tokens.
    """

    seats: Ints
    drawing: list[Sequence]
    decode: list[Sequence]
    chunks: list[ChunkFlight]
