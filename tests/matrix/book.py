"""What one process answers: greedy tokens and per-step logits of prompts, computed once per model.

A layout's every step is compared with these, never its text.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tests.layouts import Ranks, SharpReader, drive, resolved, scheduler_for
from torch import Tensor

from anabranch.core.arch import Arch
from anabranch.core.plan import ReplicaPlan
from anabranch.core.request import Request, SamplingParams
from anabranch.worker.sampler import Drawn, Sampler
from anabranch.worker.seats import Seats

Floats = NDArray[np.float32]
Prompt = tuple[int, ...]

MARGIN = 1e-3
"""Least distance between the two best logits of a greedy step: below it a tie would decide."""


class Recorder(Sampler):
    """A sampler that keeps the logits of every row it draws from, by (request's seed, position)."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int], Floats] = {}
        self.drawn = 0

    def draw(self, plan: ReplicaPlan, logits: Tensor, seats: Seats) -> Drawn:
        drawn = super().draw(plan, logits, seats)
        ends = {}
        for chunks in (plan.prefill, plan.decode):
            for seat, start, count in zip(chunks.seat, chunks.start, chunks.count, strict=True):
                ends[int(seat)] = int(start + count)
        for seat, row in zip(drawn.seat, drawn.row, strict=True):
            key = seats.joined[seat].seed, ends[seat]
            self.seen[key] = logits[row].clone().numpy()
            self.drawn += 1
        return drawn


@dataclass(frozen=True)
class Answer:
    """Greedy tokens of a prompt, and the logits [vocab] each was drawn from."""

    tokens: tuple[int, ...]
    logits: tuple[Floats, ...]

    def tie(self, step: int) -> bool:
        """Whether rounding could decide the token of a step: what follows it is no answer."""
        second, best = np.partition(self.logits[step], -2)[-2:]
        return bool(best - second < MARGIN)


@dataclass
class Book:
    """Answers and scores of one model in one process."""

    arch: Arch
    seed: int = 0
    answers: dict[Prompt, Answer] = field(default_factory=dict)
    scores: dict[Prompt, Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reader = SharpReader(self.seed)

    def ensure(self, prompts: Iterable[tuple[Prompt, int]], scored: Iterable[Prompt] = ()) -> None:
        """Answer prompts (with at least that many tokens) and score others, where not yet known."""
        wanted: dict[Prompt, int] = {}
        for prompt, count in prompts:
            known = self.answers.get(prompt)
            if known is None or len(known.tokens) < count:
                wanted[prompt] = max(count, wanted.get(prompt, 0))
        missing = [p for p in dict.fromkeys(scored) if p not in self.scores]
        if not wanted and not missing:
            return
        requests = [
            Request(f"g{i}", p, SamplingParams(temperature=0.0, max_tokens=n, seed=i))
            for i, (p, n) in enumerate(wanted.items())
        ]
        requests += [Request(f"s{i}", p, score_from=len(p)) for i, p in enumerate(missing)]
        run = resolved(
            self.arch, max_model_len=1200, kv_pages=1200, prefix_cache=False, max_running=64
        )
        ranks = Ranks(run, reader=self.reader)
        recorder = Recorder()
        ranks.workers[0].sampler = recorder
        try:
            logits, tokens = drive(ranks, scheduler_for(run), requests)
        finally:
            ranks.close()
        for i, prompt in enumerate(wanted):
            drawn = tokens[f"g{i}"]
            rows = tuple(recorder.seen[i, len(prompt) + n] for n in range(len(drawn)))
            self.answers[prompt] = Answer(tuple(drawn), rows)
        for i, prompt in enumerate(missing):
            self.scores[prompt] = logits[f"s{i}"]
