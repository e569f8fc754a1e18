"""Times of the verbs of a group, for `layout.costs.calibrate`: every member calls it alike.

As a program it is one rank of that group: `python -m anabranch.comm.calibrate ENDPOINT RANK SIZE`;
rank 0 prints the table of the endpoint's transport as JSON. Owns how a verb is timed. What the
figures are for, and where they are kept, is not known here.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

import torch

from anabranch.comm.group import Group
from anabranch.comm.worlds import open_world
from anabranch.layout.costs import calibrate

WARM, TIMES = 5, 25
WIDTH = 64
"""Elements of a row: 256 bytes of fp32."""


def measure(group: Group) -> Callable[[str, int], float]:
    """The function `calibrate` asks: (verb, bytes this rank puts in) -> median us of one call.

    All members must call it with the same arguments in the same order.
    """

    def timed(verb: str, nbytes: int) -> float:
        call = _call(group, verb, nbytes)
        spent = []
        for i in range(WARM + TIMES):
            started = time.perf_counter()
            call()
            if i >= WARM:
                spent.append((time.perf_counter() - started) * 1e6)
        return statistics.median(spent)

    return timed


def _call(group: Group, verb: str, nbytes: int) -> Callable[[], object]:
    size = group.size
    rows = max(nbytes // (WIDTH * 4) // size, 1) * size
    x = torch.ones(rows, WIDTH)
    shares, equal = [rows // size] * size, [rows] * size
    if verb == "copy":
        target = torch.empty_like(x)
        return lambda: target.copy_(x)
    if verb == "fused":
        out, lse = x.view(rows // size, size, WIDTH), torch.zeros(rows // size, size)
        return lambda: group.merge_partials(out, lse, None)
    calls: dict[str, Callable[[], object]] = {
        "all_gather": lambda: group.all_gather(x, equal),
        "reduce_scatter": lambda: group.reduce_scatter(x, shares),
        "all_reduce": lambda: group.all_reduce(x),
        "all_to_all": lambda: group.all_to_all(x, shares, shares),
        "exchange": lambda: group.shift(x, rows),
    }
    return calls[verb]


def main(endpoint: str, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    world = open_world(endpoint, rank, size)
    members = tuple(range(size))
    group = Group(members, rank, world.transport(members, rank))
    found = calibrate(endpoint.partition(":")[0], measure(group))
    world.barrier()
    if rank == 0:
        print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
