"""Times of the CPU ops beside their bounds: ``python bench/ops.py [--threads N] [--json OUT]``.

Owns the microbenches of copies, packing, merging, sums and attention. Medians; each op alternates
with what it is compared to in one run, so that a noisy machine hurts both.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from anabranch import ops
from anabranch.ops import wires

Row = dict[str, float | str]


def alternate(*jobs: Callable[[], object], budget: float = 0.4) -> list[float]:
    """Median microseconds of each job, taken in turn until the budget (seconds) is spent."""
    loops = []
    for job in jobs:
        job()
        start = time.perf_counter()
        job()
        loops.append(max(1, int(2e-4 / max(time.perf_counter() - start, 1e-7))))
    taken: list[list[float]] = [[] for _ in jobs]
    end = time.perf_counter() + budget * len(jobs)
    while time.perf_counter() < end:
        for job, n, into in zip(jobs, loops, taken, strict=True):
            start = time.perf_counter()
            for _ in range(n):
                job()
            into.append((time.perf_counter() - start) / n * 1e6)
    return [statistics.median(t) for t in taken]


def copies(bound: ops.Ops) -> list[Row]:
    """copy_rows against the array library's copy and against a plain memcpy of the same bytes."""
    found: list[Row] = []
    for rows, label in ((1, "4 KB"), (1024, "4 MB")):
        src, dst = torch.randn(2 * rows, 1024), torch.zeros(rows, 1024)
        plain = memoryview(dst.numpy()).cast("B")  # type: ignore[arg-type]
        other = memoryview(src[:rows].numpy()).cast("B")  # type: ignore[arg-type]

        def memcpy(into: memoryview = plain, source: memoryview = other) -> None:
            into[:] = source

        ours, torchs, memory = alternate(
            lambda d=dst, s=src, n=rows: bound.copy_rows(d, s, n, n, "scatter"),
            lambda d=dst, s=src, n=rows: d.copy_(s[n:]),
            memcpy,
        )
        best = min(torchs, memory)
        found.append(
            {"op": f"copy_rows {label}", "us": ours, "torch_us": torchs, "memcpy_us": memory}
            | {"of_bound": best / ours}
        )
    return found


def partials(bound: ops.Ops, reference: ops.Ops) -> list[Row]:
    """Pack and merge of the fused exchange's shapes (H 16, D 512, bf16, 2 members)."""
    found: list[Row] = []
    members, group, width = 2, 16, 512
    for rows in (1, 8, 32):
        out, lse = torch.randn(rows, group, width).bfloat16(), torch.randn(rows, group)
        for name, make in (("interleaved", wires.interleaved), ("split", wires.split)):
            wire = make(members, rows, group // members, width, torch.bfloat16)
            bound.pack_partials(out, lse, wire.out, wire.lse)
            merged = torch.empty(rows, group // members, width, dtype=torch.bfloat16)
            pack, pack_ref, merge, merge_ref = alternate(
                lambda w=wire, o=out, s=lse: bound.pack_partials(o, s, w.out, w.lse),
                lambda w=wire, o=out, s=lse: reference.pack_partials(o, s, w.out, w.lse),
                lambda w=wire, m=merged: bound.merge_partials(w.out, w.lse, out=m),
                lambda w=wire, m=merged: reference.merge_partials(w.out, w.lse, out=m),
            )
            found.append({"op": f"pack B {rows} {name}", "us": pack, "reference_us": pack_ref})
            found.append({"op": f"merge B {rows} {name}", "us": merge, "reference_us": merge_ref})
    return found


def sums(bound: ops.Ops) -> list[Row]:
    """sum_members of two bf16 parts, with the bytes it reads and writes a second."""
    parts, out = torch.randn(2, 512, 1024).bfloat16(), torch.empty(512, 1024, dtype=torch.bfloat16)
    (us,) = alternate(lambda: bound.sum_members(parts, out))
    return [{"op": "sum_members 2 x 1 MB", "us": us, "gb_s": 3 * out.nbytes / us / 1e3}]


def paged(width: int, context: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """A pool of 64-slot pages that holds ``rows`` contexts, its table and lengths."""
    pages = -(-context // 64)
    pool = torch.randn(rows * pages * 64, width).bfloat16()
    table = torch.randperm(rows * pages).int().view(rows, pages)
    return pool, table, torch.full((rows,), context, dtype=torch.int32)


def decode(bound: ops.Ops) -> list[Row]:
    """Paged attention over one layer: time and the bytes of cache read a second."""
    found: list[Row] = []
    for rows, context in ((1, 256), (1, 16384), (32, 512)):
        pool, table, lens = paged(2 * 3 * 64, context, rows)
        kv_map = torch.tensor([h // 3 for h in range(9)], dtype=torch.int32)
        q = torch.randn(rows, 9, 64).bfloat16()
        (gqa,) = alternate(
            lambda q=q, p=pool, t=table, n=lens, m=kv_map: bound.attend_paged_gqa(
                q, p, t, n, page_slots=64, kv_map=m, scale=0.125
            )
        )
        found.append(
            {"op": f"gqa 9/3x64 B {rows} ctx {context}", "us": gqa, "gb_s": pool.nbytes / gqa / 1e3}
        )
        pool, table, lens = paged(576, context, rows)
        latent = torch.randn(rows, 16, 576).bfloat16()
        (mla,) = alternate(
            lambda q=latent, p=pool, t=table, n=lens: bound.attend_paged_mla(
                q, p, t, n, page_slots=64, value_width=512, scale=0.1
            )
        )
        flops = 2 * 16 * (576 + 512) * rows * context
        found.append(
            {"op": f"mla 16x576 B {rows} ctx {context}", "us": mla, "gb_s": pool.nbytes / mla / 1e3}
            | {"gflop_s": flops / mla / 1e3}
        )
    return found


def prefill(bound: ops.Ops) -> list[Row]:
    """Dense causal attention of 1024 rows over themselves."""
    found: list[Row] = []
    rows = 1024
    pos = torch.arange(rows)
    for heads, kv, dq, dv in ((9, 3, 64, 64), (16, 16, 192, 128)):
        q, k = torch.randn(rows, heads, dq).bfloat16(), torch.randn(rows, kv, dq).bfloat16()
        v = torch.randn(rows, kv, dv).bfloat16()
        kv_map = torch.tensor([h * kv // heads for h in range(heads)], dtype=torch.int32)
        (us,) = alternate(
            lambda q=q, k=k, v=v, m=kv_map: bound.attend_rows(
                q, k, v, pos, pos, kv_map=m, scale=0.1
            )
        )
        flops = rows * rows * heads * (dq + dv)
        found.append(
            {"op": f"prefill {heads}/{kv} {dq}+{dv}", "us": us, "gflop_s": flops / us / 1e3}
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    bound, reference = ops.bind("cpu"), ops.bind("cpu", provider="reference")
    print(ops.describe())
    found = [
        *copies(bound),
        *partials(bound, reference),
        *sums(bound),
        *decode(bound),
        *prefill(bound),
    ]
    for row in found:
        print(
            "  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{v:32}" for k, v in row.items())
        )
    if args.json is not None:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"machine": ops.describe(), "rows": found}, file, indent=1)


if __name__ == "__main__":
    main()
