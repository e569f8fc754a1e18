"""Sinks under stripes: whatever the exchange, the result is one softmax with the sink (T5)."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from anabranch import ops
from anabranch.comm.group import Group
from anabranch.comm.transports.threads import ThreadWorld
from anabranch.core.plan import Phase
from anabranch.layout.ownership import Stripes
from anabranch.nn.attention.exchange import (
    Exchange,
    GatherScatterRoute,
    InPlace,
    LseOnly,
    PackRoute,
    QToKv,
)
from anabranch.nn.attention.kernel import GqaKernel
from anabranch.nn.step import Paged, SegmentInputs

HEADS, KV_HEADS, WIDTH, PAGE = 8, 4, 16, 8
LENGTHS = (1, 2, 23, 64)
"""Cached positions of each row: some stripes are empty."""


def _problem() -> tuple[Tensor, Tensor, Tensor]:
    """q [T, H, D], entries [T, most, 2 * kv * D] and sinks [H] of very different weight."""
    g = torch.Generator().manual_seed(4)
    q = torch.randn(len(LENGTHS), HEADS, WIDTH, generator=g) * 2
    entries = torch.randn(len(LENGTHS), max(LENGTHS), 2 * KV_HEADS * WIDTH, generator=g)
    return q, entries, torch.linspace(-4, 6, HEADS)


def _one_softmax() -> Tensor:
    """fp64 [T, H, D]: the sink is one more score, its value zero."""
    q, entries, sinks = (t.double() for t in _problem())
    out = torch.zeros(len(LENGTHS), HEADS, WIDTH, dtype=torch.float64)
    for t, n in enumerate(LENGTHS):
        kv = entries[t, :n].view(n, 2, KV_HEADS, WIDTH)
        for h in range(HEADS):
            g = h * KV_HEADS // HEADS
            scores = kv[:, 0, g] @ q[t, h] * WIDTH**-0.5
            weights = torch.cat((scores, sinks[h : h + 1])).softmax(0)[:-1]
            out[t, h] = weights @ kv[:, 1, g]
    return out


def _segment(stripes: Stripes, stripe: int) -> tuple[Tensor, Tensor, SegmentInputs]:
    """This stripe's pool, the fresh entries (each row's last position), and where all lies."""
    _, entries, _ = _problem()
    pages = -(-max(LENGTHS) // PAGE)
    pool = torch.full((len(LENGTHS) * pages * stripes.local_page, entries.shape[-1]), math.nan)
    table = torch.arange(len(LENGTHS) * pages, dtype=torch.int32).view(-1, pages)
    lens, rows, slots = [], [], []
    for t, n in enumerate(LENGTHS):
        lens.append(int(stripes.local_len(np.array(n), stripe)))
        for at, position in enumerate(stripes.positions(0, n, stripe).tolist()):
            page, inner = divmod(at, stripes.local_page)
            slot = int(table[t, page]) * stripes.local_page + inner
            if position == n - 1:
                rows.append(t)
                slots.append(slot)
            else:
                pool[slot] = entries[t, position]
    fresh = torch.stack([entries[t, n - 1] for t, n in enumerate(LENGTHS)])
    where = Paged(
        table, {0: torch.tensor(lens, dtype=torch.int32)}, stripes.local_page, {},
        torch.tensor(rows, dtype=torch.int64), torch.tensor(slots, dtype=torch.int64),
        counts=(len(LENGTHS),),
    )  # fmt: skip
    seg = SegmentInputs(Phase.DECODE, 0, 4, _none, _none, torch.tensor(LENGTHS) - 1, 4, where)
    return pool, fresh, seg


def _none(x: Tensor) -> Tensor:
    return x


def _attend(count: int, make, own: bool) -> list[Tensor]:
    """What each of `count` stripes returns. own: it gives q and sinks of its own heads only."""
    world, bound = ThreadWorld(20.0), ops.bind("cpu", "reference")
    heads = torch.arange(HEADS, dtype=torch.int32) * KV_HEADS // HEADS
    members, share = tuple(range(count)), HEADS // count

    def rank(me: int) -> Tensor:
        group = Group(members, me, world.transport(members, me) if count > 1 else None)
        q, _, sinks = _problem()
        mine = slice(me * share, (me + 1) * share) if own else slice(0, HEADS)
        exchange: Exchange = make(group, bound)
        pool, fresh, seg = _segment(Stripes(count, page=PAGE), me)
        kernel = GqaKernel(bound, heads, WIDTH, WIDTH**-0.5)
        return exchange.attend(kernel, q[:, mine].contiguous(), fresh, pool, seg, sinks[mine])

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(rank, range(count)))


ROUTES = {
    "a2a": lambda group, bound: QToKv(group, PackRoute(group, bound)),
    "flashinfer": lambda group, bound: QToKv(group, PackRoute(group, bound, flashinfer=True)),
    "ag_rs": lambda group, bound: QToKv(group, GatherScatterRoute(group)),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("route", ROUTES)
def test_a_sink_enters_the_merge_exactly_once(route: str, count: int) -> None:
    parts = _attend(count, ROUTES[route], own=True)
    got = torch.cat(parts, dim=1).double()
    torch.testing.assert_close(got, _one_softmax(), atol=2e-6, rtol=1e-5)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_shares_of_the_lse_route_sum_to_one_softmax_with_the_sink(count: int) -> None:
    parts = _attend(count, lambda group, _: LseOnly(group), own=False)
    got = torch.stack(parts).double().sum(0)
    torch.testing.assert_close(got, _one_softmax(), atol=2e-6, rtol=1e-5)


def test_whole_kv_applies_the_sink_without_an_exchange() -> None:
    (got,) = _attend(1, lambda group, _: InPlace(group), own=False)
    torch.testing.assert_close(got.double(), _one_softmax(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("provider", ["reference", "auto"])
def test_padded_heads_with_zero_sinks_reach_no_result(provider: str) -> None:
    """sink_pad: a kernel that wants more heads than there are gets zero queries and zero sinks."""
    bound = ops.bind("cpu", provider)
    q, _, sinks = _problem()
    pool, _, seg = _segment(Stripes(1, page=PAGE), 0)
    where = seg.reach
    assert isinstance(where, Paged)
    pool = pool.nan_to_num(0.5)
    heads = torch.arange(HEADS, dtype=torch.int32) * KV_HEADS // HEADS
    want = bound.attend_paged_gqa(
        q,
        pool,
        where.page_table,
        where.lens[0],
        page_slots=PAGE,
        kv_map=heads,
        scale=0.25,
        sink=sinks,
    )
    pad = 16 - HEADS
    got = bound.attend_paged_gqa(
        torch.cat((q, q.new_zeros(len(q), pad, WIDTH)), dim=1),
        pool, where.page_table, where.lens[0], page_slots=PAGE,
        kv_map=torch.cat((heads, heads.new_zeros(pad))), scale=0.25,
        sink=torch.cat((sinks, sinks.new_zeros(pad))),
    )  # fmt: skip
    for live, padded in zip(want, got, strict=True):
        torch.testing.assert_close(padded[:, :HEADS], live, atol=1e-6, rtol=1e-6)
