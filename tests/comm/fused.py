"""Bodies of the fused exchange's tests."""

import time

import torch
from torch import Tensor

from anabranch import ops
from anabranch.comm.group import Group
from anabranch.nn.attention.exchange import FusedRoute, GatherScatterRoute, PackRoute

SETS = 12
HEADS, WIDTH = 3, 40


def partials(size: int, rows: int, seed: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Every member's partials, some of them empty, one row empty on all."""
    rng = torch.Generator().manual_seed(seed)
    made = []
    for i in range(size):
        out = torch.randn(rows, size * HEADS, WIDTH, generator=rng).to(dtype)
        lse = torch.randn(rows, size * HEADS, generator=rng) * 4
        lse[:, (i + seed) % HEADS :: HEADS] = -torch.inf
        lse[2:3] = -torch.inf
        out[lse == -torch.inf] = torch.nan  # never read
        made.append((out, lse))
    return made


def merged(made: list[tuple[Tensor, Tensor]], me: int, sink: Tensor | None) -> Tensor:
    own = slice(me * HEADS, (me + 1) * HEADS)
    outs = torch.stack([out[:, own] for out, _ in made])
    stats = torch.stack([lse[:, own] for _, lse in made])
    return ops.bind("cpu", threads=1).merge_partials(outs, stats, sink=sink)[0]


def stress(world, rank: int, size: int, times: int) -> int:
    """Fused exchanges of 0 to 4 rows, one member late at random: each bit-equal to the merge."""
    g = Group(tuple(range(size)), rank, world.transport(tuple(range(size)), rank))
    cases = []
    for seed in range(SETS):
        made = partials(size, seed % 5, seed, torch.bfloat16)
        sink = torch.linspace(-2, 2, HEADS) if seed % 2 else None
        cases.append((made[rank], sink, merged(made, rank, sink)))
    late = torch.rand(times, generator=torch.Generator().manual_seed(5)) < 0.02
    for i, wait in enumerate(late.tolist()):
        (out, lse), sink, want = cases[i % SETS]
        if wait and rank == i % size:
            time.sleep(1e-4 * (i % 5))
        if i % 3 == 0 and (lent := g.landing(*out.shape, out.dtype)) is not None:
            out, lse = lent[0].copy_(out), lent[1].copy_(lse)
        got = g.merge_partials(out, lse, sink)
        assert torch.equal(got, want), (i, got, want)
    return times


def routes(world, rank: int, size: int) -> dict[str, list[str]]:
    """All routes of split decode agree; returns the verbs each was seen to use."""
    entered: list[str] = []
    members = tuple(range(size))
    g = Group(members, rank, world.transport(members, rank), lambda verb, *_: entered.append(verb))
    bound = ops.bind("cpu", threads=1)
    seen = {}
    for name, route in (
        ("a2a", PackRoute(g, bound)),
        ("flashinfer", PackRoute(g, bound, flashinfer=True)),
        ("ag_rs", GatherScatterRoute(g)),
        ("fused", FusedRoute(g)),
    ):
        entered.clear()
        for rows in (0, 1, 5):
            made = partials(size, rows, rows, torch.float32)
            for out, lse in made:
                out[lse == -torch.inf] = 0.0
            for sink in (None, torch.linspace(-2, 2, HEADS)):
                got = route(*made[rank], sink)
                assert torch.allclose(got, merged(made, rank, sink), atol=2e-6), (name, rows)
        seen[name] = sorted(set(entered))
    return seen
