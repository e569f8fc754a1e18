"""A rank's place in the tree: what is settled before it meets the others."""

from types import SimpleNamespace

import pytest
from tests.core.refusals import BIG
from tests.layouts import mla_arch

from anabranch.core.config import EngineConfig
from anabranch.core.resolve import resolve
from anabranch.engine import ranks
from anabranch.engine.protocol import Endpoint


def test_a_world_is_joined_with_the_ranks_own_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More threads than a rank has cores would wait for one another in every large copy."""
    seen: list[object] = []

    def join(*told: object) -> SimpleNamespace:
        seen.extend(told)
        return SimpleNamespace(abort=None)

    monkeypatch.setattr(ranks, "open_world", join)
    run = resolve(EngineConfig(tp=2, threads=3), mla_arch(), BIG)
    ranks.RankMaker(run, "", Endpoint(ranks=(1,), meeting="shm:none"))
    assert seen == ["shm:none", 1, 2, ranks.COLLECTIVE_SECONDS, 3]
