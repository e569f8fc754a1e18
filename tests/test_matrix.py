"""A seeded sample of the layout matrix: what resolve accepts equals one process (ledger C2).

`tools/matrix.py --full` runs every cell. Here the counts of accepted cells have a floor, each
refusal a place, and the sample must meet what it claims: prefix hits, aborts, uneven rows, extends.
"""

import importlib.util
from collections import Counter

import pytest
from tests.matrix.cells import Cell, Census, attention_cells, dp_cells
from tests.matrix.run import outcomes

from anabranch.comm.endpoint import EXTENSION

SEED = 20
DP_SAMPLE, ATTENTION_SAMPLE, PROCESS_SAMPLE = 60, 150, 5
DP_PARTS, ATTENTION_PARTS = 3, 6  # a sample's parts are tests of their own, to run side by side
KINDS = ["gloo", "shm"] if importlib.util.find_spec(EXTENSION) is not None else ["gloo"]


def run(cells: list[Cell], over: str = "threads") -> Counter[str]:
    """Run the cells; assert that none failed. What the trials met, summed."""
    met: Counter[str] = Counter()
    failed = []
    for outcome in outcomes(cells, SEED, 1, over):
        met += outcome.counts
        if outcome.error is not None:
            failed.append(f"{outcome.cell.name}: {outcome.error}")
    assert not failed, "\n".join(failed)
    return met


def test_enough_cells_are_accepted_and_refusals_are_counted() -> None:
    attention = Census.of(attention_cells())
    assert len(attention.accepted) >= 4000
    assert set(attention.refused) == {
        "stripes_cross_replicas", "stripes_not_legal", "stripes_gain_nothing", "exchange_form",
        "decode_replicated_stripes",
    }  # fmt: skip
    worlds = Counter(cell.settings["tp"] for cell in attention.accepted)
    assert set(worlds) == {1, 2, 4, 8} and worlds[8] > 2000
    dp = Census.of(dp_cells())
    assert len(dp.accepted) == 720 and not dp.refused


def test_samples_cover_every_axis_split_and_model() -> None:
    census = Census.of(attention_cells())
    sample = census.sample(ATTENTION_SAMPLE, SEED)
    assert len({cell.name for cell in sample}) == ATTENTION_SAMPLE

    def splits(cells: list[Cell]) -> set[tuple[object, ...]]:
        return {
            (c.model, *(c.settings[n] for n in ("tp", "attn_dp", "attn_cp", "dcp"))) for c in cells
        }

    assert splits(sample) == splits(census.accepted)
    routes = Counter(str(c.settings.get("dcp_exchange")) for c in sample)
    assert all(routes[r] >= 3 for r in ("a2a", "ag_rs", "fused", "flashinfer", "lse"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(DP_PARTS))
def test_dp_attention_sample(part: int) -> None:
    cells = Census.of(dp_cells()).sample(DP_SAMPLE, SEED)[part::DP_PARTS]
    met = run(cells)
    assert met["rows 1, 0, 37, 5"] >= 7 and met["aborted"] >= len(cells)
    assert met["logprobs"] > 33 and met["generated tokens hit"] > 333


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(ATTENTION_PARTS))
def test_attention_sample(part: int) -> None:
    sample = Census.of(attention_cells()).sample(ATTENTION_SAMPLE, SEED)
    met = run(sample[part::ATTENTION_PARTS])
    assert met["extends in decode"] > 16 and met["generated tokens hit"] > 500
    assert met["drawn rows"] > 833 and met["ties"] < met["drawn rows"] / 100


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_over_processes(kind: str) -> None:
    cells = Census.of(attention_cells()).sample(2 * PROCESS_SAMPLE, SEED + 1)
    fits = [c for c in cells if kind == "shm" or c.settings.get("dcp_exchange") != "fused"]
    run(fits[:PROCESS_SAMPLE], kind)
