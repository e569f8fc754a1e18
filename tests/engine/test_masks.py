"""Core masks on made-up machines, exactly; and the reader on this one."""

import os

import pytest

from anabranch.engine.masks import (
    Core,
    Masks,
    Topology,
    choose_masks,
    parse_cores,
    read_topology,
)


def machine(nodes: int, per_node: int, smt: int = 1, first: int = 0) -> tuple[Core, ...]:
    """Linux numbering: first threads of all cores node by node, then their siblings."""
    total = nodes * per_node
    return tuple(
        Core(first + t * total + c, first + c, c // per_node)
        for t in range(smt)
        for c in range(total)
    )


def span(first: int, last: int) -> tuple[int, ...]:
    return tuple(range(first, last + 1))


def test_one_socket_two_cores() -> None:
    small = Topology(machine(1, 2))
    assert choose_masks(small, 1) == Masks(((0, 1),), (0, 1), 2)
    assert choose_masks(small, 2) == Masks(((0,), (1,)), (0, 1), 1)
    assert choose_masks(small, 8) == Masks(((0,),) * 4 + ((1,),) * 4, (0, 1), 1)


def test_two_sockets_of_sixteen_with_smt() -> None:
    """The front gets the second hardware threads; no rank crosses a socket."""
    big = Topology(machine(2, 16, smt=2))
    assert choose_masks(big, 2) == Masks((span(0, 15), span(16, 31)), span(32, 63), 16)
    assert choose_masks(big, 1) == Masks((span(0, 31),), span(32, 63), 32)
    eight = tuple(span(4 * r, 4 * r + 3) for r in range(8))
    assert choose_masks(big, 8) == Masks(eight, span(32, 63), 4)
    three = choose_masks(big, 3)
    assert three.ranks == (span(0, 7), span(8, 15), span(16, 23)) and three.threads == 8
    assert three.front == span(24, 63)


def test_quota_of_three_and_a_half_cores() -> None:
    """Three threads compute, half a core's time is the front's; the kernel picks the cores."""
    limited = Topology(machine(2, 32), quota=3.5)
    assert choose_masks(limited, 1) == Masks((span(0, 63),), span(0, 63), 3)
    assert choose_masks(limited, 2) == Masks((span(0, 31), span(32, 63)), span(0, 63), 1)
    assert choose_masks(Topology(machine(2, 32), quota=8.0), 1).threads == 7
    assert choose_masks(Topology(machine(2, 32), quota=0.5), 1).threads == 1
    assert choose_masks(Topology(machine(1, 4), quota=64.0), 2).threads == 2


def test_cpuset_four_to_seven() -> None:
    part = Topology(machine(1, 4, first=4))
    assert choose_masks(part, 1) == Masks(((4, 5, 6),), (7,), 3)
    assert choose_masks(part, 2) == Masks(((4, 5), (6, 7)), (4, 5, 6, 7), 2)
    assert choose_masks(part, 3) == Masks(((4,), (6,), (7,)), (5,), 1)


def test_four_nodes_eight_ranks() -> None:
    """Two neighbours on each node."""
    wide = Topology(machine(4, 8))
    assert choose_masks(wide, 8).ranks == tuple(span(4 * r, 4 * r + 3) for r in range(8))
    assert choose_masks(wide, 8).front == span(0, 31)
    four = choose_masks(wide, 4)
    assert four.ranks == tuple(span(8 * r, 8 * r + 6) for r in range(4)) and four.threads == 7
    assert four.front == (7, 15, 23, 31)
    two = choose_masks(wide, 2)
    assert two.ranks == (span(0, 14), span(16, 30)) and two.front == (15, 31)


def test_aarch64_without_smt() -> None:
    arm = Topology(machine(1, 64))
    found = choose_masks(arm, 4)
    assert found.ranks == (span(0, 14), span(16, 30), span(32, 46), span(48, 62))
    assert found.front == (15, 31, 47, 63) and found.threads == 15
    assert choose_masks(arm, 1) == Masks((span(0, 62),), (63,), 63)


def test_two_hardware_threads_of_one_core_compute() -> None:
    virtual = Topology(machine(1, 1, smt=2))
    assert choose_masks(virtual, 1) == Masks(((0, 1),), (0, 1), 2)
    assert choose_masks(virtual, 2) == Masks(((0,), (1,)), (0, 1), 1)


def test_no_core() -> None:
    with pytest.raises(ValueError, match="no core"):
        choose_masks(Topology(()), 1)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
@pytest.mark.parametrize("per_node", [1, 3, 8])
@pytest.mark.parametrize("smt", [1, 2])
@pytest.mark.parametrize("quota", [None, 0.3, 2.0, 5.5])
def test_always_sound(nodes: int, per_node: int, smt: int, quota: float | None) -> None:
    topology = Topology(machine(nodes, per_node, smt), quota)
    every = {c.cpu for c in topology.cores}
    for ranks in (1, 2, 3, 4, 6, 8, 16):
        found = choose_masks(topology, ranks)
        assert len(found.ranks) == ranks and found.front and set(found.front) <= every
        assert all(mask and set(mask) <= every for mask in found.ranks)
        assert all(len(mask) >= found.threads >= 1 for mask in found.ranks)
        assert quota is None or found.threads * ranks <= max(quota, ranks)
        used = [cpu for mask in found.ranks for cpu in mask]
        if quota is None and nodes * per_node >= max(ranks, 4):
            assert len(set(used)) == len(used)


def test_parse_cores() -> None:
    assert parse_cores("0-3,8\n") == (0, 1, 2, 3, 8)
    for bad in ("", "a", "3-1", "1,,2", "-1"):
        with pytest.raises(ValueError, match="--cores"):
            parse_cores(bad)


def test_this_machine() -> None:
    topology = read_topology()
    assert {c.cpu for c in topology.cores} == os.sched_getaffinity(0)
    one = min(os.sched_getaffinity(0))
    assert [c.cpu for c in read_topology(str(one)).cores] == [one]
    with pytest.raises(ValueError, match="may not use"):
        read_topology("100000")
