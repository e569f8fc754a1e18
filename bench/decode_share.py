"""The share of a decode step spent in collectives: `python bench/decode_share.py [--json OUT]`.

Model B (a random DeepSeek-V2 of 371 M parameters, MLA and experts) at TP 2 x DP 2, over shared
memory and over gloo. A rank's time in its transports, waiting for peers included, over the time of
its steps.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from anabranch.comm.group import Counts, Transport
from anabranch.core.plan import ReplicaResult, StepPlan
from anabranch.core.request import SamplingParams
from anabranch.core.resolve import RunConfig
from anabranch.engine.llm import LLM
from anabranch.engine.protocol import Endpoint
from anabranch.engine.ranks import RankMaker
from anabranch.worker.assemble import World
from anabranch.worker.runner import Worker

MODEL_B = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 32000,
    "hidden_size": 1024, "intermediate_size": 4096, "moe_intermediate_size": 512,
    "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 16,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 4,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "topk_method": "greedy", "n_group": 1,
    "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0,
    "scoring_func": "softmax", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": 2048, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
WHERE = "ANABRANCH_BENCH_TIMES"


class Clock:
    """Seconds in collectives and in decode steps of this process."""

    moving = 0.0
    steps = 0.0


class Timed(Transport):
    """A transport that adds its time to a clock."""

    def __init__(self, inner: Transport, clock: Clock) -> None:
        self.members, self.me = inner.members, inner.me
        self._inner, self._clock = inner, clock

    def _spend(self, name: str, *args: object) -> Tensor:
        start = time.perf_counter()
        result: Tensor = getattr(self._inner, name)(*args)
        self._clock.moving += time.perf_counter() - start
        return result

    def all_gather(self, x: Tensor, counts: Counts) -> Tensor:
        return self._spend("all_gather", x, counts)

    def all_to_all(self, x: Tensor, send: Counts, recv: Counts) -> Tensor:
        return self._spend("all_to_all", x, send, recv)

    def reduce_scatter(self, x: Tensor, counts: Counts) -> Tensor:
        return self._spend("reduce_scatter", x, counts)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._spend("all_reduce", x)

    def merge_partials(self, out: Tensor, lse: Tensor, sink: Tensor | None) -> Tensor:
        return self._spend("merge_partials", out, lse, sink)


class TimedWorld:
    def __init__(self, inner: World, clock: Clock) -> None:
        self._inner, self._clock = inner, clock

    def transport(self, members: tuple[int, ...], me: int) -> Transport:
        return Timed(self._inner.transport(members, me), self._clock)


class TimedRank:
    """A worker that counts its pure decode steps."""

    def __init__(self, worker: Worker, clock: Clock) -> None:
        self._worker, self._clock = worker, clock

    def step(self, plan: StepPlan) -> ReplicaResult | None:
        decode = all(r.prefill.rows == 0 for r in plan.replicas)
        before, start = self._clock.moving, time.perf_counter()
        result = self._worker.step(plan)
        if decode:
            self._clock.steps += time.perf_counter() - start
            times = {"moving": self._clock.moving, "steps": self._clock.steps}
            Path(os.environ[WHERE], f"{self._worker.rank}.json").write_text(json.dumps(times))
        else:
            self._clock.moving = before
        return result

    def control(self, name: str, payload: bytes) -> bytes:
        return self._worker.control(name, payload)

    def close(self) -> None:
        return


class TimedMaker(RankMaker):
    """Loaded by module path in the ranks of this bench."""

    def __init__(self, run: RunConfig, path: str, endpoint: Endpoint) -> None:
        super().__init__(run, path, endpoint)
        self._clock = Clock()
        if self._world is not None:
            self._world = TimedWorld(self._world, self._clock)

    def make(self, rank: int) -> TimedRank:  # type: ignore[override]
        return TimedRank(super().make(rank), self._clock)


def share(model: Path, transport: str, tokens: int) -> dict[str, float]:
    """Largest share over the ranks, and the median step's milliseconds."""
    with tempfile.TemporaryDirectory() as times:
        os.environ[WHERE] = times
        with LLM(
            model, maker="decode_share:TimedMaker", tp=2, attn_dp=2, load_format="dummy",
            device="cpu", max_model_len=512, threads=1, transport=transport,
        ) as llm:  # fmt: skip
            prompts = [[7 * b + t for t in range(32)] for b in range(4)]
            llm.generate(
                prompts, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            )
        found = [json.loads(p.read_text()) for p in Path(times).glob("*.json")]
    worst = max(f["moving"] / f["steps"] for f in found)
    return {"share": round(worst, 4), "step_ms": round(1e3 * found[0]["steps"] / (tokens - 1), 2)}


@contextmanager
def model_b(context: int = 2048) -> Iterator[Path]:
    """A folder with model B's config, for contexts of so many tokens. Ranks that start within find
    the makers of this folder."""
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        config = {**MODEL_B, "max_position_embeddings": context}
        Path(folder, "config.json").write_text(json.dumps(config))
        yield Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--json", help="write the result to this file")
    args = parser.parse_args()
    with model_b() as folder:
        report = {t: share(folder, t, args.tokens) for t in ("shm", "gloo")}
    print(json.dumps(report))
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
