"""Starts the ranks of a bench as processes and collects what they measured.

Owns pinning and hard limits. A bench file calls `run` in the parent and `joined` in a rank: ranks
are the same file again with `--rank`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from anabranch.comm.endpoint import make_endpoint
from anabranch.comm.group import Group
from anabranch.comm.worlds import World, open_world

Times = dict[str, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", metavar="OUT", help="where the results are written")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)


def run(kind: str, ranks: int, pinned: bool, arguments: list[str], limit: float = 600.0) -> dict:
    """Rank 0's JSON. Pinned ranks have a core each (shared where there are too few)."""
    cores = sorted(os.sched_getaffinity(0))
    endpoint = make_endpoint(kind)
    processes = []
    for rank in range(ranks):
        command = [sys.executable, sys.argv[0], *arguments, "--ranks", str(ranks)]
        command += ["--rank", str(rank), "--endpoint", endpoint.text]
        if pinned:
            command += ["--core", str(cores[rank % len(cores)])]
        output = subprocess.PIPE if rank == 0 else None
        processes.append(subprocess.Popen(command, pass_fds=endpoint.fds, stdout=output))
    endpoint.close()
    try:
        text, _ = processes[0].communicate(timeout=limit)
        for process in processes:
            process.wait(30)
    finally:
        for process in processes:
            process.kill()
    if any(p.returncode for p in processes):
        raise SystemExit(f"{kind}: ranks ended with {[p.returncode for p in processes]}")
    return json.loads(text)


def joined(args: argparse.Namespace) -> tuple[World, Group]:
    """This rank's world and the group of all ranks."""
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    torch.set_num_threads(1)
    world = open_world(args.endpoint, args.rank, args.ranks)
    everyone = tuple(range(args.ranks))
    return world, Group(everyone, args.rank, world.transport(everyone, args.rank))


CALLS = 16
"""Calls of a block, the same on every rank: collectives must be entered equally often."""


def measure(world: World, job: Callable[[], object], blocks: int = 21) -> Times:
    """Microseconds of a collective: median and least of blocks that all ranks start together."""
    for _ in range(CALLS):
        job()
    taken = []
    for _ in range(blocks):
        world.barrier()
        start = time.perf_counter()
        for _ in range(CALLS):
            job()
        taken.append((time.perf_counter() - start) / CALLS * 1e6)
    return {"us": round(statistics.median(taken), 2), "least_us": round(min(taken), 2)}


TURNS = 5
THERE = {4 << 10: 0.5, 64 << 10: 9.0, 1 << 20: 45.0}
"""Microseconds of bound.cpp by bytes on the machine where the targets were set."""


def by_turns(measured: Callable[[], Any], sizes: list[int]) -> tuple[list[Any], dict[int, float]]:
    """What `measured` gives, at TURNS turns with bound.cpp, and the bound's microseconds by bytes.

    Where a virtual machine's cores lie changes from second to second and moves both by a factor of
    three: of either the quietest turn counts.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "bound"
        source = Path(__file__).with_name("bound.cpp")
        compiler = os.environ.get("CXX", "c++")
        build = [compiler, "-O3", "-march=native", "-std=c++17", "-o", str(program), str(source)]
        subprocess.run(build, check=True)
        turns = [(_bounds(program, sizes), measured()) for _ in range(TURNS)]
    return [found for _, found in turns], quietest([bound for bound, _ in turns])


def _bounds(program: Path, sizes: list[int]) -> dict[int, float]:
    """Microseconds of bound.cpp by bytes, the better of its two kinds of stores."""
    cores = [str(c) for c in sorted(os.sched_getaffinity(0))]
    run = [str(program), cores[0], cores[-1], *map(str, sizes)]
    said = subprocess.run(run, check=True, capture_output=True, text=True, timeout=120).stdout
    rows = [json.loads(line) for line in said.splitlines()]
    return {row["bytes"]: min(row["stored_us"], row["streamed_us"]) for row in rows}


def quietest(turns: list[Any]) -> Any:
    """The least of every number in results of one form."""
    first = turns[0]
    if isinstance(first, dict):
        return {key: quietest([turn[key] for turn in turns]) for key in first}
    if isinstance(first, list):
        return [quietest(list(same)) for same in zip(*turns, strict=True)]
    return min(turns) if isinstance(first, int | float) else first


def reach_here(reach: float, bound: float, bytes_: int) -> float:
    """A target in us, as the ratio to the bound for `bytes_` that it is; never less than itself."""
    return round(reach * max(1.0, bound / THERE[bytes_]), 2)


def save(path: str | None, result: dict) -> None:
    if path is not None:
        with open(path, "w") as file:
            json.dump(result, file, indent=1)
            file.write("\n")
