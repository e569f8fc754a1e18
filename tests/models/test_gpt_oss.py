"""gpt-oss against transformers: logits and greedy tokens under every kind of layout."""

import dataclasses

import numpy as np
import pytest
import torch
from tests.layouts import prompt, resolved, run_layout
from tests.models.places import places, recipes
from tests.models.tiny import make

from anabranch.core.arch import GQA
from anabranch.core.arch_reader import read_arch
from anabranch.core.request import Request, SamplingParams
from anabranch.weights.readers.safetensors import SafetensorsReader

LAYOUTS = {
    "one process": {},
    "tp2": {"tp": 2},
    "tp4, experts by width and index": {"tp": 4, "ep": 2},
    "cp2 + decode TP, whole KV": {"tp": 2, "attn_cp": 2, "dcp": 1},
    "cp2 + decode TP, stripes": {"tp": 2, "attn_cp": 2, "dcp": 2},
    "cp4 + decode TP, stripes, ag_rs": {"tp": 4, "attn_cp": 4, "dcp": 4, "dcp_exchange": "ag_rs"},
    "dcp2 over tp": {"tp": 2, "dcp": 2, "dcp_exchange": "a2a", "force": True},
    "dcp2, computed queries": {
        "tp": 4,
        "attn_cp": 2,
        "dcp": 4,
        "force": True,
        "dcp_q": "replicate",
    },
    "attn-dp2": {"tp": 4, "attn_dp": 2, "ep": 4, "moe_dispatch": "a2a"},
    "attn-dp2 x cp2, stripes": {"tp": 4, "attn_dp": 2, "attn_cp": 2, "dcp": 2},
    "cp2, replicated decode, lse": {"tp": 2, "attn_cp": 2, "dcp": 2, "decode_attn": "replicated"},
    "cp2, replicated decode, whole": {"tp": 2, "attn_cp": 2, "dcp": 1, "decode_attn": "replicated"},
}
SCORED = [(70, 64), (1, 1), (130, 120), (9, 5)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make("GptOss", tmp_path_factory.mktemp("gpt_oss"))


@pytest.fixture(scope="module")
def batch(tiny):
    """Requests with what transformers says of them."""
    scored = [Request(f"s{i}", prompt(n, i), score_from=k) for i, (n, k) in enumerate(SCORED)]
    greedy = SamplingParams(temperature=0.0, max_tokens=6)
    written = [Request(f"g{i}", prompt(n, 40 + i), greedy) for i, n in enumerate((5, 33))]
    logits = {r.id: tiny.score(r.prompt).numpy() for r in scored}
    return scored + written, logits, {r.id: tiny.greedy(r.prompt, 6) for r in written}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_transformers(layout: str, tiny, batch) -> None:
    requests, want_logits, want_tokens = batch
    arch, reader = read_arch(tiny.config), SafetensorsReader(tiny.folder)
    logits, tokens = run_layout(arch, requests, reader=reader, prefill_chunk=32, **LAYOUTS[layout])
    assert {k: v for k, v in tokens.items() if v} == want_tokens
    for key, want in want_logits.items():
        assert want.std() > 1
        np.testing.assert_allclose(logits[key], want, atol=1e-4, rtol=0, err_msg=key)


def test_facts_are_exercised(tiny) -> None:
    """The checkpoint's sinks take weight, its activations are clamped, its windows hide keys."""
    seen: list[torch.Tensor] = []
    experts = tiny.model.model.layers[0].mlp.experts
    real = experts._apply_gate
    experts._apply_gate = lambda both: seen.append(both) or real(both)
    ids = prompt(64, 1)
    want = tiny.score(ids)
    experts._apply_gate = real
    assert (torch.cat(seen).abs() > 7).float().mean() > 0.01
    for layer in tiny.model.model.layers:
        layer.self_attn.sinks.data -= 50
    without = tiny.score(ids)
    for layer in tiny.model.model.layers:
        layer.self_attn.sinks.data += 50
    assert (want - without).abs().max() > 0.1
    attn = read_arch(tiny.config).attn
    assert isinstance(attn, GQA) and attn.windows == (20, None, 20) and attn.sinks


def test_row_parallel_biases_have_one_owner(tiny) -> None:
    """T4: of the ranks that cut an expert's width, one holds its down bias; o_bias is whole."""
    arch = read_arch(tiny.config)
    run = resolved(arch, tp=4, ep=2)
    held = [
        {p.name: p for p in recipe}.get("layers.0.moe.down_bias") for recipe in recipes(run, arch)
    ]
    assert [p is not None for p in held] == [True, False, True, False]
    covered = [p.sources[0].ranges[0] for p in held if p is not None]
    assert covered == [(0, 5), (5, 10)]
    assert all(
        place.expert_width(56)[0] == 0
        for place, p in zip(places(run, arch), held, strict=False)
        if p
    )


def test_absent_parameters_are_absent(tiny) -> None:
    """T4: a model without biases and sinks has no such parameter, and one with them has each."""
    arch = read_arch(tiny.config)
    bare = dataclasses.replace(
        arch,
        attn=dataclasses.replace(arch.attn, qkv_bias=False, o_bias=False, sinks=False),
    )
    (full,), (less,) = recipes(resolved(arch), arch), recipes(resolved(bare), bare)
    gone = {p.name for p in full} - {p.name for p in less}
    each = {"q_bias", "k_bias", "v_bias", "o_bias", "sinks"}
    assert gone == {f"layers.{i}.attn.{part}" for i in range(3) for part in each}


def test_released_config_gives_the_same_facts(tiny) -> None:
    """The release writes rope_scaling and rope_theta, transformers 5 rope_parameters."""
    rope = dict(tiny.config["rope_parameters"])
    written = {k: v for k, v in tiny.config.items() if k != "rope_parameters"}
    released = written | {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    assert read_arch(released) == read_arch(tiny.config)
