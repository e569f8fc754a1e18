"""Runs cells one after another, or over worker processes, and says what became of each."""

import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.matrix.cells import Cell


@dataclass(frozen=True)
class Outcome:
    cell: Cell
    seconds: float
    counts: Counter[str]
    error: str | None


class Runner:
    """Runs cells in this process, keeping what one process answered from cell to cell."""

    def __init__(self, seed: int, over: str = "threads") -> None:
        # imported here: a parent that only counts cells needs no torch
        import torch
        from tests.matrix.book import Book

        torch.set_num_threads(1)
        self.seed, self.over = seed, over
        self.books: dict[str, Book] = {}

    def __call__(self, cell: Cell) -> Outcome:
        from tests.matrix.scenario import trial

        started = time.perf_counter()
        counts: Counter[str] = Counter()
        error = None
        try:
            counts = trial(cell, self.books, self.seed, self.over)
        except Exception as problem:  # a cell that breaks is a result, not the end of the run
            error = f"{type(problem).__name__}: {problem}"
        return Outcome(cell, time.perf_counter() - started, counts, error)


_runner: list[Runner] = []
"""The runner of a worker process: a pool has no other place for it."""


def _start(seed: int, over: str) -> None:
    _runner.append(Runner(seed, over))


def _run(cell: Cell) -> Outcome:
    return _runner[0](cell)


def outcomes(
    cells: Sequence[Cell], seed: int, jobs: int, over: str = "threads"
) -> Iterator[Outcome]:
    """Run cells over `jobs` worker processes, or here if there is one. over: threads, shm, gloo."""
    if jobs == 1:
        yield from map(Runner(seed, over), cells)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, _start, (seed, over)) as pool:
        yield from pool.imap_unordered(_run, cells)
