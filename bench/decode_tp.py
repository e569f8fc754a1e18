"""What decode attention TP over replicated weights saves: ``python bench/decode_tp.py``.

A model whose attention is most of what a rank reads, cp 2, batch 1 and 8: the time of a decoded
token with heads replicated over the cp ranks and with heads cut over them, both loaded in one run
and measured by turns, beside what the bytes read per token predict. Of either the quietest turn
counts, as what else the host does moves both by half.

Bytes decide only where reading them takes longer than multiplying. Replicated heads leave each rank
half of the rows, cut heads half of the weights: as many multiplications. And one row is on one
rank: while that reads all of the heads' weights, the other leaves it the memory to itself. So the
two large products of an attention are timed too, in both forms by turns, by processes side by
side, and the ratio that their saving makes of the step is told beside.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from anabranch import ops
from anabranch.core.config import EngineConfig
from anabranch.core.request import SamplingParams
from anabranch.engine.llm import LLM
from anabranch.engine.prepare import prepare
from anabranch.layout.choice import Place
from anabranch.models.reads import Reads, decode_reads
from anabranch.models.registry import family

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8192,
    "hidden_size": 2048,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
}
HEADS, HEAD = MODEL["num_attention_heads"], MODEL["head_dim"]
Row = dict[str, float]
LEAD = 15.0  # seconds a process of one product may take to start
PAIRS = 6  # of matrices that are read in turn, so that none is still in a cache
SLOT, TURNS = 0.4, 8  # seconds of products in one form; how often each is measured


def reads_of(config: EngineConfig) -> Reads:
    """What rank 0 reads per token under a configuration."""
    run = prepare(config).run
    place = Place(run.layout, run.layout.ownership(run.arch.heads, run.arch.kv_heads), 0)
    return decode_reads(run.arch, place, family(run.arch).recipe(run.arch, place), run.dtype)


def token_time(llm: LLM, batch: int, tokens: int) -> float:
    """Seconds of one decode step of `batch` requests: what `tokens` more of them take."""

    def seconds(count: int) -> float:
        sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        prompts = [[(7 * b + t) % 8192 for t in range(32)] for b in range(batch)]
        start = time.perf_counter()
        llm.generate(prompts, sampling)
        return time.perf_counter() - start

    return (seconds(tokens + 1) - seconds(1)) / tokens


def products(batch: int, dtype: str) -> tuple[float, float]:
    """Milliseconds of an attention's two products with its heads' weights, into the heads and out
    of them: with heads replicated and with heads cut, both at the slower of two processes that have
    a core each. With heads replicated one row is one process's, and the other waits."""
    cores = sorted(os.sched_getaffinity(0))
    start = str(time.time() + LEAD)
    running = [
        subprocess.Popen(
            [sys.executable, __file__, "--product", str(batch), dtype, start, str(rank), str(core)],
            stdout=subprocess.PIPE,
        )
        for rank, core in enumerate((cores[0], cores[-1]))
    ]
    found = [json.loads(process.communicate(timeout=120)[0]) for process in running]
    whole, half = (max(times) for times in zip(*found, strict=True))
    return whole, half


def product_main(batch: int, dtype: torch.dtype, start: float, rank: int, core: int) -> list[float]:
    """One process of `products`: the medians of its quietest turns."""
    os.sched_setaffinity(0, [core])
    torch.set_num_threads(1)
    bound = ops.bind("cpu", threads=1)
    hidden, whole, half = MODEL["hidden_size"], HEADS * HEAD, HEADS // 2 * HEAD
    weights = [
        (torch.randn(whole, hidden).to(dtype), torch.randn(hidden, whole).to(dtype))
        for _ in range(PAIRS)
    ]
    own = batch // 2 + (rank < batch % 2)
    forms = [(own, weights), (batch, [(into[:half], out[:, :half]) for into, out in weights])]
    quietest = [math.inf, math.inf]
    for slot in range(2 * TURNS):
        rows, pairs = forms[slot % 2]
        x = torch.randn(rows, hidden).to(dtype)
        y = torch.randn(rows, pairs[0][0].shape[0]).to(dtype)
        time.sleep(max(0.0, start + slot * SLOT - time.time()))
        taken = [] if rows else [0.0]
        while rows and time.time() < start + (slot + 1) * SLOT:
            begun = time.perf_counter()
            for into, out in pairs:
                bound.linear(x, into)
                bound.linear(y, out)
            taken.append((time.perf_counter() - begun) / PAIRS)
        quietest[slot % 2] = min(quietest[slot % 2], 1e3 * statistics.median(taken))
    return quietest


def by_products(batch: int, dtype: str, step: float) -> Row:
    """The ratio that the products' own times predict of a step that takes `step` milliseconds with
    heads replicated: what else it does is the same with heads cut."""
    whole, half = products(batch, dtype)
    saved = MODEL["num_hidden_layers"] * (whole - half)
    return {
        "products_replicated_ms": whole,
        "products_decode_tp_ms": half,
        "predicted_by_products": step / (step - saved),
    }


def measure(folder: Path, args: argparse.Namespace) -> list[Row]:
    common = {
        "tp": 2, "attn_cp": 2, "dcp": args.dcp, "load_format": "dummy", "device": "cpu",
        "ranks": args.ranks, "kv_pages": 64, "prefix_cache": False,
    }  # fmt: skip
    config = EngineConfig(model=str(folder), decode_attn="tp", **common)
    reads, dtype = reads_of(config), prepare(config).run.dtype
    rows: list[Row] = []
    with (
        LLM(folder, decode_attn="replicated", **common) as whole,
        LLM(folder, decode_attn="tp", **common) as split,
    ):
        for batch in args.batch:
            times: tuple[list[float], list[float]] = ([], [])
            for turn in range(args.turns + 1):
                for llm, taken in zip((whole, split), times, strict=True):
                    once = token_time(llm, batch, args.tokens)
                    if turn:  # the first warms up
                        taken.append(once)
            before, after = (1e3 * min(taken) for taken in times)
            total, kept = reads.held + reads.other, reads.read + reads.other
            row = {
                "batch": batch,
                "itl_replicated_ms": before,
                "itl_decode_tp_ms": after,
                "ratio": before / after,
                "bytes_replicated": total,
                "bytes_decode_tp": kept,
                "predicted_ratio": total / kept,
                "attention_share": reads.held / total,
                "of_predicted_saving": (1 - after / before) / reads.saving,
                **by_products(batch, dtype, before),
            }
            print("  ".join(f"{key} {value:.4g}" for key, value in row.items()), flush=True)
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=48, help="decoded tokens of a measurement")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--dcp", type=int, default=1, help="KV stripes: 1 (whole) or 2")
    parser.add_argument("--ranks", default="processes", choices=("processes", "threads"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--product", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.product is not None:
        batch, dtype, start, rank, core = args.product
        kind = getattr(torch, dtype)
        print(product_main(int(batch), kind, float(start), int(rank), int(core)))
        return
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(MODEL))
        found = measure(Path(name), args)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
