"""Which cores each rank may use: a pure function of the machine, and the reader of a real one.

Ranks are spread over NUMA nodes in rank order, so that neighbours, which talk most, share a node.
They work in lockstep, so all get equally many cores: one hardware thread of each physical core. The
front (HTTP, text) gets what is left: second hardware threads and cores that do not divide; where
nothing is left, a core of its own if that costs little, and else time on everybody's cores.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
_SYSTEM = Path("/sys/devices/system")
_FEW = 4  # below this many physical cores, second hardware threads compute too
_GIVES_UP_ONE = (
    4,
    8,
)  # cores of an only rank, or of each of several, from which one is the front's


@dataclass(frozen=True)
class Core:
    """A hardware thread: its number, its physical core (a number unique on the host), its node."""

    cpu: int
    core: int
    node: int


@dataclass(frozen=True)
class Topology:
    """The hardware threads this process may use, and how much of them its cgroup grants.

    quota: CPU seconds per second, or None without a limit.
    """

    cores: tuple[Core, ...]
    quota: float | None = None


@dataclass(frozen=True)
class Masks:
    """ranks: hardware threads of each rank, in rank order. front: those of the front process.

    threads: compute threads of a rank.
    """

    ranks: tuple[tuple[int, ...], ...]
    front: tuple[int, ...]
    threads: int


def choose_masks(topology: Topology, ranks: int) -> Masks:
    """Masks for `ranks` ranks. ValueError if there is no core at all.

    With fewer cores than ranks, neighbours share a core. Under a cgroup's quota ranks get fewer
    threads, as more would only be throttled, but no cores of their own: the quota's other holders
    would pick the same ones, so the kernel chooses, within a rank's share of the nodes.
    """
    if not topology.cores:
        raise ValueError("there is no core to run on; check --cores and the process's CPU mask")
    every = tuple(sorted(c.cpu for c in topology.cores))
    cores = _computing(topology, ranks)
    if len(cores) < ranks:
        shared = tuple((cores[r * len(cores) // ranks].cpu,) for r in range(ranks))
        return Masks(shared, every, 1)
    parts = _cut(cores, ranks)
    size = min(len(part) for part in parts)
    granted = _granted(topology.quota, len(cores))
    if granted < len(cores):
        wide = tuple(tuple(sorted(c.cpu for c in part)) for part in parts)
        return Masks(wide, every, min(size, max(1, granted // ranks)))
    if ranks * size == len(every) and size >= _GIVES_UP_ONE[ranks > 1]:
        size -= 1
    masks = tuple(tuple(sorted(c.cpu for c in part[:size])) for part in parts)
    used = {cpu for mask in masks for cpu in mask}
    front = tuple(cpu for cpu in every if cpu not in used)
    return Masks(masks, front or every, size)


def _computing(topology: Topology, ranks: int) -> list[Core]:
    """The first hardware thread of every physical core, node by node; all if cores are few."""
    found: dict[int, Core] = {}
    for core in sorted(topology.cores, key=lambda c: c.cpu):
        found.setdefault(core.core, core)
    cores = found.values() if len(found) >= max(ranks, _FEW) else topology.cores
    return sorted(cores, key=lambda c: (c.node, c.cpu))


def _granted(quota: float | None, cores: int) -> int:
    """Cores whose full time the quota pays, less one for the front where nothing else is left."""
    if quota is None or quota >= cores:
        return cores
    whole = int(quota)
    spare = quota - whole
    return max(1, whole - 1 if whole >= _FEW and spare < 0.25 else whole)


def _cut(cores: list[Core], ranks: int) -> list[list[Core]]:
    """Contiguous shares, node by node; none crosses a node if there are as many ranks as nodes."""
    nodes = sorted({c.node for c in cores})
    if ranks >= len(nodes):
        per_node = _shares(ranks, [sum(c.node == n for c in cores) for n in nodes])
        own = [[c for c in cores if c.node == n] for n in nodes]
        return [
            part
            for members, count in zip(own, per_node, strict=True)
            for part in _even(members, count)
        ]
    groups = _even(nodes, ranks)
    return [[c for c in cores if c.node in group] for group in groups]


def _shares(ranks: int, sizes: Sequence[int]) -> list[int]:
    """How many ranks each node hosts: in proportion to its cores, from one to its cores."""
    counts = [1] * len(sizes)
    for _ in range(ranks - len(sizes)):
        open_nodes = [i for i, n in enumerate(counts) if n < sizes[i]]
        roomiest = max(open_nodes, key=lambda i: (sizes[i] / (counts[i] + 1), -i))
        counts[roomiest] += 1
    return counts


def _even(items: Sequence[T], parts: int) -> list[list[T]]:
    """Contiguous parts whose sizes differ by one at most, the larger ones first."""
    size, more = divmod(len(items), parts)
    ends = [i * size + min(i, more) for i in range(parts + 1)]
    return [list(items[a:b]) for a, b in pairwise(ends)]


def parse_cores(text: str) -> tuple[int, ...]:
    """ "0-3,8" -> (0, 1, 2, 3, 8), the kernel's list format. ValueError for anything else."""
    found: set[int] = set()
    try:
        for part in text.strip().split(","):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    except ValueError:
        raise ValueError(f"--cores {text!r} is not a list such as 0-7,16-23") from None
    if not found:
        raise ValueError(f"--cores {text!r} names no core")
    return tuple(sorted(found))


def read_topology(cores: str | None = None) -> Topology:
    """This machine: the process's mask (narrowed by `cores`), cgroup quota, sysfs topology."""
    usable = os.sched_getaffinity(0)
    if cores is not None:
        asked = set(parse_cores(cores))
        if not asked <= usable:
            raise ValueError(
                f"--cores {cores}: this process may not use {sorted(asked - usable)}; "
                f"it may use {sorted(usable)}"
            )
        usable = asked
    nodes = _nodes()
    return Topology(
        tuple(Core(cpu, _physical(cpu), nodes.get(cpu, 0)) for cpu in sorted(usable)), _quota()
    )


def _nodes() -> dict[int, int]:
    """cpu -> NUMA node; empty where the kernel shows none."""
    found: dict[int, int] = {}
    for folder in (_SYSTEM / "node").glob("node[0-9]*"):
        listed = (folder / "cpulist").read_text().strip()
        if listed:  # nodes of memory alone have no core
            found.update(dict.fromkeys(parse_cores(listed), int(folder.name[4:])))
    return found


def _physical(cpu: int) -> int:
    """The physical core of a hardware thread, named by its first sibling."""
    file = _SYSTEM / f"cpu/cpu{cpu}/topology/thread_siblings_list"
    try:
        return parse_cores(file.read_text())[0]
    except OSError:
        return cpu


def _quota() -> float | None:
    """CPU seconds per second of the cgroup (v2, then v1), or None."""
    try:
        most, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if most == "max" else int(most) / int(period)
    except (OSError, ValueError):
        pass
    try:
        most = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text()
        period = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text()
    except OSError:
        return None
    return int(most) / int(period) if int(most) > 0 else None
