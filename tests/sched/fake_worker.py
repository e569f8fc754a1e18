"""A worker without a model, for scheduler tests: its next token is a hash of the whole history.

Page contents are simulated slot by slot, so a wrong token, position, page, order of writes or reuse
of a page changes what is drawn or trips an assertion.
"""

from collections import deque
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from anabranch.core.messages import Output
from anabranch.core.plan import (
    Chunks,
    Join,
    Phase,
    ReplicaPlan,
    ReplicaResult,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from anabranch.core.request import Request
from anabranch.sched import Scheduler, SchedulerConfig

VOCAB = 1003
EOS = 7


def roll(history: int, token: int) -> int:
    return crc32(token.to_bytes(4, "little"), history)


def draw(history: int) -> int:
    return EOS if history % 19 == 0 else history % VOCAB


def alone(request: Request, config: SchedulerConfig) -> tuple[list[int], str]:
    """Tokens and finish reason of a request that nothing disturbs."""
    sampling = request.sampling
    stops = set(sampling.stop_ids) | (set() if sampling.ignore_eos else set(config.eos_ids))
    limit = min(config.max_model_len, config.capacity + 1, request.length_limit or 10**9)
    history = 1
    for token in request.prompt:
        history = roll(history, token)
    tokens: list[int] = []
    while True:
        tokens.append(draw(history))
        if tokens[-1] in stops:
            return tokens, "stop"
        if len(request.prompt) + len(tokens) >= limit:
            return tokens, "length"
        history = roll(history, tokens[-1])


@dataclass
class Seat:
    join: Join
    pages: list[int] = field(default_factory=list)
    last: int | None = None


class FakeReplica:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.seats: dict[int, Seat] = {}
        self.slots: dict[int, tuple[int, int]] = {}  # slot -> (position, rolled history)
        self.used: deque[tuple[int, dict[int, Seat]]] = deque()  # plan -> page -> its user

    def run(self, number: int, plan: ReplicaPlan, applied: int) -> ReplicaResult:
        for seat in plan.leave:
            del self.seats[seat]
        for join in plan.join:
            assert join.seat not in self.seats, f"seat {join.seat} is taken"
            assert 0 <= join.seat < self.config.max_running
            self.seats[join.seat] = Seat(join)
        for seat, pages in plan.pages:
            assert all(0 <= page < self.config.pages for page in pages)
            self.seats[seat].pages += pages
        while self.used and self.used[0][0] < applied:
            self.used.popleft()
        self.step_writes: dict[int, Seat] = {}
        self.step_reads: dict[int, Seat] = {}
        self.users: dict[int, Seat] = {}
        self.result = ReplicaResult(np.zeros(0, np.int32), np.zeros(0, np.int32))
        drawn: list[tuple[int, int]] = []
        for phase in Phase:
            drawn += self._chunks(plan.chunks(phase))
        for slot, writer in self.step_writes.items():
            assert self.step_reads.get(slot, writer) is writer, f"slot {slot} read while written"
        self.used.append((number, self.users))
        seats, tokens = zip(*drawn, strict=True) if drawn else ((), ())
        r = self.result
        return ReplicaResult(
            np.array(seats, np.int32),
            np.array(tokens, np.int32),
            r.logprobs,
            r.prompt_logprobs,
            r.logits,
        )

    def _chunks(self, chunks: Chunks) -> list[tuple[int, int]]:
        drawn = []
        offset = 0
        after = chunks.after if len(chunks.after) else np.full(len(chunks.seat), -1)
        assert len(set(chunks.seat.tolist())) == len(chunks.seat), "a seat twice in a segment"
        for i, seat_id in enumerate(chunks.seat.tolist()):
            seat = self.seats[seat_id]
            count = int(chunks.count[i])
            assert count > 0
            tokens = chunks.tokens[offset : offset + count].tolist()
            offset += count
            if tokens == [-1]:
                assert seat.last is not None, f"seat {seat_id} has drawn nothing in this occupancy"
                tokens = [seat.last]
            assert min(tokens) >= 0
            rolled = self._rows(seat, int(chunks.start[i]), tokens)
            if chunks.logits[i] == 2:
                self._everywhere(seat, int(chunks.start[i]), tokens, rolled, int(after[i]))
            if chunks.sample[i]:
                assert chunks.logits[i] >= 1
                seat.last = draw(rolled[-1])
                drawn.append((seat_id, seat.last))
                if seat.join.sampling.logprobs is not None:
                    self.result.logprobs[seat_id] = TokenLogprobs(seat.last, -1.0, 1, ())
        assert offset == len(chunks.tokens)
        return drawn

    def _rows(self, seat: Seat, start: int, tokens: list[int]) -> list[int]:
        size = self.config.page_size
        slots = [seat.pages[p // size] * size + p % size for p in range(start + len(tokens))]
        for page in seat.pages:
            self.users[page] = seat
        history = 1
        for position, slot in enumerate(slots[:start]):
            held = self.slots[slot]
            assert held[0] == position, f"position {position} finds position {held[0]}"
            self.step_reads[slot] = seat
            history = held[1]
        rolled = []
        for position, token in enumerate(tokens, start):
            slot = slots[position]
            assert slot not in self.step_writes, f"slot {slot} has two writers"
            for number, users in self.used:
                user = users.get(slot // size, seat)
                assert user is seat, f"page {slot // size} is still used by plan {number}"
            history = roll(history, token)
            self.slots[slot] = (position, history)
            self.step_writes[slot] = seat
            rolled.append(history)
        return rolled

    def _everywhere(
        self, seat: Seat, start: int, tokens: list[int], rolled: list[int], after: int
    ) -> None:
        if seat.join.sampling.prompt_logprobs is None:
            piece = np.array(rolled, np.float32).tobytes()
            self.result.logits[seat.join.seat] = (start, piece)
            return
        known = tokens[1:] + ([after] if after >= 0 else [])
        self.result.prompt_logprobs[seat.join.seat] = tuple(
            TokenLogprobs(token, float(start + i), 1, ()) for i, token in enumerate(known)
        )


class FakeWorker:
    """All replicas; runs plans when they are made, gives results when asked."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.replicas = [FakeReplica(config) for _ in range(config.replicas)]
        self.number = 0
        self.applied = 0
        self.results: deque[StepResult] = deque()

    def start(self, plan: StepPlan) -> None:
        assert plan.number == self.number, f"plan {plan.number} after {self.number - 1}"
        self.number += 1
        parts = zip(self.replicas, plan.replicas, strict=True)
        results = tuple(replica.run(plan.number, part, self.applied) for replica, part in parts)
        self.results.append(StepResult(plan.number, results))

    def finish(self) -> StepResult:
        self.applied += 1
        return self.results.popleft()


@dataclass
class Driver:
    """Scheduler and fake worker in lockstep, with everything that came out."""

    config: SchedulerConfig
    scheduler: Scheduler = field(init=False)
    worker: FakeWorker = field(init=False)
    plans: list[StepPlan] = field(default_factory=list)
    outputs: dict[str, list[Output]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config)
        self.worker = FakeWorker(self.config)

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            seen = self.outputs.setdefault(output.id, [])
            assert not seen or seen[-1].finish_reason is None, f"output after the end: {output}"
            seen.append(output)

    def step(self) -> bool:
        """Plan as far ahead as allowed, then apply one result; False when nothing is left."""
        while (plan := self.scheduler.next_step()) is not None:
            self.plans.append(plan)
            self.worker.start(plan)
        if not self.worker.results:
            return False
        self.take(self.scheduler.apply(self.worker.finish()))
        return True

    def drain(self, most: int = 100_000) -> None:
        for _ in range(most):
            if not self.step():
                return
        raise AssertionError(f"not done after {most} steps")

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.tokens]

    def reason(self, request_id: str) -> str | None:
        return self.outputs[request_id][-1].finish_reason
