"""Attention ops against double precision: pages, windows, sinks, empties, poison."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from tests.ops.providers import Bind
from torch import Tensor

from anabranch import ops

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def one_row(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """q [H, D] over keys [S, H, D] and values [S, H, Dv], by the definition, in fp64."""
    score = torch.einsum("hd,shd->hs", q.double(), keys.double()) * scale
    if sink is not None:
        score = torch.cat((score, sink.double()[:, None]), 1)
    if score.shape[1] == 0:
        return torch.zeros(q.shape[0], values.shape[-1]).double(), torch.full(
            (q.shape[0],), -math.inf
        ).double()
    weight = torch.softmax(score, 1)[:, : keys.shape[0]]
    return torch.einsum("hs,shd->hd", weight, values.double()), torch.logsumexp(score, 1)


def close(found: tuple[Tensor, Tensor], out: Tensor, lse: Tensor) -> None:
    assert found[0].is_contiguous() and found[1].dtype == torch.float32
    limit = TOLERANCE[found[0].dtype]
    torch.testing.assert_close(found[0].double(), out, atol=limit, rtol=limit)
    torch.testing.assert_close(found[1].double(), lse, atol=2e-5, rtol=2e-5)


@dataclass(frozen=True)
class Pages:
    """A pool whose visible entries are random and whose every other element is NaN."""

    pool: Tensor
    table: Tensor
    lens: Tensor
    start: Tensor
    entries: list[Tensor]  # per row, in order, the visible ones


def pages(
    lens: list[int],
    width: int,
    slots: int,
    dtype: torch.dtype,
    start: list[int] | None = None,
    pad: int = 0,
) -> Pages:
    gen = torch.Generator().manual_seed(sum(lens) + width)
    first = [0] * len(lens) if start is None else start
    counts = [-(-n // slots) for n in lens]
    order = torch.randperm(sum(counts) + 2, generator=gen).tolist()
    pool = torch.full((len(order) * slots, width + pad), math.nan, dtype=dtype)[:, :width]
    table = torch.full((len(lens), max(counts, default=0) + 1), -7, dtype=torch.int32)
    entries = []
    for t, n in enumerate(lens):
        mine = [order.pop() for _ in range(counts[t])]
        table[t, : counts[t]] = torch.tensor(mine, dtype=torch.int32)
        data = torch.randn(n, width, generator=gen).to(dtype)
        for i in range(first[t], n):
            pool[mine[i // slots] * slots + i % slots] = data[i]
        entries.append(data[first[t] :])
    return Pages(
        pool,
        table,
        torch.tensor(lens, dtype=torch.int32),
        torch.tensor(first, dtype=torch.int32),
        entries,
    )


LENS = [1, 0, 5, 200, 64, 65, 3, 129]
START = [0, 0, 5, 137, 0, 64, 1, 128]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("heads, kv, width", [(6, 3, 64), (7, 2, 24), (4, 4, 80), (16, 1, 128)])
@pytest.mark.parametrize("windowed, sinks", [(False, False), (True, False), (True, True)])
def test_gqa(
    bind: Bind,
    dtype: torch.dtype,
    heads: int,
    kv: int,
    width: int,
    windowed: bool,
    sinks: bool,
) -> None:
    """Ragged maps, rows without entries, windows; NaN wherever a row may not look."""
    p = pages(LENS, 2 * kv * width, 16, dtype, START if windowed else None, pad=5)
    gen = torch.Generator().manual_seed(heads)
    q = torch.randn(len(LENS), heads, width, generator=gen).to(dtype)
    kv_map = torch.randint(0, kv, (heads,), generator=gen, dtype=torch.int32)
    sink = torch.randn(heads, generator=gen) if sinks else None
    expected = []
    for t, entries in enumerate(p.entries):
        both = entries.view(-1, 2, kv, width)[:, :, kv_map.long()]
        expected.append(one_row(q[t], both[:, 0], both[:, 1], width**-0.5, sink))
    out, lse = (torch.stack(x) for x in zip(*expected, strict=True))
    for threads in (1, 3):
        found = bind(threads).attend_paged_gqa(
            q,
            p.pool,
            p.table,
            p.lens,
            page_slots=16,
            kv_map=kv_map,
            scale=width**-0.5,
            start=p.start if windowed else None,
            sink=sink,
        )
        close(found, out, lse)
        if sink is None:
            assert not found[0][1].any() and bool((found[1][1] == -math.inf).all())


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("heads, value, rope", [(24, 512, 64), (3, 32, 16), (5, 36, 4), (1, 64, 0)])
@pytest.mark.parametrize("sinks", [False, True])
def test_mla(
    bind: Bind, dtype: torch.dtype, heads: int, value: int, rope: int, sinks: bool
) -> None:
    p = pages(LENS, value + rope, 7, dtype, START if sinks else None)
    gen = torch.Generator().manual_seed(heads)
    q = torch.randn(len(LENS), heads, value + rope, generator=gen).to(dtype)
    sink = torch.randn(heads, generator=gen) if sinks else None
    scale = (value + rope) ** -0.5
    expected = []
    for t, entries in enumerate(p.entries):
        keys = entries[:, None].expand(-1, heads, -1)
        expected.append(one_row(q[t], keys, keys[..., :value], scale, sink))
    out, lse = (torch.stack(x) for x in zip(*expected, strict=True))
    for threads in (1, 3):
        found = bind(threads).attend_paged_mla(
            q,
            p.pool,
            p.table,
            p.lens,
            page_slots=7,
            value_width=value,
            scale=scale,
            start=p.start if sinks else None,
            sink=sink,
        )
        close(found, out, lse)


def test_a_long_row_is_cut_and_joined_in_order(bind: Bind) -> None:
    """One row of 4000 entries beside rows of 1 to 5, over threads: right, and equal every time."""
    lens = [4000, 1, 2, 3, 4, 5]
    p = pages(lens, 2 * 2 * 32, 64, torch.float32)
    q = 3 * torch.randn(6, 4, 32)
    kv_map = torch.tensor([0, 0, 1, 1], dtype=torch.int32)
    bound = bind(4)

    def run() -> tuple[Tensor, Tensor]:
        return bound.attend_paged_gqa(
            q, p.pool, p.table, p.lens, page_slots=64, kv_map=kv_map, scale=0.3
        )

    first = run()
    for t, entries in enumerate(p.entries):
        both = entries.view(-1, 2, 2, 32)[:, :, kv_map.long()]
        out, lse = one_row(q[t], both[:, 0], both[:, 1], 0.3, None)
        close((first[0][t : t + 1], first[1][t : t + 1]), out[None], lse[None])
    for _ in range(10):
        again = run()
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])


@pytest.mark.timeout(60)
def test_ranks_as_threads_do_not_meet(bind: Bind) -> None:
    """Four threads with ops of their own, each over a team: every result as if alone."""
    p = pages([700, 3, 0, 90], 2 * 2 * 32, 64, torch.float32)
    kv_map = torch.tensor([0, 0, 1, 1], dtype=torch.int32)

    def run(rank: int) -> list[Tensor]:
        bound = bind(2)
        gen = torch.Generator().manual_seed(rank)
        q = torch.randn(4, 4, 32, generator=gen)
        return [
            bound.attend_paged_gqa(
                q, p.pool, p.table, p.lens, page_slots=64, kv_map=kv_map, scale=0.3
            )[0]
            for _ in range(20)
        ]

    alone = [run(rank)[0] for rank in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for rank, found in enumerate(pool.map(run, range(4))):
            assert all(torch.equal(x, alone[rank]) for x in found)


@pytest.mark.parametrize("stripes", [2, 3, 4])
def test_stripes_merge_to_the_whole(bound: ops.Ops, stripes: int) -> None:
    """X8: entries dealt over stripes, most of them empty for short rows, merge to one attention."""
    lens = [1, 2, 3, 4, 5, 90]
    width, value, heads = 48, 32, 4
    whole = pages(lens, width, 8, torch.float32)
    q = torch.randn(6, heads, width)
    parts = []
    for stripe in range(stripes):
        mine = [e[stripe::stripes] for e in whole.entries]
        longest = -(-max(len(m) for m in mine) // 8)
        pool = torch.full((6 * longest * 8, width), math.nan)
        for t, m in enumerate(mine):
            pool[t * longest * 8 : t * longest * 8 + len(m)] = m
        table = torch.arange(6 * longest, dtype=torch.int32).view(6, longest)
        count = torch.tensor([len(m) for m in mine], dtype=torch.int32)
        parts.append(
            bound.attend_paged_mla(
                q, pool, table, count, page_slots=8, value_width=value, scale=0.2
            )
        )
    out, lse = bound.merge_partials(
        torch.stack([o for o, _ in parts]), torch.stack([s for _, s in parts])
    )
    expected = bound.attend_paged_mla(
        q, whole.pool, whole.table, whole.lens, page_slots=8, value_width=value, scale=0.2
    )
    close((out, lse), expected[0].double(), expected[1].double())


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    "rows, keys, heads, kv, dq, dv",
    [(7, 40, 6, 3, 64, 64), (130, 260, 2, 2, 24, 16), (65, 65, 5, 1, 40, 72), (1, 1, 1, 1, 8, 8)],
)
@pytest.mark.parametrize("window, sinks", [(None, False), (9, True)])
def test_rows(
    bind: Bind,
    dtype: torch.dtype,
    rows: int,
    keys: int,
    heads: int,
    kv: int,
    dq: int,
    dv: int,
    window: int | None,
    sinks: bool,
) -> None:
    """Positions in any order; keys after every row are NaN, as are the gaps of strided views."""
    gen = torch.Generator().manual_seed(rows)
    k_pos = torch.randperm(keys, generator=gen)
    q_pos = (torch.randperm(keys, generator=gen)[:rows] - 2).int()  # some see nothing
    fused = torch.full((keys, kv, dq + dv + 3), math.nan, dtype=dtype)
    k, v = fused[..., :dq], fused[..., dq : dq + dv]
    reached = k_pos <= int(q_pos.max())
    k[reached] = torch.randn(keys, kv, dq, generator=gen).to(dtype)[reached]
    v[reached] = torch.randn(keys, kv, dv, generator=gen).to(dtype)[reached]
    q = torch.randn(heads, rows, dq, generator=gen).to(dtype).transpose(0, 1)
    kv_map = torch.tensor([h * kv // heads for h in range(heads)], dtype=torch.int32)
    sink = torch.randn(heads, generator=gen) if sinks else None
    expected = []
    for t in range(rows):
        seen = k_pos <= q_pos[t]
        if window is not None:
            seen &= k_pos > q_pos[t] - window
        expected.append(
            one_row(q[t], k[seen][:, kv_map.long()], v[seen][:, kv_map.long()], dq**-0.5, sink)
        )
    out, lse = (torch.stack(x) for x in zip(*expected, strict=True))
    for threads in (1, 3):
        found = bind(threads).attend_rows(
            q, k, v, q_pos, k_pos, kv_map=kv_map, scale=dq**-0.5, window=window, sink=sink
        )
        close(found, out, lse)


def test_rows_when_nothing_is_there(bound: ops.Ops) -> None:
    kv_map = torch.zeros(2, dtype=torch.int32)
    q, none = torch.randn(3, 2, 8), torch.zeros(0, 1, 8)
    where = torch.arange(3)
    out, lse = bound.attend_rows(q, none, none, where, where[:0], kv_map=kv_map, scale=1.0)
    assert not out.any() and bool((lse == -math.inf).all())
    out, lse = bound.attend_rows(
        q[:0], q[:, :1], q[:, :1], where[:0], where, kv_map=kv_map, scale=1.0
    )
    assert out.shape == (0, 2, 8) and lse.shape == (0, 2)


def test_large_scores_do_not_overflow(bound: ops.Ops) -> None:
    q = torch.full((2, 1, 16), 40.0)
    k = torch.linspace(-40.0, 40.0, 70)[:, None, None].expand(70, 1, 16).contiguous()
    v = torch.randn(70, 1, 16)
    where = torch.full((2,), 70)
    out, lse = bound.attend_rows(
        q, k, v, where, torch.arange(70), kv_map=torch.zeros(1, dtype=torch.int32), scale=1.0
    )
    torch.testing.assert_close(out, v[-1:].expand(2, 1, 16), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, torch.full((2, 1), 25600.0), atol=1e-2, rtol=0.0)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    "change",
    [
        {"q": torch.zeros(2, 4, 9)},
        {"q": torch.zeros(2, 4, 8).bfloat16()},
        {"q": torch.zeros(2, 4, 8, dtype=torch.float64)},
        {"q": torch.zeros(2, 4, 16)[..., ::2]},
        {"pool": torch.zeros(8, 64)[:, ::2]},
        {"page_table": torch.zeros(2, 2, dtype=torch.int64)},
        {"page_table": torch.zeros(3, 2, dtype=torch.int32)},
        {"page_table": int32(0, 2, 0, 1).view(2, 2)},
        {"page_table": int32(0, -1, 0, 1).view(2, 2)},
        {"lens": int32(5, 9)},
        {"lens": int32(5)},
        {"lens": torch.tensor([5, 5])},
        {"start": int32(-1, 0)},
        {"start": torch.tensor([0, 0])},
        {"page_slots": 0},
        {"kv_map": int32(0, 0, 1)},
        {"kv_map": int32(0, 0, 1, 2)},
        {"kv_map": int32(0, -1, 1, 1)},
        {"sink": torch.zeros(3)},
        {"sink": torch.zeros(4).bfloat16()},
    ],
)
def test_paged_refusals(bound: ops.Ops, change: dict[str, Tensor | int]) -> None:
    """Rows of 5 entries in 2 pages of 4 slots, 2 KV heads; each change breaks one thing."""
    args: dict[str, Tensor | int | float] = {
        "q": torch.zeros(2, 4, 8),
        "pool": torch.zeros(8, 32),
        "page_table": int32(0, 1, 1, 0).view(2, 2),
        "lens": int32(5, 5),
        "page_slots": 4,
        "kv_map": int32(0, 0, 1, 1),
        "scale": 1.0,
    }
    bound.attend_paged_gqa(**args)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"attend_paged_gqa|page"):
        bound.attend_paged_gqa(**{**args, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"k": torch.zeros(5, 2, 9)},
        {"v": torch.zeros(4, 2, 8)},
        {"v": torch.zeros(5, 2, 8).bfloat16()},
        {"q_pos": torch.arange(2)},
        {"k_pos": torch.arange(5.0)},
        {"window": 0},
        {"kv_map": int32(0, 0, 1, 2)},
        {"sink": torch.zeros(5)},
    ],
)
def test_rows_refusals(bound: ops.Ops, change: dict[str, Tensor | int]) -> None:
    args: dict[str, Tensor | float] = {
        "q": torch.zeros(3, 4, 8),
        "k": torch.zeros(5, 2, 8),
        "v": torch.zeros(5, 2, 8),
        "q_pos": torch.arange(3),
        "k_pos": torch.arange(5),
        "kv_map": int32(0, 0, 1, 1),
        "scale": 1.0,
    }
    bound.attend_rows(**args)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="attend_rows"):
        bound.attend_rows(**{**args, **change})  # type: ignore[arg-type]
