"""Whole models over shared memory: every verb and route at work, equal to one process."""

import threading
from contextlib import nullcontext

import numpy as np
import pytest
from tests import layouts
from tests.layouts import gqa_arch, mla_arch, prompt, run_layout

from anabranch.comm.endpoint import make_endpoint
from anabranch.comm.group import Transport
from anabranch.comm.worlds import World, open_world
from anabranch.core.request import Request, SamplingParams

CP2 = {"tp": 4, "attn_cp": 2}
LAYOUTS = {
    "all together": {**CP2, "attn_dp": 2, "dcp": 2, "moe_dispatch": "a2a"},
    "stripes over cp and ts, fused": {**CP2, "dcp": 4, "force": True, "dcp_exchange": "fused"},
    "cp 4, expand": {"tp": 4, "attn_cp": 4, "dcp": 4, "kv_to_q": "expand"},
    "ag_rs, ring": {**CP2, "dcp": 2, "dcp_exchange": "ag_rs", "kv_to_q": "ring"},
}


class EveryRank:
    """The worlds of all ranks, for ranks that are threads: each group goes to its member's own."""

    taken = staticmethod(nullcontext)  # they wait in shared memory, side by side

    def __init__(self, size: int) -> None:
        endpoint = make_endpoint("shm")
        joined: dict[int, World] = {}

        def join(rank: int) -> None:
            joined[rank] = open_world(endpoint.text, rank, size, 60.0)

        threads = [threading.Thread(target=join, args=(r,)) for r in range(size)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        endpoint.close()
        self.worlds = [joined[rank] for rank in range(size)]

    def transport(self, members: tuple[int, ...], me: int) -> Transport:
        return self.worlds[members[me]].transport(members, me)

    def abort(self) -> None:
        self.worlds[0].abort()


def batch() -> list[Request]:
    greedy = SamplingParams(temperature=0.0, max_tokens=6)
    scored = [
        Request(f"s{i}", prompt(n, i), score_from=k) for i, (n, k) in enumerate([(9, 5), (70, 66)])
    ]
    return [*scored, Request("g", prompt(40, 50), greedy)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", (mla_arch, gqa_arch))
def test_shared_memory_is_one_process(make, layout: str, monkeypatch) -> None:
    want, want_tokens = run_layout(make(), batch(), prefill_chunk=32)
    monkeypatch.setattr(layouts, "ThreadWorld", lambda timeout: EveryRank(4))
    flags = LAYOUTS[layout]
    if make is gqa_arch and flags.get("kv_to_q") == "expand":
        flags = {**flags, "kv_to_q": "gather"}  # it has no latents
    got, tokens = run_layout(make(), batch(), prefill_chunk=32, **flags)
    assert tokens == want_tokens
    for key, logits in want.items():
        np.testing.assert_allclose(got[key], logits, atol=1e-4, rtol=0, err_msg=key)
