"""Single statements about layouts together: empty stripes, small workspaces, asked exchanges, the
phase switch that moves nothing, each way into the experts."""

import itertools
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from tests.layouts import Ranks, drive, gqa_arch, mla_arch, prompt, resolved, scheduler_for
from tests.matrix.book import Recorder
from tests.matrix.traces import Trace

from anabranch.core.arch import Arch
from anabranch.core.describe import Describer
from anabranch.core.plan import Phase
from anabranch.core.request import Request, SamplingParams

ARCHS = {"mla": mla_arch(), "gqa": gqa_arch()}
ATOL = 1e-4


def scores(arch: Arch, requests: list[Request], **flags: object) -> dict[str, np.ndarray]:
    run = resolved(arch, debug="poison", **flags)
    ranks = Ranks(run)
    try:
        logits, _ = drive(ranks, scheduler_for(run), requests)
    finally:
        ranks.close()
    return logits


def same(got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for key, rows in want.items():
        np.testing.assert_allclose(got[key], rows, atol=ATOL, rtol=0, err_msg=key)


SMALL = {"mla": mla_arch(heads=12, layers=1), "gqa": gqa_arch(heads=12, kv_heads=4, layers=1)}
UNEVEN = (1, 2, 3, 4, 5, 4000)


def drawn(arch: Arch, **flags: object) -> dict[tuple[int, int], np.ndarray]:
    """Logits of each decode step of requests of UNEVEN lengths, by (request, position)."""
    run = resolved(
        arch, debug="poison", max_model_len=4096, kv_pages=80, prefill_chunk=1024, **flags
    )
    ranks, recorder = Ranks(run), Recorder()
    ranks.workers[0].sampler = recorder
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    requests = [
        Request(str(n), prompt(n, n), replace(greedy, seed=i)) for i, n in enumerate(UNEVEN)
    ]
    try:
        drive(ranks, scheduler_for(run), requests)
    finally:
        ranks.close()
    return recorder.seen


@pytest.fixture(scope="module")
def uneven() -> dict[str, dict[tuple[int, int], np.ndarray]]:
    return {name: drawn(arch) for name, arch in SMALL.items()}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stripes", [2, 3, 4])
@pytest.mark.parametrize("name", SMALL)
def test_empty_stripes(name: str, stripes: int, uneven) -> None:
    """Requests of 1 to 5 tokens decode beside one of 4000 (ledger X8)."""
    got = drawn(SMALL[name], tp=stripes, attn_cp=stripes, dcp_exchange="a2a")
    want = uneven[name]
    assert got.keys() == want.keys() and len(want) == 4 * len(UNEVEN)
    for key, row in want.items():
        np.testing.assert_allclose(got[key], row, atol=ATOL, rtol=0, err_msg=str(key))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stripes", [2, 3, 4])
@pytest.mark.parametrize("over", ["attn_cp", "ts"])
@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
def test_contexts_that_span_workspace_chunks(arch: Arch, over: str, stripes: int) -> None:
    """Prefixes of 64k - 1, 64k, 64k + 1 positions and tails of 3 to 13 over a workspace of 64."""
    lengths = [64 * k + d + tail for k, d, tail in
               zip((1, 1, 2, 2, 3), (-1, 0, 1, -1, 0), (3, 5, 7, 11, 13), strict=True)]  # fmt: skip
    requests = [Request(f"s{n}", prompt(n, n), score_from=n - 1) for n in lengths]
    layout = {"tp": stripes, "dcp": stripes, "force": True}
    if over == "attn_cp":
        layout["attn_cp"] = stripes
    if over == "ts" and stripes == 3 and arch is ARCHS["gqa"]:
        layout["page_size"] = 66  # three stripes of a whole page
    flags = {"prefill_chunk": 16, "workspace_tokens": 64}
    same(scores(arch, requests, **flags, **layout), scores(arch, requests))


EXPECTED = {
    "a2a": "all_to_all",
    "flashinfer": "all_to_all",
    "ag_rs": "reduce_scatter",
    "fused": "merge_partials",
    "lse": "all_gather",
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
def test_exchanges_agree_and_the_asked_one_is_in_the_trace(arch: Arch) -> None:
    """Ledger X9. Stripes over cp alone, so that the stripe group makes no other sums."""
    requests = [Request(f"s{n}", prompt(n, n), score_from=k) for n, k in ((9, 4), (70, 66))]
    want = scores(arch, requests)
    shapes: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for route, verb in EXPECTED.items():
        flags = {"tp": 4, "attn_cp": 2, "dcp_exchange": route}
        if route == "lse":
            flags["decode_attn"] = "replicated"
        else:
            flags["dcp_q"] = "gather"
        run = resolved(arch, **flags)
        traces = [Trace() for _ in range(4)]
        ranks = Ranks(run, traces=traces)
        try:
            logits, _ = drive(ranks, scheduler_for(run), requests)
        finally:
            ranks.close()
        same(logits, want)
        group = run.layout.ownership(arch.heads, arch.kv_heads).group(0)
        shapes[route] = [(v, shape) for v, _, shape in traces[0].entries[group]]
        assert any(v == verb for v, _ in shapes[route]), route
    # what only one route sends: packed partials with their lse; FlashInfer's stats of two floats
    assert len({tuple(found) for found in shapes.values()}) == len(EXPECTED)
    assert any(shape[-1:] == (2,) for v, shape in shapes["flashinfer"] if v == "all_to_all")
    assert all(v == "all_gather" for v, _ in shapes["lse"])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
def test_a_phase_switch_moves_nothing(arch: Arch) -> None:
    """Ledger C3: the first decode step makes the calls of any other decode step, no tensor of the
    rank changes its place, and cached rows stay as they were written."""
    run = resolved(arch, tp=4, attn_cp=2, dcp=4, force=True)
    traces = [Trace() for _ in range(4)]
    ranks, scheduler = Ranks(run, traces=traces), scheduler_for(run)
    try:
        scheduler.submit(Request("r", prompt(40, 1), SamplingParams(temperature=0.0, max_tokens=6)))
        calls, places, kept = [], [], []
        while (plan := scheduler.next_step()) is not None:
            for trace in traces:
                trace.entries.clear()
            scheduler.apply(ranks.step(plan))
            calls.append([dict(trace.entries) for trace in traces])
            places.append([w.pool.slots.data_ptr() for w in ranks.workers])
            pages = ranks.workers[0].seats.pages[0, 0]
            size = run.layout.stripes.local_page
            kept.append([w.pool.slots[:, pages * size : pages * size + 10].clone()
                         for w in ranks.workers])  # fmt: skip
    finally:
        ranks.close()
    assert plan is None and len(calls) == 6
    assert calls[0] != calls[1], "prefill and decode make different calls"
    assert all(later == calls[1] for later in calls[2:]), "the switch adds none"
    assert all(where == places[0] for where in places)
    for later in kept[1:]:  # positions 0 to 39 are slots 0 to 9 of each of four stripes
        for before, after in zip(kept[0], later, strict=True):
            assert np.array_equal(before.numpy(), after.numpy())
    said = [m for m in Describer.of(run, 1).moves(Phase.DECODE) if m.at not in ("enter_ffn",)]
    assert {m.verb for m in said} <= {v for calls_ in calls[1][0].values() for v, _, _ in calls_}


WAYS = [
    (moves, dp, shared, dispatch)
    for moves, dp, shared, dispatch in itertools.product(
        ("max", "sum", "v", "auto"), (1, 2), ("sharded", "replicated"), ("gather", "a2a")
    )
]


@pytest.fixture(scope="module")
def routed() -> tuple[list[Request], dict[str, np.ndarray]]:
    requests = [Request(f"s{n}", prompt(n, n), score_from=k) for n, k in ((1, 1), (38, 37), (5, 3))]
    return requests, scores(ARCHS["mla"], requests)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("moves", "dp", "shared", "dispatch"), WAYS)
def test_the_experts_sum_is_done_once(
    moves: str, dp: int, shared: str, dispatch: str, routed
) -> None:
    """Ledger D6 and D11: whichever way rows reach the experts, the logits are the same."""
    requests, want = routed
    got = scores(
        ARCHS["mla"], requests, tp=2, attn_dp=dp, row_moves=moves, shared_experts=shared,
        moe_dispatch=dispatch, residual="sharded",
    )  # fmt: skip
    same(got, want)
