"""Every verb and v-form x dtype x group size x zero rows, against numpy, over every transport."""

import pytest
from tests.comm.ranks import run_processes, run_threads
from tests.comm.verbs import DTYPES, check_gather, check_reduce, every_verb

from anabranch.comm.group import Group

FLOOR = {2: 350, 4: 350, 8: 350}
"""Checks of the rank that makes the fewest: a body that skips its cases fails."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", (2, 4))
def test_threads(size: int) -> None:
    assert min(run_threads("threads", size, every_verb)) >= FLOOR[size]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", (2, 4, 8))
def test_shm_processes(size: int) -> None:
    assert min(run_processes("shm", size, every_verb)) >= FLOOR[size]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", (4, 8))
def test_shm_in_slices(size: int) -> None:
    """Slots of one page and a bit: nearly every payload travels in several slices."""
    assert min(run_processes("shm", size, every_verb, slot=5056)) >= FLOOR[size]


@pytest.mark.timeout(120)
def test_shm_threads() -> None:
    """The waits let other threads of the process run."""
    assert min(run_threads("shm", 3, every_pair)) >= 1


def every_pair(world, rank: int, size: int) -> int:
    g = Group((0, 1, 2), rank, world.transport((0, 1, 2), rank))
    return sum(
        check_gather(g, d, (7,), [n, 0, 3]) + check_reduce(g, d, (5,), n)
        for d in DTYPES
        for n in range(1, 40)
    )


@pytest.mark.timeout(180)
@pytest.mark.parametrize("size", (2, 4))
def test_gloo(size: int) -> None:
    assert min(run_processes("gloo", size, every_verb, limit=150, timeout=60)) >= FLOOR[size]
