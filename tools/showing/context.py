"""What context parallelism must show: CP prefill, decode TP over the same weights, DCP (CPU)."""

import json
import os
import tempfile
from pathlib import Path

from tools.showing.line import Line, Measured, json_of, python, tests
from tools.showing.ranks import evaluation, matrix, over_processes


def cells() -> tuple[Measured, bool]:
    """Every accepted cell, over all cores."""
    measured, ok = matrix("--full", "--jobs", str(os.cpu_count()), floor=400)
    seconds = measured["seconds"]
    return measured, (
        ok and measured["run"] == measured["accepted"]
        and isinstance(seconds, float) and seconds < 7200
    )  # fmt: skip


def processes() -> tuple[Measured, bool]:
    found = over_processes(30)
    return found, all(isinstance(v, dict) and v["ok"] for v in found.values())


def decode_tp() -> tuple[Measured, bool]:
    """The ratio and the share of the saving that bytes predict; where multiplying is what takes the
    time, what the products' own times predict."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        python("bench/decode_tp.py", "--json", str(out), timeout=1800)
        rows = json.loads(out.read_text())
    met = [r["ratio"] >= 1.15 and r["of_predicted_saving"] >= 0.8 for r in rows]
    why = [r["ratio"] >= 0.9 * r["predicted_by_products"] for r in rows]
    return {"rows": rows, "met": met, "as products predict": why}, all(
        a or b for a, b in zip(met, why, strict=True)
    )


def long_context() -> tuple[Measured, bool]:
    report = json_of(["bench/long_context.py", "--json"], timeout=3000)
    kv, itl, ttft = report["kv_ratio"], report["itl_ratio"], report["ttft_ratio"]
    assert isinstance(kv, float) and isinstance(itl, float) and isinstance(ttft, float)
    return report, kv <= 0.51 and itl <= 0.65 and ttft <= 0.6


def exchange() -> tuple[Measured, bool]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        args = ["bench/exchange.py", "--ranks", "2", "--stress", "100000", "--json", str(out)]
        done = python(*args, timeout=3000)
        report = json.loads(out.read_text())
    return report, done.returncode == 0


def cp_evaluation() -> tuple[Measured, bool]:
    return evaluation("--tp", "2", "--attn-cp", "2", "--enable-cp-decode-attn-tp")


def demo() -> tuple[Measured, bool]:
    done = python("-m", "anabranch.cli.main", "demo", timeout=900)
    return {"status": done.returncode, "said": done.stdout[-300:]}, done.returncode == 0


LINES = [
    Line("matrix of attention layouts on threads", "all of >= 400 cells, 0 failed, < 2 h", cells),
    Line("30 cells over processes, shm and gloo", "30 of 30 each, 0 failed", processes),
    Line(
        "V4's attention and gpt-oss under layouts", "equal to transformers",
        tests("tests/models/test_deepseek_v4.py", "tests/models/test_gpt_oss.py", floor=20),
    ),
    Line(
        "T1, T2, T4 to T8, T10", "all pass",
        tests("tests/nn/test_decode_tp.py", "tests/nn/test_sinks.py",
        "tests/models/test_update.py"),
    ),
    Line("T3", "all pass", tests("tests/weights/test_quantised.py")),
    Line("X1 to X6", "all pass", tests("tests/ops/test_partials.py", floor=50)),
    Line("X7 on CPU, X9", "all pass", tests("tests/comm/test_fused.py")),
    Line("X8, C1", "all pass", tests("tests/test_seeds.py", floor=18)),
    Line(
        "C2, C3", "all pass",
        tests("tests/test_matrix.py::test_attention_sample",
        "tests/nn/test_decode_tp.py::test_a_phase_switch_moves_nothing", floor=3),
    ),
    Line("T9: decode TP", "ratio >= 1.15 and >= 0.8 of the predicted saving", decode_tp),
    Line(
        "16k context: stripes against replicated; 8k prompt: cp 2 against one rank",
        "KV <= 0.51x, ITL <= 0.65x, TTFT <= 0.6x", long_context,
    ),
    Line(
        "fused exchange beside pack + gloo + merge; 1e5 bit-equal",
        "B 1 <= 5 us, B 8 <= 25 us, B 32 <= 90 us, where the bound is as quick as there", exchange,
    ),
    Line("demo", "exit 0", demo),
    Line("eval at tp 2, cp 2, decode TP, dcp 2, fp32", "identical to one process", cp_evaluation),
]  # fmt: skip
