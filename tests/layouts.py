"""Test harness: a model under any layout on thread ranks, driven by the real scheduler.

`run` returns per-position logits of scoring requests and greedy tokens of others, so that a layout
is compared with one process step by step, never by text.
"""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from anabranch.comm.group import Trace
from anabranch.comm.transports.threads import ThreadWorld
from anabranch.core.arch import GQA, MLA, Arch, MoE, Rope
from anabranch.core.config import EngineConfig
from anabranch.core.plan import StepPlan, StepResult
from anabranch.core.request import Request
from anabranch.core.resolve import Machine, RunConfig, resolve
from anabranch.sched.scheduler import Scheduler
from anabranch.sched.state import SchedulerConfig
from anabranch.weights.readers.base import Reader
from anabranch.weights.readers.dummy import DummyReader
from anabranch.weights.recipe import Source
from anabranch.weights.share import Alone, ThreadShare
from anabranch.worker.assemble import build

VOCAB = 1003

MOE = MoE(
    experts=10, top_k=3, width=24, shared_width=32, score="sigmoid", select="group_top2", groups=2,
    top_groups=1, correction_bias=True, renorm=True, scaling=1.5, first_dense=1,
)  # fmt: skip


def mla_arch(heads: int = 24, layers: int = 2) -> Arch:
    """A tiny DeepSeek: odd sizes, one dense layer, a shared expert."""
    attn = MLA(heads, q_lora=40, kv_lora=32, nope=12, rope=8, v=12, scale=20**-0.5)
    rope = Rope(8, interleaved=True)
    return Arch(
        "deepseek_v3", 48, layers, VOCAB, 56, 1e-6, rope, attn, MOE, max_len=4096, dtype="float32"
    )


def gqa_arch(heads: int = 24, kv_heads: int = 4, layers: int = 2) -> Arch:
    """A tiny Qwen-MoE."""
    attn = GQA(heads, kv_heads, head_dim=8, scale=8**-0.5, qk_norm=True)
    moe = dataclasses.replace(
        MOE, score="softmax", select="topk", groups=1, correction_bias=False, first_dense=0
    )
    return Arch(
        "qwen3_moe", 48, layers, VOCAB, 56, 1e-6, Rope(8), attn, moe, max_len=4096, dtype="float32"
    )


class SharpReader(DummyReader):
    """Dummy weights that show mistakes: attention logits of std near 3, a shared expert scaled x4.

    Keeps what it made: many layouts read the same weights.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._made: dict[Source, torch.Tensor] = {}

    def read(self, source: Source) -> torch.Tensor:
        if source not in self._made:
            self._made[source] = self._make(source)
        return self._made[source]

    def _make(self, source: Source) -> torch.Tensor:
        value = super().read(source)
        if any(part in source.name for part in ("q_proj", "q_b_proj", "k_proj", "q_norm")):
            value = value * 2
        if "shared_experts.down" in source.name:
            value = value * 4
        if "lm_head" in source.name:
            value = value * 3
        return value


class Ranks:
    """P thread ranks of one model copy; `step` runs a plan on all of them."""

    def __init__(
        self,
        run: RunConfig,
        seed: int = 0,
        timeout: float = 60.0,
        reader: Reader | None = None,
        traces: Sequence[Trace] | None = None,
    ) -> None:
        world = run.layout.mesh.world
        self.threads = ThreadPoolExecutor(world)
        self.world = ThreadWorld(timeout)
        share = ThreadShare(world) if world > 1 else Alone()

        source = SharpReader(seed) if reader is None else reader

        def make(rank: int):
            trace = None if traces is None else traces[rank]
            return self._guarded(build, run, rank, source, share, self.world, trace)

        self.workers = list(self.threads.map(make, range(world)))

    def _guarded(self, function, *args):
        try:
            return function(*args)
        except BaseException:
            self.world.abort()
            raise

    def _in_turn(self, function, *args):
        with self.world.taken():
            return self._guarded(function, *args)

    def step(self, plan: StepPlan) -> StepResult:
        futures = [self.threads.submit(self._in_turn, w.step, plan) for w in self.workers]
        errors = [f.exception() for f in futures]
        if any(errors):
            first = [e for e in errors if e is not None and "peer did not" not in str(e)]
            raise (first or [e for e in errors if e is not None])[0]
        results = [f.result() for f in futures]
        return StepResult(plan.number, tuple(r for r in results if r is not None))

    def close(self) -> None:
        self.threads.shutdown()


def resolved(arch: Arch, **flags) -> RunConfig:
    flags = {
        "ranks": "threads",
        "dtype": "float32",
        "ops": "reference",
        "kv_pages": 64,
        "max_model_len": 512,
        "max_running": 16,
        **flags,
    }
    return resolve(EngineConfig(**flags), arch, Machine(cores=1))


def scheduler_for(run: RunConfig) -> Scheduler:
    config = run.config
    return Scheduler(
        SchedulerConfig(
            pages=run.kv_pages,
            replicas=run.layout.mesh.dp,
            page_size=run.page_size,
            max_running=config.max_running,
            prefill_rows=config.prefill_chunk * run.layout.mesh.cp,
            max_model_len=run.max_model_len,
            vocab_size=run.arch.vocab,
            prefix_cache=config.prefix_cache,
        )
    )


def drive(ranks: Ranks, scheduler: Scheduler, requests: Sequence[Request]):
    """All requests to their end: (logits by id, tokens by id)."""
    for request in requests:
        scheduler.submit(request)
    pieces: dict[str, list[tuple[int, bytes]]] = {r.id: [] for r in requests}
    tokens: dict[str, list[int]] = {r.id: [] for r in requests}
    while (plan := scheduler.next_step()) is not None:
        for output in scheduler.apply(ranks.step(plan)):
            pieces[output.id] += output.logits
            tokens[output.id] += output.tokens
            assert output.error is None, output
    logits = {}
    for key, parts in pieces.items():
        rows = [(p, np.frombuffer(b, np.float32).reshape(-1, VOCAB)) for p, b in sorted(parts)]
        if rows:
            assert [p for p, _ in rows] == list(np.cumsum([0, *[len(r) for _, r in rows]])[:-1])
            logits[key] = np.concatenate([r for _, r in rows])
    return logits, tokens


def run_layout(
    arch: Arch, requests: Sequence[Request], seed: int = 0, reader: Reader | None = None, **flags
):
    run = resolved(arch, **flags)
    ranks = Ranks(run, seed, reader=reader)
    try:
        return drive(ranks, scheduler_for(run), requests)
    finally:
        ranks.close()


def prompt(length: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, VOCAB, length).tolist())
