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
import time
from collections.abc import Callable

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


def save(path: str | None, result: dict) -> None:
    if path is not None:
        with open(path, "w") as file:
            json.dump(result, file, indent=1)
            file.write("\n")
