"""What the packaged model, `anabranch eval` and `anabranch demo` must show."""

import re
import sys
import time

from tools.showing.line import ROOT, Line, Measured, json_of, python, tests

EVAL = ("-m", "anabranch.cli.main", "eval", "arithmetic")


def accuracy() -> tuple[Measured, bool]:
    """500 problems of each split, greedy, bf16 as the checkpoint is."""
    found = json_of([*EVAL, "--n", "500", "--device", "cpu", "--dtype", "bfloat16", "--json"])
    splits = found["by_split"]
    assert isinstance(splits, dict)
    new, held = splits["new-numbers"], splits["held-out"]
    shaped = {"accuracy", "n", "ci95", "by_split"} <= found.keys()
    measured: Measured = {
        "new-numbers": {"accuracy": new["accuracy"], "n": new["n"], "ci95": new["ci95"]},
        "held-out": {"accuracy": held["accuracy"], "n": held["n"], "ci95": held["ci95"]},
        "json_has_its_fields": shaped,
        "seconds": found["seconds"],
    }
    good = shaped and found["n"] == 500 and found["accuracy"] == new["accuracy"]
    return measured, good and new["accuracy"] >= 0.95 and held["accuracy"] >= 0.70


def speed() -> tuple[Measured, bool]:
    """`eval arithmetic --n 200` as a user types it, load included."""
    begin = time.monotonic()
    found = json_of([*EVAL, "--n", "200", "--device", "cpu", "--json"])
    seconds = time.monotonic() - begin
    running = found["mean_running"]
    assert isinstance(running, float)
    measured: Measured = {
        "seconds": round(seconds, 1), "mean_running": round(running, 1),
        "output_tok_s": found["output_tok_s"], "accuracy": found["accuracy"],
    }  # fmt: skip
    return measured, seconds < 180 and running >= 24


def demo() -> tuple[Measured, bool]:
    begin = time.monotonic()
    done = python("-m", "anabranch.cli.main", "demo", timeout=1200)
    seconds = time.monotonic() - begin
    table = [re.sub(r"\s+", " ", row).strip() for row in done.stdout.splitlines()]
    measured: Measured = {
        "exit": done.returncode, "seconds": round(seconds, 1), "rows": [r for r in table if r],
    }  # fmt: skip
    if done.returncode:
        measured["said"] = done.stderr[-300:]
    return measured, done.returncode == 0 and seconds < 60


def two_seeds() -> tuple[Measured, bool]:
    """What training/REPORT.md states, and the test that holds it to the wanted figures."""
    counts, good = tests("tests/demo/test_packaged.py::"
                         "test_the_report_states_two_seeds_whose_gap_is_small")()  # fmt: skip
    text = (ROOT / "training/REPORT.md").read_text()
    minutes = re.search(r"([\d.]+) minutes of training", text)
    gap = re.search(r"Gap of the seeds.*\n(.*)", text)
    if minutes is None or gap is None:
        return {**counts, "report": "names neither minutes nor gap"}, False
    return {**counts, "minutes": minutes[1], "gap": gap[1]}, good and float(minutes[1]) <= 10


LINES = [
    Line("eval arithmetic --n 500, bf16", "new numbers >= 0.95, held-out templates >= 0.70",
         accuracy),
    Line("eval arithmetic --n 200", "under 180 s on 2 cores, mean running >= 24 of 32", speed),
    Line("gsm8k against a stub", "20 items, strict and flexible as lm-evaluation-harness stored",
         tests("tests/cli/test_evals.py", "tests/cli/test_scoring.py", floor=10)),
    Line("perplexity", "equal to transformers' to 1e-3", tests("tests/demo/test_perplexity.py")),
    Line("--compare", "a server with itself p = 1, with a spoilt one p < 0.01",
         tests("tests/cli/test_evals.py::"
               "test_compare_of_a_server_with_itself_and_with_a_spoilt_one",
               "tests/demo/test_compare.py", floor=2)),
    Line("transformers loads the package", "DeepseekV3ForCausalLM, the same greedy answers",
         tests("tests/demo/test_packaged.py", floor=4)),
    Line("problems", "every written step true, splits disjoint, equal seeds equal problems",
         tests("tests/demo/test_problems.py", floor=10)),
    Line("two training seeds", "both reported, gap <= 2 points, a run <= 10 minutes", two_seeds),
    Line("anabranch demo", "exit 0 in under 60 s", demo),
]  # fmt: skip

if __name__ == "__main__":
    sys.exit("run it through tools/shows.py demo")
