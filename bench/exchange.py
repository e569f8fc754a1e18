"""The fused exchange beside pack + gloo all_to_all + merge: `python bench/exchange.py --ranks 2`.

H 16, D 512, bf16, B 1, 8, 32: one layer's partials to their owners. The baseline is our own C++
pack and merge around gloo, the better of pinned and unpinned; `a2a` is the same around shared
memory. `stored` and `landed` are fused behind an attention's stores, to memory of its own and to
the memory that the group lends. Targets are ratios to a bound, measured by turns with it, as in
collectives.py. `--stress N` makes N fused exchanges with random delays on one rank, over processes
and over threads, each equal in bits to the merge of all members' partials.
"""

import argparse
import json
import sys
import threading
import time

import ranks
import torch
from torch import Tensor

from anabranch import ops
from anabranch.comm.group import Group
from anabranch.comm.transports.threads import ThreadWorld
from anabranch.nn.attention.exchange import FusedRoute, PackRoute

HEADS, WIDTH = 16, 512
BATCHES = (1, 8, 32)
REACH = {1: 5.0, 8: 25.0, 32: 90.0}  # us, two ranks on two cores
BOUND = {1: 4 << 10, 8: 64 << 10, 32: 64 << 10}  # the measured bytes nearest to what a peer is sent
SETS = 8  # of inputs that the stress goes through

Inputs = tuple[list[Tensor], list[Tensor], Tensor, Tensor]


def rank_main(args: argparse.Namespace) -> None:
    world, g = ranks.joined(args)
    bound = ops.bind("cpu", threads=1)
    if args.stress:
        stress(g, args.stress, bound)
    found = []
    for rows in () if args.stress else BATCHES:
        out = torch.randn(rows, HEADS, WIDTH).bfloat16()
        lse = torch.randn(rows, HEADS)
        sink = torch.zeros(HEADS // g.size)
        row: dict[str, object] = {"B": rows}
        pack = PackRoute(g, bound)
        row["a2a"] = ranks.measure(world, lambda p=pack, o=out, s=lse, k=sink: p(o, s, k))
        if g.accepts("merge_partials"):
            fused = FusedRoute(g)
            row["fused"] = ranks.measure(world, lambda f=fused, o=out, s=lse, k=sink: f(o, s, k))
            for name, job in (("stored", stored), ("landed", landed)):
                args_ = g, out, lse, sink
                row[name] = ranks.measure(world, lambda j=job, a=args_: j(*a))
        found.append(row)
    if args.rank == 0:
        print(json.dumps(found))
    world.barrier()


def stored(g: Group, out: Tensor, lse: Tensor, sink: Tensor) -> None:
    """An attention that stores its partials in memory of its own, then the exchange."""
    g.merge_partials(out.clone(), lse.clone(), sink)


def landed(g: Group, out: Tensor, lse: Tensor, sink: Tensor) -> None:
    """An attention that stores its partials in the lent memory, then the exchange."""
    lent = g.landing(*out.shape, out.dtype)
    assert lent is not None
    lent[0].copy_(out)
    lent[1].copy_(lse)
    g.merge_partials(*lent, sink)


def inputs(size: int, me: int, bound: ops.Ops) -> list[Inputs]:
    """Partials of every member and their merge, for the own heads: the same on every rank."""
    made = []
    rng = torch.Generator().manual_seed(7)
    heads = 2
    for i in range(SETS):
        rows = i % 4
        outs = [torch.randn(rows, size * heads, 64, generator=rng).bfloat16() for _ in range(size)]
        stats = [torch.randn(rows, size * heads, generator=rng) * 4 for _ in range(size)]
        stats[i % size][:, ::3] = -torch.inf
        sink = torch.randn(heads, generator=rng)
        own = slice(me * heads, (me + 1) * heads)
        parts = torch.stack([o[:, own] for o in outs]), torch.stack([s[:, own] for s in stats])
        made.append((outs, stats, sink, bound.merge_partials(*parts, sink=sink)[0]))
    return made


def stress(g: Group, times: int, bound: ops.Ops) -> None:
    """SystemExit at the first exchange that differs in a bit. The last member is late at random."""
    cases = inputs(g.size, g.me, bound)
    late = torch.rand(times, generator=torch.Generator().manual_seed(1)) < 0.02
    for i, wait in enumerate(late.tolist()):
        outs, stats, sink, want = cases[i % SETS]
        if wait and g.me == g.size - 1:
            time.sleep(1e-4 * (i % 7))
        got = g.merge_partials(outs[g.me], stats[g.me], sink)
        if not torch.equal(got, want):
            raise SystemExit(f"exchange {i} on rank {g.me} differs from the merge of all partials")


def stress_threads(size: int, times: int) -> None:
    bound = ops.bind("cpu", threads=1)
    world = ThreadWorld(merge=bound.merge_partials)
    failed: list[BaseException] = []

    def body(rank: int) -> None:
        everyone = tuple(range(size))
        try:
            stress(Group(everyone, rank, world.transport(everyone, rank)), times, bound)
        except BaseException as error:
            failed.append(error)
            world.abort()

    threads = [threading.Thread(target=body, args=(r,)) for r in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failed:
        raise failed[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    ranks.add_arguments(parser)
    parser.add_argument("--stress", type=int, default=0, metavar="N")
    args = parser.parse_args()
    if args.rank is not None:
        return rank_main(args)
    turns, bound = ranks.by_turns(
        lambda: ranks.run("shm", args.ranks, True, []), sorted(set(BOUND.values()))
    )
    shm = ranks.quietest(turns)
    gloo = [ranks.run("gloo", args.ranks, pinned, []) for pinned in (True, False)]
    rows = []
    for i, row in enumerate(shm):
        pinned, unpinned = gloo[0][i]["a2a"]["us"], gloo[1][i]["a2a"]["us"]
        row = {**row, "gloo_pinned_us": pinned, "gloo_unpinned_us": unpinned}
        row["times_faster"] = round(min(pinned, unpinned) / row["fused"]["us"], 1)
        if args.ranks == 2:
            size = BOUND[row["B"]]
            reach = ranks.reach_here(REACH[row["B"]], bound[size], size)
            row["turns_us"] = [turn[i]["fused"]["us"] for turn in turns]
            row |= {"bound_us": bound[size], "bound_bytes": size, "reach_us": reach}
            row["ok"] = row["fused"]["us"] <= reach
        rows.append(row)
        print(json.dumps(row))
    if args.stress:
        ranks.run("shm", args.ranks, True, ["--stress", str(args.stress)])
        start = time.perf_counter()
        stress_threads(args.ranks, args.stress)
        rows.append(
            {"stress": args.stress, "bit_equal": True, "threads_s": time.perf_counter() - start}
        )
        print(json.dumps(rows[-1]))
    ranks.save(args.json, {"ranks": args.ranks, "H": HEADS, "D": WIDTH, "rows": rows})
    if not all(row.get("ok", True) for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
