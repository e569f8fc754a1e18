"""A table of costs measured on a real group of ranks."""

import pytest
from tests.comm.ranks import run_threads

from anabranch.comm.calibrate import measure
from anabranch.comm.group import Group
from anabranch.layout.costs import SHIPPED, VERBS, Costs, calibrate


def measured(world, rank: int, size: int) -> Costs:
    members = tuple(range(size))
    return calibrate("threads", measure(Group(members, rank, world.transport(members, rank))))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", [2, 3])
def test_every_verb_has_a_line(size: int) -> None:
    for costs in run_threads("threads", size, measured):
        assert isinstance(costs, Costs)
        for verb in VERBS:
            line = getattr(costs, verb)
            assert line.latency >= 0 and line.rate > 0
            assert line.at(1 << 22) > line.at(1 << 10)
        assert costs != SHIPPED["threads"] and costs.shared
