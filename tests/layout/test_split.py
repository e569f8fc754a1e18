"""Which rows each rank holds: every row once, in one order, balanced, for any length."""

import itertools

import numpy as np
import pytest

from anabranch.layout.mesh import DP, DP_CP, EVERY, NONE, Mesh, part
from anabranch.layout.split import RowSplit, cp_split, even_split, interleaved, zigzag


@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
def test_cp_rows_are_a_partition_of_any_length(cp: int) -> None:
    for count in [*range(1, 2 * cp + 2), 37, 130, 1000]:
        for start in (0, 1, 7):
            for rows in (
                [zigzag(count, cp, c) for c in range(cp)],
                [interleaved(start, count, cp, c) for c in range(cp)],
                [interleaved(start, count, cp, c, 3) for c in range(cp)],
            ):
                assert sorted(np.concatenate(rows).tolist()) == list(range(count))
                assert all((np.diff(r) > 0).all() for r in rows), "ascending on every rank"


def test_zigzag_balances_causal_work() -> None:
    """Row i attends to i + 1 keys: the heaviest of 8 ranks is within 2% of the mean."""
    work = [int((zigzag(4096, 8, c) + 1).sum()) for c in range(8)]
    assert max(work) <= 1.02 * sum(work) / 8
    contiguous = [int((np.arange(*part(4096, 8, c)) + 1).sum()) for c in range(8)]
    assert max(contiguous) > 1.8 * sum(contiguous) / 8


def test_interleaved_rows_have_the_cp_index_of_their_owner() -> None:
    from anabranch.layout.ownership import Ownership, Stripes

    for cp, ts, step in itertools.product((2, 4), (1, 2), (1, 3)):
        own = Ownership(Mesh(1, cp, 1, ts), 24, 1, Stripes(cp * ts, step, cp * ts * step * 4))
        for c in range(cp):
            position = 5 + interleaved(5, 400, cp, c, step)
            assert set((own.stripes.stripe_of(position) % cp).tolist()) == {c}


@pytest.mark.parametrize("mesh", [Mesh(2, 2, 1, 2), Mesh(4, 1, 2, 1), Mesh(1, 4, 1, 2)], ids=str)
def test_splits_count_every_row_once(mesh: Mesh) -> None:
    rows = [1, 0, 37, 5][: mesh.dp]
    split = even_split(mesh, rows)
    assert split.total == sum(rows)
    for dp, n in enumerate(rows):
        counts = [split.counts[r] for r in mesh.replica(dp)]
        assert sum(counts) == n and max(counts) - min(counts) <= 1
    both = split + split
    assert both.counts == tuple(2 * n for n in split.counts)
    for rank in range(mesh.world):
        assert split.local(rank, EVERY) == split.counts[rank]
        assert split.local(rank, NONE) == split.total
        assert split.local(rank, DP) == rows[mesh.coord(rank).dp]
        assert sum(split.member_counts(rank, EVERY, EVERY)) == split.total


def test_cp_splits_keep_the_rows_of_cp_ranks_together() -> None:
    mesh = Mesh(2, 2, 1, 2)
    split = cp_split(mesh, [[5, 2], [0, 1]])
    assert split == RowSplit(mesh, (3, 2, 1, 1, 0, 0, 1, 0))
    assert [split.local(r, DP_CP) for r in range(8)] == [5, 5, 2, 2, 0, 0, 1, 1]


def test_parts_are_balanced_and_fall_on_units() -> None:
    for total, parts, unit in itertools.product((0, 1, 7, 24, 1003), (1, 2, 3, 8), (1, 4)):
        cuts = [part(total, parts, i, unit) for i in range(parts)]
        assert cuts[0][0] == 0 and cuts[-1][1] == total
        assert all(a[1] == b[0] for a, b in itertools.pairwise(cuts))
        assert all(start % unit == 0 or start == total for start, _ in cuts)
        sizes = [stop - start for start, stop in cuts]
        assert max(sizes) - min(sizes) <= unit + unit - 1
