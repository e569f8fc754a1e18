"""DeepSeek-V4 (no compressors) against transformers: logits and greedy tokens under every kind of
layout, and its two own layers, attention and hyper-connections, in pieces."""

import numpy as np
import pytest
import torch
from tests.layouts import prompt, resolved, run_layout
from tests.models.tiny import DEEPSEEK_V4, make

from anabranch.core.arch import Hyper
from anabranch.core.arch_reader import read_arch
from anabranch.core.request import Request, SamplingParams
from anabranch.core.resolve import Refusal
from anabranch.nn.attention.shared import GroupedOutput
from anabranch.nn.hyper import HyperConnection, HyperEnds
from anabranch.nn.linear import Dense
from anabranch.weights.readers.safetensors import SafetensorsReader

LAYOUTS = {
    "one process": {},
    "tp2": {"tp": 2},
    "tp4, experts by width and index": {"tp": 4, "ep": 2},
    "tp8, heads cut an output group": {"tp": 8, "ep": 4},
    "cp2 + decode TP, whole KV": {"tp": 2, "attn_cp": 2, "dcp": 1},
    "cp2 + decode TP, stripes": {"tp": 4, "attn_cp": 2, "dcp": 2},
    "cp4 x tp2 + decode TP within a group": {
        "tp": 8,
        "attn_cp": 4,
        "dcp": 4,
        "dcp_exchange": "ag_rs",
    },
    "dcp2 over tp": {"tp": 2, "dcp": 2, "dcp_exchange": "flashinfer"},
    "dcp4 over cp and tp, computed queries": {
        "tp": 4,
        "attn_cp": 2,
        "dcp": 4,
        "dcp_q": "replicate",
    },
    "attn-dp2, embedding cut": {
        "tp": 4,
        "attn_dp": 2,
        "embedding": "sharded",
        "moe_dispatch": "a2a",
    },
    "attn-dp2 x cp2, residual replicated": {
        "tp": 4,
        "attn_dp": 2,
        "attn_cp": 2,
        "residual": "replicated",
    },
    "cp2, replicated decode, lse": {"tp": 2, "attn_cp": 2, "dcp": 2, "decode_attn": "replicated"},
    "cp2, replicated decode, whole": {"tp": 2, "attn_cp": 2, "dcp": 1, "decode_attn": "replicated"},
    "cp2, ring": {"tp": 2, "attn_cp": 2, "kv_to_q": "ring"},
}
SCORED = [(70, 64), (1, 1), (130, 120), (9, 5)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make("DeepseekV4", tmp_path_factory.mktemp("deepseek_v4"))


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


def test_cuts_of_output_groups_are_refused(tiny) -> None:
    """6 heads a rank (4 in decode) cannot be made of groups of 4 (6)."""
    for groups, flags in ((6, {"tp": 4}), (4, {"tp": 6, "attn_cp": 3})):
        arch = read_arch(tiny.config | {"o_groups": groups})
        with pytest.raises(Refusal, match="cuts output groups") as caught:
            resolved(arch, **flags)
        assert caught.value.numbers["group"] == 24 // groups
        assert caught.value.nearest


def test_released_config_gives_the_same_facts(tiny) -> None:
    """The release lists compress_ratios and num_hash_layers, transformers 5 types of layers."""
    released = {"architectures": ["DeepseekV4ForCausalLM"], "dtype": "float32", **DEEPSEEK_V4}
    assert read_arch(released) == read_arch(tiny.config)


def test_compressors_are_refused(tiny) -> None:
    wanted = {"layer_types": None, "compress_ratios": [0, 4, 0]}
    with pytest.raises(ValueError, match="compress_ratios"):
        read_arch(tiny.config | wanted)


@pytest.mark.parametrize("cut", [(0, 24), (0, 12), (12, 24), (6, 12), (9, 12), (6, 8), (23, 24)])
def test_grouped_output_is_a_sum_over_head_slices(cut: tuple[int, int]) -> None:
    """Views of wo_a and wo_b; what heads [low, high) add to the whole projection."""
    torch.manual_seed(0)
    heads, width, groups, r, hidden, rows = 24, 16, 4, 20, 96, 5
    a, b = torch.randn(groups, r, heads * width // groups), torch.randn(hidden, groups * r)
    x = torch.randn(rows, heads * width)
    low, high = cut
    kept = torch.zeros_like(x)
    kept[:, low * width : high * width] = x[:, low * width : high * width]
    inner = torch.einsum("tgw,grw->tgr", kept.view(rows, groups, -1), a).flatten(1)
    part = GroupedOutput(a, Dense(b)).heads(low, high, width)
    torch.testing.assert_close(part(x[:, low * width : high * width]), inner @ b.t())
    assert part.a.untyped_storage().data_ptr() == a.untyped_storage().data_ptr()
    assert part.b.weight.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def test_hyper_connections_equal_transformers(tiny) -> None:
    """The boundary's read and write, and both ends, layer by layer."""
    torch.manual_seed(1)
    config = tiny.model.config
    hyper = Hyper(config.hc_mult, config.hc_sinkhorn_iters, config.hc_eps)
    theirs, head = tiny.model.model.layers[1].attn_hc, tiny.model.model.hc_head
    ours = HyperConnection(hyper, theirs.fn, theirs.base, theirs.scale, config.rms_norm_eps)
    x, y = torch.randn(7, config.hc_mult, 96), torch.randn(7, 96)
    with torch.no_grad():
        post, comb, collapsed = theirs(x.unsqueeze(0))
        read, carry = ours.read(x)
        torch.testing.assert_close(read, collapsed[0], atol=1e-6, rtol=1e-5)
        want = post[0].unsqueeze(-1) * y.unsqueeze(1) + comb[0].mT @ x
        torch.testing.assert_close(ours.write(x, y, carry), want, atol=1e-6, rtol=1e-5)
        ends = HyperEnds(hyper, head.hc_fn, head.hc_base, head.hc_scale, config.rms_norm_eps)
        torch.testing.assert_close(ends.close(x), head(x.unsqueeze(0))[0], atol=1e-6, rtol=1e-5)
        assert torch.equal(ends.open(y)[:, 2], y)


def test_mixing_is_doubly_stochastic(tiny) -> None:
    config, theirs = tiny.model.config, tiny.model.model.layers[0].ffn_hc
    hyper = Hyper(config.hc_mult, 20, config.hc_eps)
    ours = HyperConnection(hyper, theirs.fn, theirs.base, theirs.scale, config.rms_norm_eps)
    with torch.no_grad():
        _, carry = ours.read(torch.randn(11, config.hc_mult, 96))
    mix = carry[..., 1:]
    assert (mix.sum(-1) - 1).abs().max() < 1e-3 and (mix.sum(-2) - 1).abs().max() < 1e-3
    assert (mix - 1 / 3).abs().max() > 0.05, "mixing is not trivial"
