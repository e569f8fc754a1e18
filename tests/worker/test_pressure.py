"""A cache far too small for its requests: tokens are those of each request alone, nothing leaks.

The real scheduler and worker with 40 pages of 16 tokens, 64 requests of 1 to 200 tokens that share
prefixes, arrivals and aborts at random steps; free KV is poisoned with NaN.
"""

import random
from collections.abc import Callable

import numpy as np
import pytest
from tests.layouts import VOCAB, Ranks, gqa_arch, mla_arch, resolved, scheduler_for

from anabranch.core.arch import Arch
from anabranch.core.request import Request, SamplingParams

PAGES, PAGE, REQUESTS = 40, 16, 64
ARCHS = {"gqa": gqa_arch, "mla": mla_arch}
LAYOUTS = {
    "one rank": {},
    "dp2 x tp2": {"tp": 4, "attn_dp": 2},
    "cp2, dcp2": {"tp": 2, "attn_cp": 2, "dcp": 2},
}


def made_up(seed: int) -> list[Request]:
    """Prompts cut from four stems, so that prefixes of every length are shared; 1 to 200 tokens."""
    rng = np.random.default_rng(seed)
    stems = rng.integers(0, VOCAB, (4, 200))
    requests = []
    for i, length in enumerate([1, 200, *rng.integers(1, 201, REQUESTS - 2)]):
        shared = int(rng.integers(0, length + 1))
        ids = [*stems[i % 4, :shared], *rng.integers(0, VOCAB, length - shared)]
        params = SamplingParams(temperature=0.0, max_tokens=int(rng.integers(1, 80)))
        requests.append(Request(f"r{i}", tuple(map(int, ids)), params))
    return requests


def alone(arch: Arch, requests: list[Request]) -> dict[str, list[int]]:
    """The tokens of each request by itself, in a cache with room and without reuse."""
    run = resolved(arch, prefix_cache=False, kv_pages=64)
    ranks, scheduler = Ranks(run), scheduler_for(run)
    tokens: dict[str, list[int]] = {r.id: [] for r in requests}
    for request in requests:
        scheduler.submit(request)
        while (plan := scheduler.next_step()) is not None:
            for output in scheduler.apply(ranks.step(plan)):
                tokens[output.id] += output.tokens
    ranks.close()
    return tokens


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gqa", "one rank"),
        pytest.param("mla", "one rank", marks=pytest.mark.slow),
        pytest.param("gqa", "dp2 x tp2", marks=pytest.mark.slow),
        pytest.param("mla", "cp2, dcp2", marks=pytest.mark.slow),
    ],
)
def test_forty_pages_serve_sixty_four_requests(
    name: str, layout: str, record_property: Callable[[str, object], None]
) -> None:
    arch, rng = ARCHS[name](), random.Random(4)
    requests = made_up(3)
    wanted = alone(arch, requests)
    run = resolved(
        arch, kv_pages=PAGES, page_size=PAGE, prefill_chunk=96, max_running=16, debug="poison",
        **LAYOUTS[layout],
    )  # fmt: skip
    ranks, scheduler = Ranks(run), scheduler_for(run)
    start = scheduler.stats().free_pages
    tokens: dict[str, list[int]] = {r.id: [] for r in requests}
    ends: dict[str, str] = {}
    doomed = set(rng.sample([r.id for r in requests], 16))
    todo, hits = list(requests), 0
    while todo or not scheduler.idle:
        for _ in range(min(len(todo), rng.choice((0, 1, 6)))):
            scheduler.submit(todo.pop(0))
        outputs = []
        live = sorted(doomed & tokens.keys() - ends.keys() - {r.id for r in todo})
        if live and rng.random() < 0.15:  # waiting, filling or decoding
            outputs += scheduler.abort(rng.choice(live))
        if (plan := scheduler.next_step()) is not None:
            outputs += scheduler.apply(ranks.step(plan))
        for output in outputs:
            tokens[output.id] += output.tokens
            if output.finish_reason is not None:
                assert output.id not in ends
                ends[output.id] = output.finish_reason
                hits += output.cached_tokens
    ranks.close()
    stats = scheduler.stats()
    aborted = [key for key, reason in ends.items() if reason == "abort"]
    for key, value in tokens.items():
        whole = wanted[key][: len(value)] if key in aborted else wanted[key]
        assert value == whole, key
    assert ends.keys() == tokens.keys() and {"abort", "length"} == set(ends.values())
    assert stats.free_pages == start and stats.running == stats.waiting == 0
    assert hits > 0 and stats.preemptions > 0
    for key, value in (("hit_tokens", hits), ("preemptions", stats.preemptions),
                       ("aborted", len(aborted)), ("steps", stats.steps)):  # fmt: skip
        record_property(key, value)
        print(f"{key} {value}")
