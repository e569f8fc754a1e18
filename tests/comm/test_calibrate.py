"""A table of costs measured on a real group of ranks."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from tests.comm.ranks import run_threads

from anabranch.cli.main import run
from anabranch.comm.calibrate import measure
from anabranch.comm.endpoint import KINDS, choose_transport
from anabranch.comm.group import Group
from anabranch.layout.costs import SHIPPED, VERBS, Costs, calibrate, load


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


@pytest.mark.timeout(120)
def test_the_flag_writes_what_later_starts_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path))
    assert run(["env", "--calibrate", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    kinds = [k for k in KINDS if k == "gloo" or choose_transport("auto") == "shm"]
    assert set(told) == set(kinds)
    for kind in kinds:
        kept = load(tmp_path / "costs.json", kind)
        assert asdict(kept) == told[kind] and kept != SHIPPED[kind]
        assert all(getattr(kept, verb).rate > 0 for verb in VERBS)
    assert load(tmp_path / "costs.json", "threads") == SHIPPED["threads"]
