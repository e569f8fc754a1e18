"""Bodies of the verb tests: every verb of every group against numpy, inputs known to every rank."""

import zlib

import numpy as np
import torch
from torch import Tensor

from anabranch.comm.group import Group
from anabranch.ops.reference.partials import merge_partials

DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8,
    torch.float64,
)  # fmt: skip
GROUPS = {
    2: [(0, 1)],
    4: [(0, 1, 2, 3), (0, 1), (2, 3), (1, 2, 3), (0, 3)],
    8: [tuple(range(8)), (0, 2, 4, 6), (1, 3, 5, 7), (0, 1, 2), (5, 6, 7), (3, 7), (2, 4, 5)],
}
SHAPES = ((), (7,), (3, 8), (0,))


def values(key: tuple, rows: int, trailing: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The rows that the member named in `key` has: the same wherever they are computed."""
    seed = zlib.crc32(repr(key).encode())
    raw = np.random.default_rng(seed).integers(-120, 120, (rows, *trailing))
    scale = 8.0 if dtype.is_floating_point else 1
    return torch.from_numpy(raw / scale if scale != 1 else raw % 120).to(dtype)


def counts_of(size: int) -> list[list[int]]:
    """Rows per member: equal, ragged with zeros, all at one, none but the last."""
    ragged = [(1, 0, 37, 5, 0, 2, 11, 3)[i % 8] for i in range(size)]
    return [[4] * size, ragged, [0] * (size - 1) + [9], [29] + [0] * (size - 1)]


def summed(parts: list[Tensor]) -> Tensor:
    """numpy: in member order, fp32 for the floats of at most 32 bits, rounded once."""
    dtype = parts[0].dtype
    narrow = dtype in (torch.bfloat16, torch.float16, torch.float32)
    total = None
    for part in parts:
        x = part.float().numpy() if narrow else part.numpy()
        total = x.copy() if total is None else total + x
    return torch.from_numpy(total).to(dtype)


def equal(got: Tensor, want: Tensor, *what: object) -> int:
    assert got.dtype == want.dtype and got.shape == want.shape, (what, got.shape, want.shape)
    assert torch.equal(got, want), (what, got, want)
    return 1


def check_gather(g: Group, dtype: torch.dtype, trailing, counts) -> int:
    key = ("gather", g.members, str(dtype), trailing, tuple(counts))
    rows = [values((*key, i), n, trailing, dtype) for i, n in enumerate(counts)]
    return equal(g.all_gather(rows[g.me], counts), torch.cat(rows), *key)


def check_strided(g: Group) -> int:
    """Of one element, whose strides may be any."""
    rows = [torch.tensor([[float(i), -1.0]])[:, :1] for i in range(g.size)]
    return equal(g.all_gather(rows[g.me], [1] * g.size), torch.cat(rows), "strided")


def check_scatter(g: Group, dtype: torch.dtype, trailing, counts) -> int:
    key = ("scatter", g.members, str(dtype), trailing, tuple(counts))
    parts = [values((*key, i), sum(counts), trailing, dtype) for i in range(g.size)]
    low = sum(counts[: g.me])
    want = summed(parts)[low : low + counts[g.me]]
    return equal(g.reduce_scatter(parts[g.me], counts), want, *key)


def check_reduce(g: Group, dtype: torch.dtype, trailing, rows: int) -> int:
    key = ("reduce", g.members, str(dtype), trailing, rows)
    parts = [values((*key, i), rows, trailing, dtype) for i in range(g.size)]
    return equal(g.all_reduce(parts[g.me]), summed(parts), *key)


def check_all_to_all(g: Group, dtype: torch.dtype, trailing, counts) -> int:
    """Member i sends counts[(i + j) % size] rows to member j."""
    key = ("a2a", g.members, str(dtype), trailing, tuple(counts))
    table = [[counts[(i + j) % g.size] for j in range(g.size)] for i in range(g.size)]
    rows = [[values((*key, i, j), table[i][j], trailing, dtype) for j in range(g.size)]
            for i in range(g.size)]  # fmt: skip
    got = g.all_to_all(torch.cat(rows[g.me]), table[g.me], [table[i][g.me] for i in range(g.size)])
    return equal(got, torch.cat([rows[i][g.me] for i in range(g.size)]), *key)


def check_broadcast(g: Group, dtype: torch.dtype, trailing, root: int, rows: int = 6) -> int:
    key = ("broadcast", g.members, str(dtype), trailing, root, rows)
    sent = [values((*key, i), rows, trailing, dtype) for i in range(g.size)]
    return equal(g.broadcast(sent[g.me], root), sent[root], *key)


def check_shift(g: Group, dtype: torch.dtype, trailing, distance: int) -> int:
    key = ("shift", g.members, str(dtype), trailing, distance)
    rows = [values((*key, i), 3 + i % 3, trailing, dtype) for i in range(g.size)]
    source = (g.me - distance) % g.size
    return equal(g.shift(rows[g.me], len(rows[source]), distance), rows[source], *key)


def check_merge(g: Group, dtype: torch.dtype, rows: int, heads: int, width: int, sunk: bool) -> int:
    key = ("merge", g.members, str(dtype), rows, heads, width, sunk)
    outs, stats = [], []
    for i in range(g.size):
        rng = torch.Generator().manual_seed(zlib.crc32(repr((*key, i)).encode()))
        outs.append(torch.randn(rows, g.size * heads, width, generator=rng).to(dtype))
        lse = torch.randn(rows, g.size * heads, generator=rng) * 3
        lse[torch.rand(lse.shape, generator=rng) < 0.3] = -torch.inf
        stats.append(lse)
    sink = torch.linspace(-1, 1, heads) if sunk else None
    own = slice(g.me * heads, (g.me + 1) * heads)
    want, _ = merge_partials(
        torch.stack([o[:, own] for o in outs]), torch.stack([s[:, own] for s in stats]), sink=sink
    )
    lent = g.landing(rows, g.size * heads, width, dtype) if rows % 2 else None
    out, lse = outs[g.me], stats[g.me]
    if lent is not None:
        out, lse = lent[0].copy_(out), lent[1].copy_(lse)
    elif rows == 4:  # heads outside, as attention may leave them
        out = out.transpose(0, 1).contiguous().transpose(0, 1)
        lse = lse.t().contiguous().t()
    got = g.merge_partials(out, lse, sink)
    limit = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}[dtype]
    assert got.shape == want.shape and got.dtype == dtype, (key, got.shape)
    assert rows == 0 or (got.float() - want.float()).abs().max() <= limit, key
    return 1


def every_verb(world, rank: int, size: int) -> int:
    """Every verb x dtype x shape x counts in every group of GROUPS[size]; returns checks made."""
    done = 0
    for members in GROUPS[size]:
        if rank not in members:
            continue
        me = members.index(rank)
        g = Group(members, me, world.transport(members, me))
        for dtype in DTYPES:
            for trailing in SHAPES:
                for counts in counts_of(g.size):
                    done += check_gather(g, dtype, trailing, counts)
                    done += check_scatter(g, dtype, trailing, counts)
                    done += check_all_to_all(g, dtype, trailing, counts)
                done += check_reduce(g, dtype, trailing, 1)
                done += check_reduce(g, dtype, trailing, 300)
                done += check_broadcast(g, dtype, trailing, g.size - 1)
                done += check_broadcast(g, dtype, trailing, 0, rows=0)
                done += check_shift(g, dtype, trailing, 1)
                done += check_shift(g, dtype, trailing, g.size - 1)
        done += check_reduce(g, torch.float32, (64, 40), 9)
        done += check_strided(g)
        for dtype in DTYPES[:3]:
            for rows in (0, 1, 4, 5):
                for heads, width in ((1, 64), (3, 40)):
                    done += check_merge(g, dtype, rows, heads, width, sunk=rows != 1)
    return done
