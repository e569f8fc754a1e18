"""One attention-DP replica: its seats, pages and prefix cache, and its part of the next step.

The decode batch lives in numpy arrays indexed by seat, so that planning thousands of rows costs a
few array operations; sequences with known tokens left to compute (`filling`) are handled one by
one. Invariant of a decoding seat: its last token is drawn (or being drawn) by the worker in this
occupancy of the seat, and `start` is that token's position. Knows nothing of other replicas.
"""

from bisect import insort
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from anabranch.core.plan import Ints, Join, Phase, ReplicaPlan
from anabranch.sched.draft import Draft, chunk_of
from anabranch.sched.pages import PagePool
from anabranch.sched.policy import Candidate, growth_reserve, prefill_share, rows_at
from anabranch.sched.prefix import PrefixCache, extend_hashes
from anabranch.sched.state import ReplicaFlight, SchedulerConfig, Sequence


class Replica:
    """State of one replica. `plan_*` build the next plan; `settle` and `end` follow results."""

    def __init__(self, config: SchedulerConfig, index: int) -> None:
        self.config = config
        self.index = index
        self.prefix = PrefixCache()
        self.pool = PagePool(config.pages, self.prefix.forget)
        seats = config.max_running
        self.seated: list[Sequence | None] = [None] * seats
        self.bound: list[Sequence] = []
        self.filling: list[Sequence] = []
        self.assigned_tokens = 0
        self._free_seats = list(range(seats))
        heapify(self._free_seats)
        self._start: Ints = np.zeros(seats, np.int32)
        self._capacity: Ints = np.zeros(seats, np.int32)
        self._limit: Ints = np.zeros(seats, np.int32)
        self._arrival: NDArray[np.int64] = np.zeros(seats, np.int64)
        self._last_plan: NDArray[np.int64] = np.full(seats, -1, np.int64)
        self._decoding: NDArray[np.bool_] = np.zeros(seats, np.bool_)
        self._short = False
        self._coming: dict[bytes, Sequence] = {}
        self._leave: list[int] = []
        self._join: list[Join] = []
        self._pages: list[tuple[int, tuple[int, ...]]] = []
        self._deferred: list[tuple[int, list[int]]] = []
        self.draft = Draft(-1, 0)

    @property
    def running(self) -> int:
        return self.config.max_running - len(self._free_seats)

    @property
    def queued(self) -> int:
        """Known tokens that will have to be computed here and are not planned yet."""
        seated = sum(len(seq.tokens) - int(self._start[seq.seat]) for seq in self.filling)
        return seated + sum(seq.uncached for seq in self.bound)

    # ---- planning ----

    def plan_decode(self, number: int, applied: int) -> list[Sequence]:
        """Begin plan `number` with a row for every decoding seat; return who had to be preempted.

        applied: number of the first plan whose result is not applied yet.
        """
        ready = np.flatnonzero(self._decoding & (self._start + 1 < self._limit))
        needy = ready[self._start[ready] >= self._capacity[ready]]
        preempted: list[Sequence] = []
        held = None
        self._short = len(needy) > self.pool.available
        if self._short:
            preempted, held = self._relieve(needy, applied)
            ready, needy = self._affordable(ready, held)
        for seat in needy.tolist():
            self._grow(seat)
        draft = Draft(number, prefill_share(self.config.prefill_rows, len(ready)), held)
        draft.seats = ready.astype(np.int32)
        draft.start = self._start[ready]
        self._start[ready] += 1
        self._last_plan[ready] = number
        self.draft = draft
        return preempted

    def plan_filling(self) -> None:
        """Chunks for the sequences already seated, first come first served."""
        for seq in list(self.filling):
            if self.draft.room <= 0:
                return
            if seq is not self.draft.held:
                self._plan_chunk(seq)

    def candidate(self, seq: Sequence) -> Candidate | None:
        """What running `seq` here would cost, or None if there is no seat or no memory for it."""
        if self._short or len(self.bound) >= len(self._free_seats):
            return None
        hits = self._match(seq)
        need = self._need(seq, hits)
        busy = self.running + len(self.bound)
        reserve = growth_reserve(busy, self.config.page_size) if busy else 0
        available = self.pool.available - sum(other.need for other in self.bound)
        if need + reserve > available:
            return None
        uncached = len(seq.tokens) - len(hits) * self.config.page_size
        return Candidate(self.index, self.queued, uncached, busy, available, need)

    def bind(self, seq: Sequence, offer: Candidate) -> None:
        """`seq` will run here; it takes a seat when rows are to be had."""
        seq.replica, seq.need, seq.uncached = self.index, offer.need, offer.uncached
        insort(self.bound, seq, key=lambda s: s.arrival)

    def plan_bound(self) -> list[Sequence]:
        """Seat bound sequences while there is room, with a chunk each; return them.

        One whose next page is just being computed by another waits for it, and hits it then.
        """
        seated: list[Sequence] = []
        for seq in list(self.bound):
            if self.draft.room <= 0 or self._short or not self._free_seats:
                break
            hits = self._match(seq)
            if self._comes(seq, len(hits)):
                continue
            if self._need(seq, hits) > self.pool.available:
                break
            self.bound.remove(seq)
            self._admit(seq, hits)
            seated.append(seq)
        return seated

    def _admit(self, seq: Sequence, hits: list[int]) -> None:
        """Give `seq` a seat, pages for all its known tokens, and a chunk."""
        size = self.config.page_size
        self.pool.share(hits)
        seq.pages = hits + self.pool.allocate(self._pages_for(len(seq.tokens)) - len(hits))
        seat = heappop(self._free_seats)
        seq.seat = seat
        seq.computed, seq.registered = len(hits) * size, len(hits)
        seq.admissions += 1
        self.seated[seat] = seq
        insort(self.filling, seq, key=lambda s: s.arrival)
        self._start[seat] = seq.computed
        self._capacity[seat] = len(seq.pages) * size
        self._limit[seat] = seq.limit
        self._arrival[seat] = seq.arrival
        self._last_plan[seat] = -1
        self._decoding[seat] = False
        self._join.append(seq.join())
        self._pages.append((seat, tuple(seq.pages)))
        self.assigned_tokens += len(seq.tokens) - seq.computed
        if self._caches(seq):
            full = len(seq.tokens) // size
            extend_hashes(seq.hashes, seq.tokens, full, size)
            for digest in seq.hashes[len(hits) : full]:
                self._coming.setdefault(digest, seq)
        self._plan_chunk(seq)

    def finish_plan(self) -> tuple[ReplicaPlan, ReplicaFlight]:
        """The plan of this replica, and what to do when its result arrives."""
        draft = self.draft
        plan = ReplicaPlan(
            tuple(self._leave),
            tuple(self._join),
            tuple(self._pages),
            (),
            draft.prefill.freeze(),
            draft.decode_chunks(),
        )
        self._leave, self._join, self._pages = [], [], []
        decode = [seq for s in draft.seats.tolist() if (seq := self.seated[s]) is not None]
        assert len(decode) == len(draft.seats), "a seat without a sequence was planned"
        drawing = draft.prefill.drawing + decode + draft.extend.drawing
        seats = np.fromiter((seq.seat for seq in drawing), np.int32, len(drawing))
        flight = ReplicaFlight(seats, drawing, decode, draft.prefill.flights + draft.extend.flights)
        return plan, flight

    def _plan_chunk(self, seq: Sequence) -> None:
        start = int(self._start[seq.seat])
        room = rows_at(self.draft.room, start, self.config.reach if self.draft.watched else None)
        chunk = chunk_of(seq, start, room, self.config.extend_rows)
        rows = self.draft.prefill if chunk.phase is Phase.PREFILL else self.draft.extend
        end = start + chunk.count
        rows.add(seq, chunk)
        self.draft.room -= chunk.count * self.draft.room // room
        self._start[seq.seat] = end
        self._last_plan[seq.seat] = self.draft.number
        if end == len(seq.tokens):
            self.filling.remove(seq)
            self._decoding[seq.seat] = chunk.sample

    def _grow(self, seat: int) -> None:
        seq = self.seated[seat]
        assert seq is not None, f"seat {seat} decodes but is empty"
        pages = self.pool.allocate(1)
        seq.pages += pages
        self._capacity[seat] += self.config.page_size
        self._pages.append((seat, tuple(pages)))

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.config.page_size)

    def _need(self, seq: Sequence, hits: list[int]) -> int:
        """Pages that seating `seq` takes out of those available."""
        return self._pages_for(len(seq.tokens)) - len(hits) + self.pool.idle_among(hits)

    def _caches(self, seq: Sequence) -> bool:
        return self.config.prefix_cache and seq.hashable

    def _comes(self, seq: Sequence, hits: int) -> bool:
        """The page after its hits is in the making, by a sequence that has a seat."""
        wanted = (len(seq.tokens) - 1) // self.config.page_size
        return hits < min(wanted, len(seq.hashes)) and seq.hashes[hits] in self._coming

    def _match(self, seq: Sequence) -> list[int]:
        """Pages of the longest usable hit: at least one known token is left to compute."""
        if not self._caches(seq) or seq.scoring or seq.wants_prompt_logprobs:
            return []
        pages = (len(seq.tokens) - 1) // self.config.page_size
        extend_hashes(seq.hashes, seq.tokens, pages, self.config.page_size)
        return self.prefix.match(seq.hashes[:pages])

    # ---- shortage of pages ----

    def _relieve(
        self, needy: NDArray[np.intp], applied: int
    ) -> tuple[list[Sequence], Sequence | None]:
        """Preempt the latest arrivals until the other needy seats fit.

        Nothing is preempted while pages are about to come free, nor a sequence whose token is
        under way: that one is returned as held, sits this step out and is judged again next time.
        """
        preempted: list[Sequence] = []
        while not self._deferred:
            left = [s for s in needy.tolist() if self.seated[s] is not None]
            if len(left) <= self.pool.available:
                break
            victim = max((s for s in self.seated if s is not None), key=lambda s: s.arrival)
            if self._last_plan[victim.seat] >= applied:
                return preempted, victim
            self._vacate(victim, applied)
            victim.restart()
            preempted.append(victim)
        return preempted, None

    def _affordable(
        self, ready: NDArray[np.intp], held: Sequence | None
    ) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Of `ready`, the seats still decoding, the needy ones cut to the pages there are."""
        ready = ready[self._decoding[ready]]
        if held is not None:
            ready = ready[ready != held.seat]
        needy = ready[self._start[ready] >= self._capacity[ready]]
        needy = needy[np.argsort(self._arrival[needy])]
        unmet = needy[self.pool.available :]
        return ready[~np.isin(ready, unmet)], needy[: self.pool.available]

    # ---- results ----

    def settle(self, flight: ReplicaFlight) -> None:
        """The step ran: positions are computed, pages that became full enter the prefix cache."""
        size = self.config.page_size
        for chunk in flight.chunks:
            if not chunk.seq.ended:
                chunk.seq.computed = chunk.end
                self._register(chunk.seq)
        for seq in flight.decode:
            if not seq.ended:
                seq.computed += 1
                if seq.computed % size == 0:
                    self._register(seq)

    def _register(self, seq: Sequence) -> None:
        if not self._caches(seq):
            return
        full = seq.computed // self.config.page_size
        extend_hashes(seq.hashes, seq.tokens, full, self.config.page_size)
        for i in range(seq.registered, full):
            if self.prefix.insert(seq.hashes[i], seq.pages[i]):
                self.pool.keep(seq.pages[i])
            self._came(seq, seq.hashes[i])
        seq.registered = max(seq.registered, full)

    def _came(self, seq: Sequence, digest: bytes) -> None:
        if self._coming.get(digest) is seq:
            del self._coming[digest]

    def end(self, seq: Sequence, applied: int) -> None:
        """The sequence leaves for good, with the next plan if it has a seat."""
        seq.ended = True
        if seq.seat < 0:
            self.bound.remove(seq)
        else:
            self._vacate(seq, applied)

    def release_until(self, applied: int) -> None:
        """Free what ended sequences held, once no step under way can still write to it."""
        ready = [pages for last, pages in self._deferred if last < applied]
        self._deferred = [(last, pages) for last, pages in self._deferred if last >= applied]
        for pages in ready:
            self.pool.release(pages)

    def forget_prefixes(self) -> None:
        """The weights changed: nothing cached may be hit, nothing half computed may be cached."""
        self.pool.drop_kept()
        self.prefix.clear()
        self._coming.clear()
        for seq in self.seated:
            if seq is not None:
                seq.hashable = False

    def _vacate(self, seq: Sequence, applied: int) -> None:
        seat = seq.seat
        if seq in self.filling:
            self.filling.remove(seq)
        for digest in seq.hashes[seq.registered :]:
            self._came(seq, digest)
        self.seated[seat] = None
        self._decoding[seat] = False
        heappush(self._free_seats, seat)
        assert not self._join and not self._pages, (
            "who joins or grows has a row, so a plan went out"
        )
        self._leave.append(seat)
        if self._last_plan[seat] >= applied:
            self._deferred.append((int(self._last_plan[seat]), seq.pages))
        else:
            self.pool.release(seq.pages)
        seq.pages = []
