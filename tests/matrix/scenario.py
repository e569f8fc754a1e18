"""One cell's trial: requests that arrive and leave at random, through the real scheduler.

Parts, in turn, on one engine: a mix of prompts with scoring, aborts and logprobs; prefixes of every
length up to two logical pages and one; second turns over generated tokens; replicas with 1, 0, 37
and 5 rows in one step. Poison and trace are on.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np
from tests.layouts import Ranks, prompt, resolved, scheduler_for
from tests.matrix.book import Book, Prompt, Recorder
from tests.matrix.cells import Cell
from tests.matrix.processes import ProcessRanks
from tests.matrix.traces import Trace

from anabranch.core.messages import Output
from anabranch.core.plan import StepPlan
from anabranch.core.request import Request, SamplingParams
from anabranch.core.resolve import RunConfig

ATOL = 1e-4
WORKSPACE = 64


class Mismatch(AssertionError):
    """A cell whose answer is not one process's."""


@dataclass
class Trial:
    """A cell on its ranks: threads, or processes over shm or gloo. `counts` tells what was met."""

    cell: Cell
    book: Book
    seed: int = 0
    over: str = "threads"
    counts: Counter[str] = field(default_factory=Counter)

    def run(self) -> Counter[str]:
        settings = self.cell.filled(self.seed)
        if self.over != "threads":
            settings |= {"ranks": "processes", "transport": self.over}
        self.rng = self.cell.random(self.seed)
        long = self.rng.random() < 1 / 6
        run = resolved(
            self.cell.arch, debug="poison,trace", workspace_tokens=WORKSPACE, max_running=48,
            kv_pages=(1400 if long else 640) // int(settings["page_size"]),
            max_model_len=1200 if long else 400, **settings,
        )  # fmt: skip
        self.traces = [Trace() for _ in range(run.layout.mesh.world)]
        self.recorders = [Recorder() for _ in self.traces]
        self.ranks = self._start(run)
        self.scheduler = scheduler_for(run)
        self.page, self.run_config = run.page_size, run
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()
        try:
            self._mix(long)
            self._prefixes()
            self._second_turns()
            self._uneven()
        finally:
            self.ranks.close()
        self._check_trace()
        return self.counts

    def _start(self, run: RunConfig) -> Ranks | ProcessRanks:
        """The ranks, each with a recorder and a trace."""
        if self.over != "threads":
            recorders, traces = self.recorders, self.traces
            return ProcessRanks(run, self.book.seed, self.over, recorders, traces)
        ranks = Ranks(run, reader=self.book.reader, traces=self.traces)
        for worker, recorder in zip(ranks.workers, self.recorders, strict=True):
            worker.sampler = recorder
        return ranks

    # parts -------------------------------------------------------------------------------------

    def _mix(self, long: bool) -> None:
        """Prompts of 1 to 2C+1, 130 and perhaps 1000 tokens; scoring; aborts; logprobs on some."""
        rng, cp = self.rng, self.run_config.layout.mesh.cp
        lengths = [*range(1, 2 * cp + 2), 130, 21]
        greedy = [
            self._request(prompt(n, 100 + n), rng.choice((1, 2, 4)), logprobs=rng.random() < 0.3)
            for n in lengths
        ]
        greedy.append(self._request(prompt(9, 7), 2 * self.page + 2))
        if long:
            greedy.append(self._request(prompt(1000, 8), 2))
        scored = [
            Request(f"score{n}", prompt(n, 200 + n), score_from=k)
            for n, k in ((1, 1), (9, 5), (66, 63))
        ]
        doomed = [self._request(prompt(n, 300 + n), 6) for n in (5, 90)]
        self.book.ensure(self._pairs(greedy + doomed), [r.prompt for r in scored])
        arrivals = [(rng.choice((0, 0, 1, 2, 4)), r) for r in greedy + scored + doomed]
        aborts = [(rng.randrange(1, 6), r.id) for r in doomed]
        self._drive(arrivals, aborts)

    def _prefixes(self) -> None:
        """Every shared prefix length up to two logical pages and one, over the prompt of 130."""
        base = prompt(130, 230)
        requests = [
            self._request((*base[:n], *prompt(2, 400 + n)), 1) for n in range(2 * self.page + 2)
        ]
        self.book.ensure(self._pairs(requests))
        self._drive([(0, r) for r in requests])

    def _second_turns(self) -> None:
        """Prompts that hold what a first turn generated, and a little more."""
        firsts = [r for r in self.requests.values() if len(r.prompt) in (9, 21) and self._done(r)]
        requests = []
        for first in firsts[:3]:
            answer = self.book.answers[first.prompt].tokens[: first.sampling.max_tokens]
            requests.append(self._request((*first.prompt, *answer, *prompt(3, 500)), 2))
        self.book.ensure(self._pairs(requests))
        before = self.scheduler.stats().cached_tokens
        self._drive([(0, r) for r in requests])
        self.counts["generated tokens hit"] += self.scheduler.stats().cached_tokens - before

    def _uneven(self) -> None:
        """One step in which replicas have 1 (decode), 0, 37 and 5 rows (prefill)."""
        replicas = self.run_config.layout.mesh.dp
        if replicas < 2:
            return
        budget = self.scheduler.config.prefill_rows
        lengths = (3, 4, budget + 37, budget + 5)[:replicas]
        requests = [self._request(prompt(n, 600 + n), 6) for n in lengths]
        self.book.ensure(self._pairs(requests))
        for request in requests:
            self._submit(request)
        self._step()
        self._abort(requests[1].id)
        plan = self._step()
        assert plan is not None
        rows = tuple(r.rows for r in plan.replicas)
        wanted = (1, 0, min(37, budget), 5)[:replicas]
        self.counts["rows 1, 0, 37, 5" if rows[: len(wanted)] == wanted else f"rows {rows}"] += 1
        self._drive([])

    # driving -----------------------------------------------------------------------------------

    def _request(self, ids: Prompt, count: int, logprobs: bool = False) -> Request:
        serial = len(self.requests)
        sampling = SamplingParams(
            temperature=0.0, max_tokens=count, seed=serial, logprobs=3 if logprobs else None
        )
        request = Request(f"r{serial}", ids, sampling)
        self.requests[request.id] = request
        return request

    def _pairs(self, requests: list[Request]) -> list[tuple[Prompt, int]]:
        return [(r.prompt, r.sampling.max_tokens or 0) for r in requests]

    def _done(self, request: Request) -> bool:
        return request.id not in self.aborted and request.id in self.tokens

    def _submit(self, request: Request) -> None:
        self.scheduler.submit(request)

    def _abort(self, request_id: str) -> None:
        self.counts["aborted"] += len(self.scheduler.abort(request_id))
        self.aborted.add(request_id)

    def _drive(
        self, arrivals: list[tuple[int, Request]], aborts: list[tuple[int, str]] | None = None
    ) -> None:
        """Steps until everything has arrived, left and ended; then compare what ended."""
        started = set(self.tokens)
        at, waiting, leaving = 0, list(arrivals), list(aborts or [])
        while True:
            for entry in [a for a in waiting if a[0] <= at]:
                waiting.remove(entry)
                self._submit(entry[1])
            for gone in [a for a in leaving if a[0] <= at]:
                leaving.remove(gone)
                self._abort(gone[1])
            if self._step() is None and not waiting and not leaving:
                break
            at += 1
        for key in set(self.tokens) - started:
            self._compare(self.requests[key])

    def _step(self) -> StepPlan | None:
        plan = self.scheduler.next_step()
        if plan is None:
            return None
        self.counts["steps"] += 1
        for replica in plan.replicas:
            counts = replica.decode.count
            self.counts["extends in decode"] += int((counts > 1).sum())
        outputs = self.scheduler.apply(self.ranks.step(plan))
        for output in outputs:
            assert output.error is None, output
            if output.logits:
                self._compare_score(output)
            else:
                self.tokens[output.id] += output.tokens
                self._compare_logprobs(output)
        return plan

    # comparing ---------------------------------------------------------------------------------

    def _close(self, got: np.ndarray, want: np.ndarray, what: str) -> None:
        worst = float(np.abs(got - want).max())
        if not worst <= ATOL:  # NaN fails too
            raise Mismatch(f"{what}: logits differ by {worst:.3g}")

    def _compare_score(self, output: Output) -> None:
        length = int(output.id.removeprefix("score"))
        want = self.book.scores[prompt(length, 200 + length)]
        for first, piece in output.logits:
            got = np.frombuffer(piece, np.float32).reshape(-1, want.shape[1])
            self._close(got, want[first : first + len(got)], f"{output.id} at {first}")
            self.counts["scored rows"] += len(got)

    def _compare_logprobs(self, output: Output) -> None:
        for token, entry in zip(output.tokens, output.logprobs, strict=False):
            request = self.requests[output.id]
            done = len(self.tokens[output.id]) - len(output.tokens)
            if any(self.book.answers[request.prompt].tie(i) for i in range(done + 1)):
                return
            row = self.book.answers[request.prompt].logits[done].astype(np.float64)
            want = row[token] - np.log(np.exp(row - row.max()).sum()) - row.max()
            if entry.token != token or entry.rank != 1 or abs(entry.logprob - want) > ATOL:
                raise Mismatch(f"{output.id}: logprob {entry}, wanted {want}")
            self.counts["logprobs"] += 1

    def _compare(self, request: Request) -> None:
        got, answer = self.tokens[request.id], self.book.answers[request.prompt]
        if request.id not in self.aborted and len(got) != request.sampling.max_tokens:
            raise Mismatch(f"{request.id}: {len(got)} tokens of {request.sampling.max_tokens}")
        serial, length = request.sampling.seed, len(request.prompt)
        for i, token in enumerate(got):
            rows = [r.seen.get((serial, length + i)) for r in self.recorders]
            held = [row for row in rows if row is not None]
            replica = self.run_config.layout.mesh.replica_size
            what = f"{request.id}, prompt of {length}, token {i}"
            if len(held) < replica:
                raise Mismatch(f"{what}: {len(held)} ranks drew, a replica has {replica}")
            self._close(held[0], answer.logits[i], what)
            if any(row.tobytes() != held[0].tobytes() for row in held[1:replica]):
                raise Mismatch(f"{what}: ranks of a replica hold logits that differ in bits")
            if answer.tie(i):
                self.counts["ties"] += 1
                break
            if token != answer.tokens[i]:
                raise Mismatch(f"{what}: {token}, one process says {answer.tokens[i]}")
            self.counts["drawn rows"] += 1

    def _check_trace(self) -> None:
        """Inside every group all members made the same calls, in the same order."""
        for rank, trace in enumerate(self.traces):
            for members, entries in trace.entries.items():
                first = self.traces[members[0]].entries[members]
                if rank != members[0] and entries != first:
                    raise Mismatch(f"trace of {members}: rank {rank} differs from {members[0]}")
                self.counts["collectives"] += len(entries)


def trial(cell: Cell, books: dict[str, Book], seed: int = 0, over: str = "threads") -> Counter[str]:
    """Run a cell; raises Mismatch, or whatever the engine raised."""
    book = books.setdefault(cell.model, Book(cell.arch))
    return Trial(cell, book, seed, over).run()
