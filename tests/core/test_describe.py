"""What `anabranch layout` says moves is what a traced step moves, verb by verb and byte by byte."""

from collections import Counter
from collections.abc import Mapping

import pytest
from tests.layouts import Ranks, gqa_arch, mla_arch, prompt, resolved, scheduler_for
from torch import Tensor

from anabranch.core.abilities import partial_width
from anabranch.core.arch import Arch
from anabranch.core.describe import Describer, describe, places
from anabranch.core.plan import Phase
from anabranch.core.request import Request, SamplingParams
from anabranch.layout.mesh import EVERY
from anabranch.models.registry import family

ROWS = 8
LAYOUTS: Mapping[str, Mapping[str, object]] = {
    "tp": {"tp": 4},
    "dp": {"tp": 4, "attn_dp": 2, "ep": 2},
    "dp a2a": {"tp": 4, "attn_dp": 4, "ep": 4, "moe_dispatch": "a2a"},
    "cp": {"tp": 4, "attn_cp": 2, "dcp_exchange": "a2a", "dcp_q": "gather"},
    "cp ag_rs": {"tp": 4, "attn_cp": 2, "dcp": 4, "dcp_exchange": "ag_rs", "dcp_q": "gather"},
    "fused, computed": {"tp": 4, "attn_cp": 4, "dcp_exchange": "fused", "dcp_q": "replicate"},
    "lse": {"tp": 4, "attn_cp": 2, "decode_attn": "replicated"},
    "whole": {"tp": 4, "attn_cp": 2, "dcp": 1, "decode_attn": "replicated"},
}
ROUTED = ("dispatch", "combine")


class Counting:
    """Bytes put into each (verb, members), while listening."""

    def __init__(self) -> None:
        self.found: Counter[tuple[str, tuple[int, ...], int]] = Counter()
        self.on = False

    def __call__(self, verb: str, members: tuple[int, ...], x: Tensor) -> None:
        if self.on:
            self.found[verb, members, x.numel() * x.element_size()] += 1


@pytest.mark.parametrize("residual", ["auto", "sharded", "replica"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arch", [mla_arch(layers=3), gqa_arch()], ids=["mla", "gqa"])
def test_a_decode_step_moves_what_is_said(arch: Arch, layout: str, residual: str) -> None:
    run = resolved(arch, residual=residual, row_moves="v", force=True, **LAYOUTS[layout])
    mesh = run.layout.mesh
    traces = [Counting() for _ in range(mesh.world)]
    ranks, scheduler = Ranks(run, traces=traces), scheduler_for(run)
    try:
        for i in range(ROWS * mesh.dp):
            greedy = SamplingParams(temperature=0.0, max_tokens=3)
            scheduler.submit(Request(str(i), prompt(4, i), greedy))
        plan = scheduler.next_step()
        assert plan is not None
        scheduler.apply(ranks.step(plan))
        traces[0].on = True
        plan = scheduler.next_step()
        assert plan is not None and all(r.decode.rows == ROWS for r in plan.replicas)
        ranks.step(plan)
    finally:
        ranks.close()
    view = Describer.of(run, ROWS)
    moe = arch.moe
    assert moe is not None
    sparse = sum(moe.is_moe(i) for i in range(arch.layers))
    for move in view.moves(Phase.DECODE):
        members = mesh.group(0, frozenset(move.axes))
        if move.at in ROUTED:  # how many rows travel is data
            assert any(v == move.verb and m == members for v, m, _ in traces[0].found)
        elif move.at == "enter_ffn" and run.layout.moe_dispatch == "gather":
            width = run.arch.hidden * 4
            rows = move.bytes // (width + moe.top_k * 8)
            assert traces[0].found[move.verb, members, rows * width] >= arch.layers
            assert traces[0].found[move.verb, members, rows * moe.top_k * 8] >= sparse
        elif move.verb == "merge_partials":  # the trace shows the outputs, without their lse
            width = partial_width(arch)
            outputs = move.bytes * width // (width + 1)
            assert traces[0].found[move.verb, members, outputs] == arch.layers
        else:
            wanted = sparse if "shared" in move.at else arch.layers
            assert traces[0].found[move.verb, members, move.bytes] >= wanted, move
    said = {(m.verb, mesh.group(0, frozenset(m.axes))) for m in view.moves(Phase.DECODE)}
    ends = {("all_gather", m) for m in (mesh.replica(0), mesh.group(0, EVERY))}
    shared = {(v, mesh.group(0, EVERY)) for v in ("all_gather", "reduce_scatter", "all_reduce")}
    unsaid = {(v, m) for v, m, _ in traces[0].found} - said - ends
    assert unsaid <= (shared if layout == "dp a2a" else set()), "a move that nobody was told of"


def test_json_has_the_frozen_names() -> None:
    run = resolved(mla_arch(), tp=8, attn_dp=2, attn_cp=2, ep=4)
    sizes = [
        sum(p.elements for p in family(run.arch).recipe(run.arch, p_)) * 4 for p_ in places(run)
    ]
    found = describe(run, sizes)
    assert found["world"] == 8 and found["weight_bytes_per_rank"] == max(sizes)
    ranks = found["ranks"]
    assert isinstance(ranks, list)
    assert ranks[5] == {"rank": 5, "dp": 1, "cp": 0, "tp": 1, "stripe": 0, "ep": 2}
    phases = found["phases"]
    assert isinstance(phases, dict)
    assert set(phases) == {"prefill", "decode", "moves"}
    for name in ("prefill", "decode"):
        for move in phases[name]["moves"]:
            assert set(move) == {"phase", "at", "verb", "axes", "bytes"} and move["bytes"] > 0
    assert phases["moves"] == phases["prefill"]["moves"] + phases["decode"]["moves"]
    assert found["kv_bytes_per_token_per_rank"] == 2 * 40 * 4 / 2 and found["kv_copies"] == 2
