"""The heart: on four ranks every way of splitting attention, alone or together, is one process.

Per-step logits (prefill, then teacher-forced decode) and greedy tokens, MLA and GQA, in the real
rooms: real scheduler, plans, recipes, moves, exchanges, on thread ranks.
"""

import numpy as np
import pytest
from tests.layouts import gqa_arch, mla_arch, prompt, run_layout

from anabranch.core.request import Request, SamplingParams

LAYOUTS = {
    "tp2 x dp2": {"tp": 4, "attn_dp": 2, "ep": 2},
    "cp2 prefill + decode TP": {"tp": 4, "attn_cp": 2, "dcp": 1},
    "cp4 prefill + decode TP": {"tp": 4, "attn_cp": 4, "dcp": 1},
    "dcp2 by pack + all_to_all": {"tp": 4, "dcp": 2, "dcp_exchange": "a2a", "force": True},
    "cp2 + decode TP + dcp2": {"tp": 4, "attn_cp": 2, "dcp": 2, "dcp_exchange": "a2a"},
    "cp2 + decode TP + dcp2 + dp2": {"tp": 4, "attn_dp": 2, "attn_cp": 2, "dcp": 2},
    "cp2 + tp2, stripes over both": {"tp": 4, "attn_cp": 2, "dcp": 4, "force": True},
    "cp2, replicated decode, lse": {"tp": 4, "attn_cp": 2, "dcp": 2, "decode_attn": "replicated"},
    "cp2, replicated decode, whole": {"tp": 4, "attn_cp": 2, "dcp": 1, "decode_attn": "replicated"},
}
ARCHS = {"mla": mla_arch, "gqa": gqa_arch}


def batch() -> list[Request]:
    scored = [(9, 5), (1, 1), (70, 64), (130, 120), (3, 2)]
    requests = [Request(f"s{i}", prompt(n, i), score_from=k) for i, (n, k) in enumerate(scored)]
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    return requests + [Request(f"g{i}", prompt(n, 50 + i), greedy) for i, n in enumerate((5, 40))]


@pytest.fixture(scope="module")
def one_process():
    return {name: run_layout(make(), batch(), prefill_chunk=32) for name, make in ARCHS.items()}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ARCHS)
def test_layout_is_one_process(name: str, layout: str, one_process) -> None:
    want_logits, want_tokens = one_process[name]
    logits, tokens = run_layout(ARCHS[name](), batch(), prefill_chunk=32, **LAYOUTS[layout])
    assert tokens == want_tokens
    assert set(logits) == set(want_logits)
    for key, want in want_logits.items():
        assert want.std() > 0.5, "logits too flat to show a mistake"
        np.testing.assert_allclose(logits[key], want, atol=1e-4, rtol=0, err_msg=key)
