"""What many ranks must show: layouts, collectives, TP, EP and DP attention on CPU."""

import json
import os
import statistics
import tempfile
from pathlib import Path

from tools.showing.line import Line, Measured, json_of, python, tests


def matrix(*flags: str, floor: int) -> tuple[Measured, bool]:
    """tools/matrix.py; ok if at least `floor` cells ran and none failed."""
    done = python("tools/matrix.py", *flags, "--json", timeout=10_800, OMP_NUM_THREADS="1")
    report = json.loads(done.stdout.strip().splitlines()[-1])
    failed = report["failed"]
    kept = {k: report[k] for k in ("accepted", "refused", "run", "seconds", "met") if k in report}
    return {**kept, "failed": failed[:5]}, not failed and report["run"] >= floor


def dp_cells() -> tuple[Measured, bool]:
    return matrix("--dp-only", "--sample", "240", "--jobs", "2", floor=200)


def over_processes(count: int, *flags: str) -> Measured:
    """`count` cells over shared memory and as many over gloo; what ran and what failed."""
    found: Measured = {}
    for kind in ("shm", "gloo"):
        measured, ok = matrix(*flags, "--sample", str(count), "--over", kind, floor=count)
        found[kind] = {**measured, "ok": ok}
    return found


def dp_processes() -> tuple[Measured, bool]:
    found = over_processes(20, "--dp-only")
    return found, all(isinstance(v, dict) and v["ok"] for v in found.values())


def evaluation(*flags: str) -> tuple[Measured, bool]:
    """`eval arithmetic --n 200` in fp32 at a layout and in one process: the same answers?"""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("one.json", "split.json")]
        misses = [Path(folder) / name for name in ("one.txt", "split.txt")]
        for out, miss, more in zip(files, misses, ((), flags), strict=True):
            python(
                "-m", "anabranch.cli.main", "eval", "arithmetic", "--n", "200",
                "--dtype", "float32", "--json", str(out), "--misses", str(miss), *more,
            )  # fmt: skip
        one, split = (json.loads(f.read_text()) for f in files)
        told = [m.read_text() for m in misses]
    measured = {
        "one": one["accuracy"],
        "split": split["accuracy"],
        "same_misses": told[0] == told[1],
    }
    return measured, told[0] == told[1] and one["accuracy"] == split["accuracy"]


def dp_evaluation() -> tuple[Measured, bool]:
    return evaluation("--tp", "4", "--attn-dp", "2")


def measured_verbs(ranks: int, *flags: str) -> list[dict]:
    """Rows of bench/collectives.py."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        args = ["bench/collectives.py", "--ranks", str(ranks), "--json", str(out), *flags]
        python(*args, timeout=1200)
        return json.loads(out.read_text())["rows"]


def collectives(ranks: int = 2) -> tuple[Measured, bool]:
    """Median us of shm beside gloo; ok if every verb reaches its target."""
    rows = measured_verbs(ranks)
    judged = [r for r in rows if "reach_us" in r]
    short = {
        f"{r['verb']} {r['dtype']} {r['bytes']}": [r["us"], r["reach_us"]]
        for r in judged if not r["ok"]
    }  # fmt: skip
    faster = statistics.median(r["times_faster"] for r in rows)
    bound = {r["bytes"]: r["bound_us"] for r in rows}
    return {
        "judged": len(judged), "short": short, "bound_us": bound,
        "median_times_faster_than_gloo": faster,
    }, bool(judged) and not short  # fmt: skip


def oversubscribed() -> tuple[Measured, bool]:
    """8 ranks on two cores: microseconds of the slowest verb at 4 KB."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:2])  # what is started inherits it
    try:
        rows = measured_verbs(8, "--sizes", "4096")
    finally:
        os.sched_setaffinity(0, cores)
    slowest = max(rows, key=lambda r: r["us"])
    return {"verb": slowest["verb"], "us": slowest["us"]}, slowest["us"] <= 300


def pictures() -> tuple[Measured, bool]:
    """`anabranch layout --draw` of five layouts writes five pictures."""
    layouts = (
        ["--tp", "4", "--attn-dp", "2"], ["--tp", "4", "--attn-cp", "2"], ["--tp", "2", "--dcp",
        "2"], ["--tp", "8", "--attn-dp", "2", "--attn-cp", "2"], ["--tp", "8", "--ep", "4"],
    )  # fmt: skip
    sizes = []
    with tempfile.TemporaryDirectory() as folder:
        for i, flags in enumerate(layouts):
            path = Path(folder) / f"{i}.svg"
            args = ["-m", "anabranch.cli.main", "layout", *flags, "--draw", str(path)]
            python(*args, timeout=120)
            sizes.append(path.stat().st_size if path.exists() else 0)
    return {"svg_bytes": sizes}, min(sizes) > 1000


def share_of_collectives() -> tuple[Measured, bool]:
    report = json_of(["bench/decode_share.py", "--json"], timeout=1800)
    shm = report["shm"]
    assert isinstance(shm, dict)
    return report, shm["share"] <= 0.10


def gap() -> tuple[Measured, bool]:
    report = json_of(["bench/gap.py", "--json"], timeout=1800)
    ratio = report["ratio"]
    assert isinstance(ratio, float)
    return report, ratio <= 1.5


def weights_once() -> tuple[Measured, bool]:
    report = json_of(["bench/host_memory.py", "--json"], timeout=600)
    ratio = report["ratio"]
    assert isinstance(ratio, float)
    return report, report["ranks"] == 4 and ratio <= 1.05


LINES = [
    Line("matrix of DP, TP, EP cells on threads", ">= 200 run, 0 failed", dp_cells),
    Line("20 cells over processes, shm and gloo", "20 of 20 each, 0 failed", dp_processes),
    Line(
        "whole models over shared memory; threads and processes alike", "all equal, none skipped",
        tests("tests/comm/test_layouts.py", "tests/engine/test_llm.py", floor=10),
    ),
    Line("D1: DP2 TP2 from the command line", "1 passed", tests("tests/e2e/test_dp_attention.py")),
    Line("eval at tp 4 x dp 2, fp32", "identical to one process", dp_evaluation),
    Line("collectives, 2 ranks", "every verb within its target", collectives),
    Line("collectives, 8 ranks on 2 cores", "<= 0.3 ms an exchange", oversubscribed),
    Line("share of a decode step in collectives, model B", "shm <= 0.10", share_of_collectives),
    Line(
        "burst and chat on dp 4", "max/mean <= 1.3, >= 90% of hits",
        tests("tests/sched/test_placement.py", floor=4),
    ),
    Line(
        "a stream on replica 0 while replica 1 reads an 8k prompt",
        "largest gap <= 1.5x the median chunk step", gap,
    ),
    Line("weights held once per host, tp 4 x dp 4", "PSS <= 1.05x the checkpoint", weights_once),
    Line(
        "death of a worker, the brain, the front; idle", "noticed, nothing left",
        tests("tests/engine/test_client.py", floor=10),
    ),
    Line("core masks on made-up topologies", "exact", tests("tests/engine/test_masks.py", floor=6)),
    Line(
        "torchrun: one host, and two network namespaces over gloo", "logits equal",
        tests("tests/engine/test_torchrun.py", floor=3),
    ),
    Line("five pictures", "five SVG files", pictures),
]  # fmt: skip
