"""The rows of one replica's next step while they are being chosen.

Owns how a sequence's next known tokens become a chunk, and how chunks become `core.plan.Chunks`.
Knows nothing of pages or of who may run.
"""

from dataclasses import dataclass, field

import numpy as np

from anabranch.core.plan import NO_INTS, Chunks, Ints, Phase
from anabranch.sched.policy import phase_of_chunk
from anabranch.sched.state import ChunkFlight, Sequence

NO_LOGITS, LAST_LOGITS, ALL_LOGITS = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` known tokens of a sequence from position `start` on; see `core.plan.Chunks`."""

    phase: Phase
    start: int
    count: int
    logits: int
    sample: bool


def chunk_of(seq: Sequence, start: int, room: int, extend_rows: int) -> Chunk:
    """The next chunk of at most `room` rows."""
    assert room > 0, "a chunk needs room for a row"
    if seq.request.score_from is not None:
        return _scoring_chunk(seq, start, room, seq.request.score_from)
    known = len(seq.tokens)
    count = min(room, known - start)
    last = start + count == known
    everywhere = seq.wants_prompt_logprobs
    logits = ALL_LOGITS if everywhere else LAST_LOGITS if last else NO_LOGITS
    phase = phase_of_chunk(start, count, last, everywhere, extend_rows)
    return Chunk(phase, start, count, logits, last)


def _scoring_chunk(seq: Sequence, start: int, room: int, score_from: int) -> Chunk:
    """Prefill up to `score_from`, then one decode row a step; what is out is only recomputed."""
    if start < seq.scored:
        return Chunk(Phase.PREFILL, start, min(room, seq.scored - start), NO_LOGITS, False)
    if start < score_from:
        return Chunk(Phase.PREFILL, start, min(room, score_from - start), ALL_LOGITS, False)
    return Chunk(Phase.DECODE, start, 1, ALL_LOGITS, False)


@dataclass(slots=True)
class ChunkRows:
    """Chunks of one segment, growing."""

    seqs: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    flights: list[ChunkFlight] = field(default_factory=list)
    drawing: list[Sequence] = field(default_factory=list)

    def add(self, seq: Sequence, chunk: Chunk) -> None:
        end = chunk.start + chunk.count
        self.seqs.append(seq)
        self.chunks.append(chunk)
        self.tokens += seq.tokens[chunk.start : end]
        self.flights.append(ChunkFlight(seq, end))
        if chunk.sample:
            self.drawing.append(seq)

    def freeze(self) -> Chunks:
        if not self.chunks:
            return Chunks()
        return Chunks(
            np.array([seq.seat for seq in self.seqs], np.int32),
            np.array([c.start for c in self.chunks], np.int32),
            np.array([c.count for c in self.chunks], np.int32),
            np.array(self.tokens, np.int32),
            np.array([c.logits for c in self.chunks], np.uint8),
            np.array([c.sample for c in self.chunks], np.uint8),
            self._after(),
        )

    def _after(self) -> Ints:
        """The known token after each chunk, where prompt logprobs need it."""
        if not any(seq.wants_prompt_logprobs for seq in self.seqs):
            return NO_INTS
        ends = (c.start + c.count for c in self.chunks)
        pairs = zip(self.seqs, ends, strict=True)
        return np.array([s.tokens[e] if e < len(s.tokens) else -1 for s, e in pairs], np.int32)


@dataclass(slots=True)
class Draft:
    """A replica's part of plan `number`: plain decode rows as arrays, chunks of known tokens.

    room: rows of known tokens that still fit. watched: somebody waits for the token of a decode
    row, on this replica or another. held: the sequence that sits this step out, because
    it will be preempted when its token has arrived.
    """

    number: int
    room: int
    held: Sequence | None = None
    watched: bool = False
    seats: Ints = field(default_factory=lambda: NO_INTS)
    start: Ints = field(default_factory=lambda: NO_INTS)
    prefill: ChunkRows = field(default_factory=ChunkRows)
    extend: ChunkRows = field(default_factory=ChunkRows)

    @property
    def empty(self) -> bool:
        return not (len(self.seats) or self.prefill.chunks or self.extend.chunks)

    def decode_chunks(self) -> Chunks:
        """Plain decode rows, then chunks that run as decode rows."""
        rows = len(self.seats)
        more = self.extend.freeze()
        if not rows:
            return more
        one8, one32 = np.ones(rows, np.uint8), np.ones(rows, np.int32)
        plain = Chunks(self.seats, self.start, one32, -one32, one8, one8)
        return plain if not len(more.seat) else _concatenate(plain, more)


def _concatenate(a: Chunks, b: Chunks) -> Chunks:
    after = NO_INTS
    if len(b.after):
        after = np.concatenate([np.full(len(a.seat), -1, np.int32), b.after])
    return Chunks(
        np.concatenate([a.seat, b.seat]),
        np.concatenate([a.start, b.start]),
        np.concatenate([a.count, b.count]),
        np.concatenate([a.tokens, b.tokens]),
        np.concatenate([a.logits, b.logits]),
        np.concatenate([a.sample, b.sample]),
        after,
    )
