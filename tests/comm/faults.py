"""Bodies of the fault tests: a rank that ends, stops, disagrees; ranks that share cores."""

import os
import signal
import time

import torch

from anabranch.comm.group import CommError, Group
from anabranch.comm.worlds import open_world


def group_of(world, rank: int, size: int) -> Group:
    members = tuple(range(size))
    return Group(members, rank, world.transport(members, rank))


def gather_until(world, rank: int, size: int, victim: int, how: str) -> tuple[str, float]:
    """All gather; the victim kills or stops itself. Returns the error and its delay."""
    g = group_of(world, rank, size)
    x = torch.full((4, 8), float(rank))
    for _ in range(20):
        g.all_gather(x, [4] * size)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    start = time.monotonic()
    try:
        g.all_gather(x, [4] * size)
    except CommError as error:
        return str(error), time.monotonic() - start
    return "no error", 0.0


def late_peer(world, rank: int, size: int) -> dict[str, list[float]]:
    """Rank 1 comes late to its verbs, by little, then by much: how long rank 0 then spins."""
    g = group_of(world, rank, size)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    x = torch.ones(4, 8)
    spins: dict[str, list[float]] = {}
    for name, late, times in (("little", 4e-4, 30), ("much", 2e-2, 5)):
        spins[name] = [world.spin_seconds]
        for _ in range(times):
            start = time.monotonic()
            while rank == 1 and time.monotonic() - start < late:
                pass
            g.all_gather(x, [4] * size)
            spins[name].append(world.spin_seconds)
    return spins


def disagree(world, rank: int, size: int) -> str:
    """Rank 0 enters another verb than the others."""
    g = group_of(world, rank, size)
    x = torch.ones(size, 8)
    try:
        if rank == 0:
            g.reduce_scatter(x, [1] * size)
        else:
            g.all_gather(x, [size] * size)
    except CommError as error:
        return str(error)
    return "no error"


def disagree_on_counts(world, rank: int, size: int) -> str:
    """Rank 1 expects more rows of rank 0 than it sends."""
    g = group_of(world, rank, size)
    recv = [3 if rank == 1 and i == 0 else 2 for i in range(size)]
    try:
        g.all_to_all(torch.ones(2 * size, 4), [2] * size, recv)
        world.barrier()
    except CommError as error:
        return str(error)
    return "no error"


def give_up(world, rank: int, size: int) -> str:
    """Rank 1 aborts instead of entering."""
    g = group_of(world, rank, size)
    world.barrier()  # else one may still be opening its groups, and be told there
    if rank == 1:
        world.abort()
        return "aborted"
    try:
        g.all_gather(torch.ones(1), [1] * size)
    except CommError as error:
        return str(error)
    return "no error"


def late(world, rank: int, size: int, seconds: float) -> float:
    """Rank 0 comes late once; the time the others waited, and the processor they spent on it."""
    g = group_of(world, rank, size)
    world.barrier()
    start, used = time.monotonic(), time.process_time()
    if rank == 0:
        time.sleep(seconds)
    g.all_gather(torch.ones(1), [1] * size)
    assert rank == 0 or time.monotonic() - start > seconds / 2
    return time.process_time() - used


def exchange_time(world, rank: int, size: int, times: int, core_mask: int | None = None) -> float:
    """Median seconds of an all_gather of 4 KB per rank."""
    g = group_of(world, rank, size)
    x = torch.full((16, 64), float(rank))
    taken = []
    for i in range(times):
        start = time.perf_counter()
        out = g.all_gather(x, [16] * size)
        taken.append(time.perf_counter() - start)
        assert i % 50 or all(bool((out[16 * r] == r).all()) for r in range(size))
    return sorted(taken)[times // 2]


def second_world(world, rank: int, size: int, url: str) -> int:
    """Another world of the same process, over a store at a url; both go on working."""
    other = open_world(f"gloo:{url}", rank, size, 20.0)
    mine = other.transport((0, 1), rank).all_gather(torch.tensor([rank + 1]), [1, 1])
    world.barrier()
    other.barrier()
    return int(mine.sum())


def memory_held(world, rank: int, size: int) -> list[str]:
    """Names this process maps of shared memory that has a name in a file system."""
    g = group_of(world, rank, size)
    g.all_gather(torch.ones(1 << 16), [1 << 16] * size)
    with open("/proc/self/maps") as maps:
        return [line.split()[-1] for line in maps if "/dev/shm" in line]
