"""The three objects of a step: `StepPlan` goes down, `StepResult` comes up. Frozen, one maker each.

A plan says, for every attention-DP replica of a model copy, which rows run in this step. It is a
numbered delta against the state every rank keeps (seats, page tables, last tokens): a gap in the
numbers is fatal. All integers are numpy arrays so that a plan of 4096 rows is cheap to make and to
send. Made by `sched`, read by `worker`; knows nothing of ranks, torch or sockets.
"""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from anabranch.core.request import SamplingParams

# spelled out: from NumPy 2.5 on, NDArray's alias hides the dtype from the wire's codec
Ints = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
NO_INTS: Ints = np.zeros(0, np.int32)


class Phase(StrEnum):
    """A choice of layout for rows, not a request's state: a short extend may run as decode rows."""

    PREFILL = "prefill"
    DECODE = "decode"


class Logits(StrEnum):
    """Which rows of a chunk need logits."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


@dataclass(frozen=True)
class Join:
    """A request takes a seat (an index below max_running, per replica) and keeps it until it
    leaves.

    prompt_len: tokens of the user's prompt (min_tokens and seeds count from there). A request that
    was preempted joins again with its generated tokens as part of what is recomputed.
    generated: tokens already generated before this join.
    stop_ids: every id that ends the request (masked while fewer than min_tokens are generated).
    """

    seat: int
    sampling: SamplingParams
    prompt_len: int
    generated: int = 0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Chunks:
    """Rows of one segment on one replica: chunk i is `count[i]` consecutive positions of a seat.

    seat, start, count: int32 [n]; positions of chunk i are start[i] .. start[i] + count[i] - 1.
    tokens: int32 [sum of count]; -1 means: the seat's last sampled token, from the token table.
    logits: per chunk, which rows need logits (uint8 [n]: 0 none, 1 last row, 2 all rows).
    sample: uint8 [n]: 1 if a token is drawn from the chunk's last row and kept in the token table.
    after: int32 [n]: the known id that follows the chunk's last row, or -1; empty stands for all
    -1.
        Given where prompt logprobs are wanted, so that a chunk's last position has one too.
    """

    seat: Ints = field(default_factory=lambda: NO_INTS)
    start: Ints = field(default_factory=lambda: NO_INTS)
    count: Ints = field(default_factory=lambda: NO_INTS)
    tokens: Ints = field(default_factory=lambda: NO_INTS)
    logits: Bytes = field(default_factory=lambda: np.zeros(0, np.uint8))
    sample: Bytes = field(default_factory=lambda: np.zeros(0, np.uint8))
    after: Ints = field(default_factory=lambda: NO_INTS)

    @property
    def rows(self) -> int:
        return int(self.count.sum())

    @property
    def logit_rows(self) -> Ints:
        """Indices (into the chunk rows, in order) of the rows that need logits."""
        ends = np.cumsum(self.count)
        keep = np.zeros(int(ends[-1]) if len(ends) else 0, bool)
        keep[ends[self.logits == 1] - 1] = True
        for i in np.flatnonzero(self.logits == 2):
            keep[ends[i] - self.count[i] : ends[i]] = True
        return np.flatnonzero(keep).astype(np.int32)


@dataclass(frozen=True)
class ReplicaPlan:
    """One replica's part of a step. Applied in this order: leave, join, pages, copies, rows.

    pages: (seat, page ids appended to its page table), in order; a seat that joins starts empty
        and gets its prefix-cache hit pages this way too.
    copies: (source page, destination page) to copy before the step's rows run (partial pages of
    forks).
    """

    leave: tuple[int, ...] = ()
    join: tuple[Join, ...] = ()
    pages: tuple[tuple[int, tuple[int, ...]], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    prefill: Chunks = field(default_factory=Chunks)
    decode: Chunks = field(default_factory=Chunks)

    def chunks(self, phase: Phase) -> Chunks:
        return self.prefill if phase is Phase.PREFILL else self.decode

    @property
    def rows(self) -> int:
        return self.prefill.rows + self.decode.rows


@dataclass(frozen=True)
class StepPlan:
    """One step of all replicas. `number` counts from 0 without gaps."""

    number: int
    replicas: tuple[ReplicaPlan, ...]


@dataclass(frozen=True)
class TokenLogprobs:
    """Logprobs (natural log, unmodified distribution) of one position.

    token: the id whose logprob is `logprob` (drawn, or the given next token of a prompt);
    top: the most likely (id, logprob), best first; rank: 1 + number of ids more likely than token.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


NOT_A_TOKEN = -1


@dataclass(frozen=True)
class ReplicaResult:
    """What a replica's step produced.

    seat, token: the seats that drew a token, in plan order (prefill chunks before decode chunks);
    NOT_A_TOKEN where the logits were no numbers.
    logprobs: seat -> logprobs of the drawn token, for seats that asked.
    prompt_logprobs: seat -> one entry per position of this step's chunk whose *next* token is
    known.
    logits: seat -> (first position, float32 [rows, vocab] as bytes) for scoring requests.
    """

    seat: Ints
    token: Ints
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    logits: dict[int, tuple[int, bytes]] = field(default_factory=dict)


@dataclass(frozen=True)
class StepResult:
    number: int
    replicas: tuple[ReplicaResult, ...]
