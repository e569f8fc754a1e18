"""Run cells of the layout matrix against one process and count what happened.

    python tools/matrix.py --full                 every accepted cell of issue-size sets
    python tools/matrix.py --dp-only              TP, EP and DP attention
    python tools/matrix.py --full --part 2/6      every sixth of them, from the second on
    python tools/matrix.py --sample 150 --seed 3  a seeded sample
    python tools/matrix.py --census               accepted and refused only

Exit code 1 if a cell failed. `--json` prints one JSON object {accepted, refused, run, failed, ...}.
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.matrix.cells import Census, attention_cells, dp_cells  # noqa: E402
from tests.matrix.run import outcomes  # noqa: E402


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--full", action="store_true", help="run every accepted cell")
    parser.add_argument("--dp-only", action="store_true", help="TP, EP and DP attention only")
    parser.add_argument("--sample", type=int, default=60, help="cells to run without --full")
    parser.add_argument("--part", default="1/1", help="I/N: every Nth cell, from the Ith on")
    parser.add_argument("--seed", type=int, default=0, help="of the sample and of the trials")
    parser.add_argument("--world", type=int, nargs="*", default=[1, 2, 4, 8], help="rank counts P")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument(
        "--over", choices=("threads", "shm", "gloo"), default="threads", help="ranks as"
    )
    parser.add_argument("--census", action="store_true", help="ask resolve, run nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", default="", help="run only cells whose name holds this text")
    parser.add_argument("--verbose", action="store_true", help="print every cell")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    make = dp_cells if args.dp_only else attention_cells
    census = Census.of(make(args.world))
    census.accepted = [c for c in census.accepted if args.only in c.name]
    if args.over == "gloo":  # its peers cannot address each other's memory
        census.accepted = [c for c in census.accepted if c.settings.get("dcp_exchange") != "fused"]
    cells = census.accepted if args.full else census.sample(args.sample, args.seed)
    part, parts = map(int, args.part.split("/"))
    cells = cells[part - 1 :: parts]
    jobs = args.jobs if args.over == "threads" else 1
    started, met, failed = time.perf_counter(), Counter[str](), []
    for outcome in outcomes([] if args.census else cells, args.seed, jobs, args.over):
        met += outcome.counts
        met["run"] += 1
        if outcome.error is not None:
            failed.append({"cell": outcome.cell.name, "why": outcome.error})
        if outcome.error is not None or args.verbose:
            state = outcome.error or "ok"
            print(f"{outcome.seconds:6.2f} s  {outcome.cell.name}  {state}", file=sys.stderr)
    report = {
        "set": "dp" if args.dp_only else "attention",
        "over": args.over,
        "accepted": len(census.accepted),
        "refused": dict(census.refused.most_common()),
        "run": met.pop("run", 0),
        "failed": failed,
        "seed": args.seed,
        "part": args.part,
        "seconds": round(time.perf_counter() - started, 1),
        "met": dict(met.most_common()),
    }
    if args.json:
        print(json.dumps(report))
    else:
        show(report)
    return 1 if failed else 0


def show(report: dict[str, object]) -> None:
    for name, value in report.items():
        if isinstance(value, dict):
            print(f"{name}:")
            for key, count in value.items():
                print(f"  {key:32} {count}")
        else:
            print(f"{name + ':':12} {len(value) if isinstance(value, list) else value}")


if __name__ == "__main__":
    sys.exit(main())
