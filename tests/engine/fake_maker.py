"""Worker makers without a model, imported by module path in the processes of a tree.

Tokens are a hash of a request's whole history, so that every rank can draw them by itself. Prompts
with certain tokens make a rank misbehave: see `Fake.step`.
"""

import os
import signal
import time
from zlib import crc32

import numpy as np

from anabranch.core.plan import Chunks, Phase, ReplicaResult, StepPlan
from anabranch.core.resolve import RunConfig
from anabranch.engine.protocol import Endpoint

VOCAB = 1003
RAISE, KILL, STOP, SLOW, NAP, LONG = 1, 2, 3, 4, 5, 6  # tokens that begin a prompt and are trouble
SLOW_SECONDS = {SLOW: 6.0, LONG: 20.0}


def roll(history: int, token: int) -> int:
    return crc32(token.to_bytes(4, "little"), history)


def draw(history: int) -> int:
    return 10 + history % (VOCAB - 10)


def alone(prompt: tuple[int, ...], count: int) -> list[int]:
    """What a request draws."""
    history, tokens = 1, []
    for token in prompt:
        history = roll(history, token)
    for _ in range(count):
        tokens.append(draw(history))
        history = roll(history, tokens[-1])
    return tokens


class Fake:
    """One rank. The last rank of all is the one that suffers RAISE, KILL and STOP."""

    def __init__(self, run: RunConfig, rank: int) -> None:
        mesh = run.layout.mesh
        self.replica, self.leads = divmod(rank, mesh.replica_size)[0], rank % mesh.replica_size == 0
        self.last_rank = rank == mesh.world - 1
        self.rank = rank
        self.next = 0
        self.histories: dict[int, dict[int, int]] = {}
        self.last: dict[int, int] = {}
        self.factor = 1
        self.nap = 0.0  # seconds of every step, once a NAP has been seen

    def step(self, plan: StepPlan) -> ReplicaResult | None:
        assert plan.number == self.next, f"plan {plan.number}, expected {self.next}"
        self.next += 1
        for part in plan.replicas:
            for chunks in (part.prefill, part.decode):
                if 0 in chunks.start and len(chunks.tokens):
                    self._trouble(set(chunks.tokens.tolist()))
        time.sleep(self.nap)
        mine = plan.replicas[self.replica]
        for join in mine.join:
            self.histories[join.seat] = {-1: 1}
        drawn: list[tuple[int, int]] = []
        for phase in Phase:
            drawn += self._rows(mine.chunks(phase))
        seats, tokens = zip(*drawn, strict=True) if drawn else ((), ())
        if not self.leads:
            return None
        return ReplicaResult(np.array(seats, np.int32), np.array(tokens, np.int32))

    def _rows(self, chunks: Chunks) -> list[tuple[int, int]]:
        drawn, offset = [], 0
        for i, seat in enumerate(chunks.seat.tolist()):
            history = self.histories[seat]
            for position in range(int(chunks.start[i]), int(chunks.start[i] + chunks.count[i])):
                token = int(chunks.tokens[offset])
                token = self.last[seat] if token < 0 else token
                history[position] = roll(history[position - 1], token)
                offset += 1
            if chunks.sample[i]:
                self.last[seat] = draw(history[max(history)]) * self.factor % VOCAB
                drawn.append((seat, self.last[seat]))
        return drawn

    def _trouble(self, tokens: set[int]) -> None:
        self.nap = self.nap or 0.01 * (NAP in tokens)
        for token in tokens & SLOW_SECONDS.keys():
            time.sleep(SLOW_SECONDS[token])
        if not self.last_rank:
            if tokens & {KILL, STOP}:
                time.sleep(30)  # as a collective would wait for the dead rank
            return
        if RAISE in tokens:
            raise RuntimeError("this step was cursed")
        if KILL in tokens:
            os.kill(os.getpid(), signal.SIGKILL)
        if STOP in tokens:
            os.kill(os.getpid(), signal.SIGSTOP)

    def control(self, name: str, payload: bytes) -> bytes:
        if name == "pid":
            return str(os.getpid()).encode()
        if name == "update_weights":
            self.factor = 2
            return b""
        raise ValueError(f"no control {name!r}")


class FakeMaker:
    def __init__(self, run: RunConfig, path: str, endpoint: Endpoint) -> None:
        self.run = run
        assert path == "nowhere"

    def make(self, rank: int) -> Fake:
        return Fake(self.run, rank)

    def abort(self) -> None:
        return


class BrokenMaker(FakeMaker):
    """Cannot load."""

    def make(self, rank: int) -> Fake:
        raise ValueError("model.safetensors: truncated")
