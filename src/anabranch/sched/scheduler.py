"""The one brain of a model copy: which request runs where, and what a step's result leads to.

`submit` and `abort` at any time; `next_step` plans, `apply` takes the results in plan order. Owns
the waiting queue, request ids and the plans under way; seats and pages are replica.py's.
Pure: no clock (time is passed in), no threads, no torch.
"""

from collections import deque
from hashlib import sha256
from heapq import heappop, heappush

from anabranch.core.messages import Output, Stats
from anabranch.core.plan import StepPlan, StepResult
from anabranch.core.request import FieldError, Request
from anabranch.sched.outcome import collect
from anabranch.sched.policy import place
from anabranch.sched.replica import Replica
from anabranch.sched.state import ReplicaFlight, SchedulerConfig, Sequence


class QueueFull(ValueError):
    """As many requests run or wait as may; try again later."""


class Scheduler:
    """First come first served over all replicas; a request keeps its replica unless preempted."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._replicas = [Replica(config, i) for i in range(config.replicas)]
        self._by_id: dict[str, Sequence] = {}
        self._waiting: list[tuple[int, Sequence]] = []  # heap by arrival; may hold ended ones
        self._waiting_count = 0
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._flights: deque[tuple[int, list[ReplicaFlight]]] = deque()
        self._arrivals = 0
        self._number = 0
        self._applied = 0
        self._prompt_tokens = self._generated = self._cached = self._preemptions = 0

    # ---- requests ----

    def submit(self, request: Request, now: float = 0.0) -> None:
        """Queue a request; `now` (seconds) starts its deadline.

        Raises FieldError if it can never run, QueueFull if as many run or wait as may.
        """
        config = self.config
        request.check(config.vocab_size or 2**31, config.max_model_len)
        if request.id in self._by_id:
            raise FieldError("id", f"{request.id!r} is already running")
        if len(request.prompt) > config.capacity:
            raise FieldError(
                "prompt",
                f"has {len(request.prompt)} tokens; the KV cache holds {config.capacity} "
                f"({config.pages} pages of {config.page_size})",
            )
        if len(self._by_id) >= config.places:
            raise QueueFull(f"{len(self._by_id)} requests run or wait already; try again later")
        seq = self._sequence(request)
        self._by_id[request.id] = seq
        self._enqueue(seq)
        if request.deadline is not None:
            heappush(self._deadlines, (now + request.deadline, seq.arrival, seq))

    def abort(self, request_id: str, reason: str = "abort") -> list[Output]:
        """End a request now. Unknown or ended ids give no output: an abort may cross its end."""
        seq = self._by_id.get(request_id)
        if seq is None:
            return []
        cached = seq.cached_tokens
        self._end(seq)
        return [Output(request_id, finish_reason=reason, cached_tokens=cached)]

    def expire(self, now: float) -> list[Output]:
        """End every request whose deadline has passed."""
        outputs: list[Output] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            seq = heappop(self._deadlines)[2]
            if not seq.ended:
                outputs += self.abort(seq.request.id, "timeout")
        return outputs

    @property
    def next_deadline(self) -> float | None:
        """When `expire` may next have something to do."""
        while self._deadlines and self._deadlines[0][2].ended:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    # ---- steps ----

    def next_step(self) -> StepPlan | None:
        """The next plan, or None: nothing to run, or a result must be applied first."""
        if len(self._flights) >= self.config.depth:
            return None
        for replica in self._replicas:
            for seq in replica.plan_decode(self._number, self._applied):
                self._preemptions += 1
                self._enqueue(seq)
        watched = any(len(replica.draft.seats) for replica in self._replicas)
        for replica in self._replicas:
            replica.draft.watched = watched
            replica.plan_filling()
        self._place()
        for replica in self._replicas:
            for seq in replica.plan_bound():
                self._count_seated(seq)
        if all(replica.draft.empty for replica in self._replicas):
            assert self._flights or not self._by_id, f"{len(self._by_id)} requests, none can run"
            return None
        parts = [replica.finish_plan() for replica in self._replicas]
        self._flights.append((self._number, [flight for _, flight in parts]))
        self._number += 1
        return StepPlan(self._number - 1, tuple(plan for plan, _ in parts))

    def apply(self, result: StepResult) -> list[Output]:
        """Take the result of the oldest plan under way."""
        assert self._flights, f"result {result.number} without a plan under way"
        number, flights = self._flights.popleft()
        assert result.number == number, f"result {result.number}, expected {number}"
        self._applied = number + 1
        outputs: list[Output] = []
        for replica, flight, part in zip(self._replicas, flights, result.replicas, strict=True):
            replica.settle(flight)
            for seq, output in collect(flight, part):
                self._generated += len(output.tokens)
                outputs.append(output)
                if output.finish_reason is not None:
                    self._end(seq)
            replica.release_until(self._applied)
        return outputs

    def forget_prefixes(self) -> None:
        """The weights were replaced: the prefix caches are worth nothing."""
        for replica in self._replicas:
            replica.forget_prefixes()

    # ---- what is going on ----

    @property
    def idle(self) -> bool:
        return not self._by_id and not self._flights

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    def stats(self) -> Stats:
        running = tuple(replica.running for replica in self._replicas)
        return Stats(
            running=sum(running),
            waiting=self._waiting_count,
            free_pages=tuple(replica.pool.available for replica in self._replicas),
            total_pages=self.config.pages,
            page_size=self.config.page_size,
            steps=self._number,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated,
            cached_tokens=self._cached,
            preemptions=self._preemptions,
            assigned_tokens=tuple(replica.assigned_tokens for replica in self._replicas),
            running_per_replica=running,
        )

    # ---- inside ----

    def _sequence(self, request: Request) -> Sequence:
        config, sampling = self.config, request.sampling
        self._arrivals += 1
        seed = sampling.seed
        if seed is None:  # a function of the server's seed and the request's number only
            digest = sha256(f"{config.seed}/{self._arrivals}".encode()).digest()
            seed = int.from_bytes(digest[:8], "little", signed=True)
        eos = () if sampling.ignore_eos else config.eos_ids
        limits = [config.max_model_len, config.capacity + 1]
        if request.length_limit is not None:
            limits.append(request.length_limit)
        stops = frozenset(eos) | frozenset(sampling.stop_ids)
        return Sequence(request, self._arrivals, min(limits), seed, stops, list(request.prompt))

    def _enqueue(self, seq: Sequence) -> None:
        heappush(self._waiting, (seq.arrival, seq))
        self._waiting_count += 1

    def _place(self) -> None:
        """Bind waiting requests in arrival order; the first that must wait makes the rest wait."""
        while self._waiting:
            seq = self._waiting[0][1]
            if not seq.ended:
                offers = [o for r in self._replicas if (o := r.candidate(seq)) is not None]
                best = place(offers, self.config.prefill_rows)
                if best is None:
                    return
                self._replicas[best.index].bind(seq, best)
            heappop(self._waiting)

    def _count_seated(self, seq: Sequence) -> None:
        self._waiting_count -= 1
        if seq.admissions == 1:
            seq.cached_tokens = seq.registered * self.config.page_size
            self._prompt_tokens += seq.prompt_len
            self._cached += seq.cached_tokens

    def _end(self, seq: Sequence) -> None:
        del self._by_id[seq.request.id]
        seq.ended = True
        self._waiting_count -= seq.seat < 0
        if seq.replica >= 0:
            self._replicas[seq.replica].end(seq, self._applied)
