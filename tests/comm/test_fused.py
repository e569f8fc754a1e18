"""Partials merged where peers see them: bit-equal under delays, equal to every other route."""

import pytest
from tests.comm import fused
from tests.comm.ranks import run_processes, run_threads

from anabranch import ops

# compared with the compiled merge
pytestmark = [pytest.mark.timeout(120), pytest.mark.compiled]

ROUTES = {
    "a2a": ["all_to_all"],
    "flashinfer": ["all_to_all"],
    "ag_rs": ["all_gather", "reduce_scatter"],
    "fused": ["merge_partials"],
}


@pytest.mark.parametrize("size", (2, 3))
def test_processes_are_bit_equal(size: int) -> None:
    assert run_processes("shm", size, fused.stress, 3000) == [3000] * size


def test_slices_are_bit_equal() -> None:
    """A slot that holds two rows of heads."""
    assert run_processes("shm", 3, fused.stress, 600, slot=2048) == [600] * 3


def test_heads_are_cut_where_a_row_is_too_wide() -> None:
    assert run_processes("shm", 3, fused.stress, 300, slot=576) == [300] * 3


def test_threads_over_shared_memory_are_bit_equal() -> None:
    assert run_threads("shm", 3, fused.stress, 600) == [600] * 3


def test_threads_are_bit_equal() -> None:
    merge = ops.bind("cpu").merge_partials
    assert run_threads("threads", 3, fused.stress, 600, merge=merge) == [600] * 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hundred_thousand_exchanges() -> None:
    assert run_processes("shm", 2, fused.stress, 100_000, limit=550) == [100_000] * 2


@pytest.mark.parametrize("kind", ("shm", "threads", "gloo"))
def test_routes_agree_and_are_the_asked_ones(kind: str) -> None:
    run = run_threads if kind == "threads" else run_processes
    for seen in run(kind, 3, fused.routes):
        assert seen == ROUTES
