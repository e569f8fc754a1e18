"""Every verb and v-form over shared memory and gloo: `python bench/collectives.py --ranks 2`.

Bytes are those each rank puts into the verb. gloo is the better of pinned and unpinned; c_us is the
C++ verb into a given result, without the making of a tensor. bound_us is a plain copy, flag and add
of as many bytes between two pinned processes (bound.cpp, compiled here). A target is a ratio to
that bound, as both were measured where it was set; it never asks for less than its microseconds
there. They are measured by turns, and each figure is the median of its quietest turn (`turns_us`
has them all). Ends with 1 when a target that applies is missed.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable

import ranks
import torch

from anabranch import ops
from anabranch.comm.group import Group
from anabranch.comm.transports.shm import ShmTransport

Job = Callable[[], object]

SIZES = (4 << 10, 64 << 10, 1 << 20)
MANY = (10_240, 102_400)  # measured too from 8 ranks on
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
WIDTH = 16  # elements of a row

REACH = {4 << 10: 3.0, 64 << 10: 10.0, 1 << 20: 60.0}  # us, two ranks on two cores, from Python
REACH_MANY = {10_240: 5.0, 102_400: 15.0}  # us, 8 ranks or more on as many cores


def ragged(rows: int, size: int) -> list[int]:
    """Rows of each member: half and one and a half of an even share, by turns; in all `rows`."""
    share = rows // size
    counts = [share + (share // 2 if i % 2 else -(share // 2)) for i in range(size)]
    counts[-1] += rows - sum(counts)
    return counts


def jobs(g: Group, nbytes: int, dtype: torch.dtype) -> dict[str, tuple[Job, Job | None]]:
    """Of each verb: the call through the group, and the C++ verb into a given result."""
    rows = nbytes // dtype.itemsize // WIDTH
    x = torch.randn(rows, WIDTH).to(dtype)
    size, me = g.size, g.me
    even = [rows // size + (i < rows % size) for i in range(size)]
    uneven = ragged(rows, size)
    gathered = ragged(rows * size, size)
    own = torch.randn(gathered[me], WIDTH).to(dtype)
    table = [uneven[(i + me) % size] for i in range(size)]
    back = [uneven[(me + i) % size] for i in range(size)]
    sent = torch.randn(sum(table), WIDTH).to(dtype)
    found: dict[str, tuple[Job, Job | None]] = {
        "all_gather": (lambda: g.all_gather(x, [rows] * size), None),
        "all_gather_v": (lambda: g.all_gather(own, gathered), None),
        "reduce_scatter": (lambda: g.reduce_scatter(x, even), None),
        "reduce_scatter_v": (lambda: g.reduce_scatter(x, uneven), None),
        "all_reduce": (lambda: g.all_reduce(x), None),
        "all_to_all": (lambda: g.all_to_all(x, even, [even[me]] * size), None),
        "all_to_all_v": (lambda: g.all_to_all(sent, table, back), None),
        "broadcast": (lambda: g.broadcast(x, 0), None),
        "exchange": (lambda: g.shift(x, rows), None),
    }
    if isinstance(g.transport, ShmTransport):
        c = g.transport.native
        whole, part, same = (
            torch.empty(rows * size, WIDTH, dtype=dtype),
            x[: even[me]].clone(),
            x.clone(),
        )
        counts = [rows] * size
        found["all_gather"] = (found["all_gather"][0], lambda: c.all_gather(x, counts, whole))
        found["reduce_scatter"] = (
            found["reduce_scatter"][0], lambda: c.reduce_scatter(x, even, part)
        )  # fmt: skip
        found["all_reduce"] = (found["all_reduce"][0], lambda: c.all_reduce(x, same))
    return found


def rank_main(args: argparse.Namespace) -> None:
    """Measures in one rank; rank 0 prints."""
    world, g = ranks.joined(args)
    found = []
    for nbytes in map(int, args.sizes.split(",")):
        for name, dtype in DTYPES.items():
            for verb, (job, native) in jobs(g, nbytes, dtype).items():
                row: dict[str, object] = {"verb": verb, "dtype": name, "bytes": nbytes}
                row |= ranks.measure(world, job)
                if native is not None:
                    row["c_us"] = ranks.measure(world, native)["us"]
                found.append(row)
    if args.rank == 0:
        copies = copy_rows() if isinstance(g.transport, ShmTransport) else []
        print(json.dumps({"rows": found, "copy_rows": copies}))
    world.barrier()


def copy_rows() -> list[dict[str, object]]:
    """The op beside the array library's copy of the same bytes, alone on its core."""
    bound = ops.bind("cpu", threads=1)
    found = []
    for rows, label in ((1, "4 KB"), (1024, "4 MB")):
        src, dst = torch.randn(2 * rows, 1024), torch.zeros(rows, 1024)
        times = {}
        for name, job in (
            ("us", lambda s=src, d=dst, n=rows: bound.copy_rows(d, s, n, n, "scatter")),
            ("copy_us", lambda s=src, d=dst, n=rows: d.copy_(s[n:])),
        ):
            times[name] = ranks.measure(Alone(), job)["us"]
        found.append({"size": label, **times, "of_bound": round(times["copy_us"] / times["us"], 3)})
    return found


class Alone:
    """A world of one, for what is measured in one rank."""

    def barrier(self) -> None:
        return


def verdict(row: dict, ranks_: int, cores: int, bound: float) -> float | None:
    """The target in us that applies to a row, if any."""
    if ranks_ > cores or row["verb"] not in ("all_gather", "reduce_scatter", "all_reduce"):
        return None
    if ranks_ > 2:
        return REACH_MANY.get(row["bytes"]) if ranks_ >= 8 else None
    if row["bytes"] not in REACH:
        return None
    reach = REACH[row["bytes"]] * (2 if row["verb"] == "all_reduce" else 1)
    return ranks.reach_here(reach, bound, row["bytes"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    ranks.add_arguments(parser)
    parser.add_argument("--sizes", help="bytes per rank, comma list")
    args = parser.parse_args()
    if args.rank is not None:
        return rank_main(args)
    sizes = args.sizes or ",".join(map(str, (*SIZES, *(MANY if args.ranks >= 8 else ()))))
    passed = ["--sizes", sizes]
    turns, bound = ranks.by_turns(
        lambda: ranks.run("shm", args.ranks, True, passed), [int(s) for s in sizes.split(",")]
    )
    shm = ranks.quietest(turns)
    for i, row in enumerate(shm["rows"]):
        row["turns_us"] = [turn["rows"][i]["us"] for turn in turns]
    gloo = [ranks.run("gloo", args.ranks, pinned, passed)["rows"] for pinned in (True, False)]
    rows, cores = [], len(os.sched_getaffinity(0))
    for i, row in enumerate(shm["rows"]):
        pinned, unpinned = gloo[0][i]["us"], gloo[1][i]["us"]
        row = {**row, "gloo_pinned_us": pinned, "gloo_unpinned_us": unpinned}
        row["times_faster"] = round(min(pinned, unpinned) / row["us"], 1)
        row["bound_us"] = bound[row["bytes"]]
        reach = verdict(row, args.ranks, cores, row["bound_us"])
        rows.append(row if reach is None else {**row, "reach_us": reach, "ok": row["us"] <= reach})
        print(json.dumps(rows[-1]))
    print(json.dumps(shm["copy_rows"]))
    ranks.save(
        args.json,
        {"ranks": args.ranks, "cores": cores, "rows": rows, "copy_rows": shm["copy_rows"]},
    )
    if not all(row.get("ok", True) for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
