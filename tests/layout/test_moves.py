"""Moves: every pair of layouts against a numpy simulation; bound moves on threads, uneven rows."""

import itertools
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from anabranch.comm.group import Group
from anabranch.comm.moves import bind_move, row_moves
from anabranch.comm.transports.threads import ThreadWorld
from anabranch.layout.costs import SHIPPED
from anabranch.layout.mesh import AXES, DP, DP_CP, EVERY, NONE, Axes, Mesh
from anabranch.layout.rows import Rows, Verb, plan_move
from anabranch.layout.split import RowSplit
from anabranch.ops.reference.rows import copy_rows

CUBE = Mesh(2, 2, 1, 2)
LIVE = ("dp", "cp", "ts")
TRUTH = np.random.default_rng(0).normal(size=(16, 3))


def layouts(kinds: str) -> Iterator[Rows]:
    for kind in itertools.product(kinds, repeat=3):
        pairs = list(zip(LIVE, kind, strict=True))
        shard = frozenset(a for a, k in pairs if k == "s")
        yield Rows(shard, frozenset(a for a, k in pairs if k == "p"))


def digit(row: int) -> dict[str, int]:
    return {"dp": row // 8, "cp": row % 2, "ts": row // 2 % 2}


def owned(rank: int, shard: Axes) -> list[int]:
    here = CUBE.coord(rank)
    return [i for i in range(16) if all(digit(i)[a] == getattr(here, a) for a in shard)]


def placed(rows: Rows) -> dict[int, tuple[list[int], np.ndarray]]:
    """Local (row ids, values) of every rank; a partial axis carries parts that sum to the truth."""
    rng, parts, state = np.random.default_rng(1), {}, {}
    for rank in range(8):
        group = CUBE.group(rank, rows.partial)
        if group not in parts:
            values = rng.normal(size=(len(group), *TRUTH.shape))
            values[-1] = TRUTH - values[:-1].sum(0)
            parts[group] = values
        ids = owned(rank, rows.shard)
        state[rank] = (ids, parts[group][group.index(rank)][ids])
    return state


def simulate(state, move):
    for verb, along in move:
        after = {}
        for rank in range(8):
            group = CUBE.group(rank, along)
            ids, values = state[rank]
            if verb in (Verb.ALL_REDUCE, Verb.REDUCE_SCATTER):
                assert all(state[peer][0] == ids for peer in group)
                values = sum(state[peer][1] for peer in group)
            if verb in (Verb.SLICE, Verb.REDUCE_SCATTER):
                mine = set(owned(rank, along))
                keep = [k for k, i in enumerate(ids) if i in mine]
                ids, values = [ids[k] for k in keep], values[keep]
            if verb is Verb.ALL_GATHER:
                ids = [i for peer in group for i in state[peer][0]]
                values = np.concatenate([state[peer][1] for peer in group])
            after[rank] = (ids, values)
        state = after
    return state


def test_all_216_pairs_of_layouts() -> None:
    pairs = list(itertools.product(layouts("rsp"), layouts("rs")))
    assert len(pairs) == 216
    for src, dst in pairs:
        move = plan_move(src, dst, CUBE)
        assert len(move) <= 3, (src, dst, move)
        for rank, (ids, values) in simulate(placed(src), move).items():
            assert sorted(ids) == owned(rank, dst.shard), (src, dst)
            order = np.argsort(ids)
            np.testing.assert_allclose(values[order], TRUTH[sorted(ids)], atol=1e-12)


def test_a_debt_cannot_be_created_and_a_debt_may_stay() -> None:
    with pytest.raises(ValueError, match="create a debt along"):
        plan_move(Rows(), Rows(partial=DP))
    both = Rows(DP, frozenset({"cp", "ts"}))
    assert plan_move(both, Rows(DP, frozenset({"cp"}))) == ((Verb.ALL_REDUCE, frozenset({"ts"})),)
    with pytest.raises(ValueError, match="both sharded and partial"):
        Rows(DP, DP)


def test_axes_of_size_one_move_nothing() -> None:
    assert plan_move(Rows(EVERY), Rows(partial=NONE), Mesh(1, 1, 1, 1)) == ()
    assert plan_move(Rows(EVERY), Rows(), Mesh(2, 1, 1, 1)) == ((Verb.ALL_GATHER, DP),)
    for src, dst in itertools.product(layouts("rsp"), layouts("rs")):
        assert plan_move(src, dst, Mesh()) == ()


# bound moves ----------------------------------------------------------------------------------

MESHES = [Mesh(2, 2, 1, 1), Mesh(4, 1, 1, 1), Mesh(1, 2, 2, 1), Mesh(2, 1, 1, 2), Mesh(2, 2, 1, 2)]
SHARDS = (NONE, DP, DP_CP, EVERY)


def bound_pairs(mesh: Mesh) -> list[tuple[Rows, Rows]]:
    """Pairs over shards that are runs of the layout order, with every debt that src can carry and
    that leaves runs when what is not owed is sliced first."""
    pairs, runs = [], [mesh.live(shard) for shard in SHARDS]
    for s, d in itertools.product(SHARDS, SHARDS):
        free = [a for a in AXES if a not in s]
        for n in range(len(free) + 1):
            for debt in map(frozenset, itertools.combinations(free, n)):
                if mesh.live(s | (d - s - debt)) in runs:
                    pairs.append((Rows(s, debt), Rows(d)))
    return pairs


def test_slices_that_are_no_runs_are_refused() -> None:
    mesh = Mesh(2, 2, 1, 2)
    with pytest.raises(AssertionError, match="cuts no runs"):
        bind_move(
            Rows(partial=DP), Rows(EVERY), RowSplit(mesh, (1,) * 8), 0,
            lambda axes: Group(mesh.group(0, axes), 0),
        )  # fmt: skip


def counts_of(mesh: Mesh, seed: int) -> tuple[int, ...]:
    """Uneven rows per rank: 1, 0, 37, 5, then random."""
    drawn = np.random.default_rng(seed).integers(0, 4, mesh.world).tolist()
    return tuple([1, 0, 37, 5, *drawn][: mesh.world])


@pytest.mark.timeout(100)
@pytest.mark.parametrize("form", ["v", "max", "sum", "auto"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_bound_moves_of_uneven_rows(mesh: Mesh, form: str) -> None:
    split = RowSplit(mesh, counts_of(mesh, 3))
    truth = torch.randn(split.total, 3, generator=torch.Generator().manual_seed(0))
    starts = np.cumsum((0, *split.counts))
    move_form = row_moves(form, copy_rows, SHIPPED["threads"], poison=True)
    world = ThreadWorld(20.0)

    def rows_of(rank: int, shard: Axes) -> torch.Tensor:
        held = mesh.group(rank, EVERY - shard)
        return torch.cat([truth[starts[r] : starts[r + 1]] for r in held])

    def start(rank: int, src: Rows) -> torch.Tensor:
        """Member i of n debtors holds 2^i / (2^n - 1) of the rows: no two parts are alike."""
        group = mesh.group(rank, mesh.live(src.partial))
        share = 2.0 ** group.index(rank) / (2.0 ** len(group) - 1)
        return rows_of(rank, src.shard) * share

    failures: list[BaseException] = []

    def work(rank: int) -> None:
        def group_of(axes: Axes) -> Group:
            members = mesh.group(rank, axes)
            me = members.index(rank)
            return Group(members, me, world.transport(members, me) if len(members) > 1 else None)

        try:
            for src, dst in bound_pairs(mesh):
                got = bind_move(src, dst, split, rank, group_of, move_form)(start(rank, src))
                torch.testing.assert_close(got, rows_of(rank, dst.shard), atol=1e-5, rtol=1e-5)
        except BaseException as error:
            failures.append(error)
            world.abort()

    threads = [threading.Thread(target=work, args=(r,)) for r in range(mesh.world)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures[0]


@pytest.mark.parametrize("form", ["max", "sum"])
def test_ids_travel_exactly(form: str) -> None:
    """Expert ids are integers; padding of a poisoned buffer must not reach them."""
    mesh, world = Mesh(2, 1, 1, 1), ThreadWorld(20.0)
    split = RowSplit(mesh, (3, 1))
    ids = torch.tensor([[5, 1], [7, 0], [9, 9], [0, 2**20 + 1]])
    got: dict[int, torch.Tensor] = {}

    def work(rank: int) -> None:
        def group_of(axes: Axes) -> Group:
            return Group((0, 1), rank, world.transport((0, 1), rank))

        move = bind_move(
            Rows(EVERY), Rows(), split, rank, group_of,
            row_moves(form, copy_rows, SHIPPED["threads"], poison=True),
        )  # fmt: skip
        got[rank] = move(ids[:3] if rank == 0 else ids[3:])

    threads = [threading.Thread(target=work, args=(r,)) for r in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for rank in range(2):
        assert got[rank].dtype == torch.int64 and torch.equal(got[rank], ids)
