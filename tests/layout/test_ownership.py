"""Who owns which position and which head, by brute force over every legal mesh."""

import itertools

import numpy as np
import pytest

from anabranch.layout.mesh import STRIPE, Mesh
from anabranch.layout.ownership import Ownership, Stripes

MESHES = [
    Mesh(dp, cp, th, ts)
    for dp, cp, th, ts in itertools.product((1, 2, 3), (1, 2, 4), (1, 2, 3), (1, 2, 4))
    if dp * cp * th * ts <= 16
]


def ownership(
    mesh: Mesh, heads: int = 24, kv: int = 1, split: bool = True, i: int = 1
) -> Ownership:
    count = mesh.cp * mesh.ts
    page = count * i * 2
    return Ownership(mesh, heads, kv, Stripes(count, i, page), split)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("interleave", [1, 2, 5, 16])
def test_every_position_has_one_owner_and_one_slot(count: int, interleave: int) -> None:
    stripes = Stripes(count, interleave, page=count * interleave * 3)
    position = np.arange(700)
    owner, slot = stripes.stripe_of(position), stripes.slot_of(position)
    assert owner.tolist() == [p // interleave % count for p in range(700)]
    for s in range(count):
        mine = position[owner == s]
        assert slot[mine].tolist() == list(range(len(mine))), "slots are dense and ascending"
        assert stripes.positions(0, 700, s).tolist() == mine.tolist()
        lengths = [int((mine < n).sum()) for n in range(701)]
        assert stripes.local_len(np.arange(701), s).tolist() == lengths
        low, high = 37, 555
        assert stripes.positions(low, high, s).tolist() == [p for p in mine if low <= p < high]
    # a page's positions lie in the same local page on every stripe
    assert (slot // stripes.local_page == position // stripes.page).all()


def test_a_page_that_stripes_do_not_divide_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        ValueError, match=r"page of 64 .* 3 stripes of interleave 1; use a multiple"
    ):
        Stripes(3, 1, 64)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_ranks_and_coordinates_are_one_to_one(mesh: Mesh) -> None:
    seen = set()
    for rank in range(mesh.world):
        c = mesh.coord(rank)
        a, s = mesh.attn_tp, mesh.ts
        assert rank == (c.dp * mesh.cp + c.cp) * a + c.th * s + c.ts
        assert mesh.rank(c.dp, c.cp, c.th, c.ts) == rank and c.tp == c.th * s + c.ts
        seen.add((c.dp, c.cp, c.th, c.ts))
    assert len(seen) == mesh.world


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_stripe_groups_stay_in_a_replica_and_hold_every_stripe(mesh: Mesh) -> None:
    own = ownership(mesh)
    for rank in range(mesh.world):
        group = own.group(rank)
        assert rank in group and list(group) == sorted(group)
        assert {mesh.coord(r).dp for r in group} == {mesh.coord(rank).dp}
        assert {mesh.coord(r).th for r in group} == {mesh.coord(rank).th}
        stripes = own.group_stripes(rank)
        assert sorted(stripes) == list(range(mesh.cp * mesh.ts))
        c = mesh.coord(rank)
        assert own.stripe(rank) == c.ts * mesh.cp + c.cp
        if own.striped:
            assert group == mesh.group(rank, mesh.live(STRIPE))


@pytest.mark.parametrize("mesh", [m for m in MESHES if 48 % m.replica_size == 0], ids=str)
def test_heads_have_one_owner_within_resident_weights(mesh: Mesh) -> None:
    for split in (True, False):
        own = ownership(mesh, heads=48, split=split)
        for dp in range(mesh.dp):
            owners = [h for r in mesh.replica(dp) for h in own.decode_heads(r)]
            copies = 1 if split else mesh.cp
            assert sorted(owners) == sorted(list(range(48)) * copies)
        for rank in range(mesh.world):
            resident, owned = own.prefill_heads(rank), own.decode_heads(rank)
            assert set(owned) <= set(resident)
            c = mesh.coord(rank)
            if split:
                width = 48 // mesh.replica_size
                assert owned.start == (c.tp * mesh.cp + c.cp) * width


GROUPED = [
    (mesh, kv, heads)
    for mesh, (kv, heads) in itertools.product(MESHES, ((1, 24), (2, 24), (3, 24), (4, 24), (3, 6)))
    if heads % mesh.replica_size == 0 and (kv % mesh.th == 0 or mesh.th % kv == 0)
]


@pytest.mark.parametrize(("mesh", "kv", "heads"), GROUPED, ids=str)
def test_every_query_head_finds_its_kv_head_in_store(mesh: Mesh, kv: int, heads: int) -> None:
    own = ownership(mesh, heads, kv)
    stored: dict[int, int] = {}
    for rank in range(mesh.world):
        kept = own.kv_range(rank)
        for h in {*own.group_heads(rank), *own.prefill_heads(rank)}:
            (index,) = own.kv_map(rank, (h,))
            assert kept[index] == h * kv // heads
        for k in kept:
            stored[k] = stored.get(k, 0) + 1
    assert set(stored) == set(range(kv)) and len(set(stored.values())) == 1
    # each stripe member holds 1/N of the positions, so a head's copies are its holders / N
    assert stored[0] // mesh.dp // own.stripes.count == own.copies


@pytest.mark.parametrize(("c", "a", "s"), [(2, 2, 2), (2, 4, 2), (4, 2, 2)])
def test_partials_reach_the_owner_of_their_head(c: int, a: int, s: int) -> None:
    """V of head h is h: natural head order would hand owners other ranks' heads."""
    mesh = Mesh(1, c, a // s, s)
    own = ownership(mesh)
    natural_is_wrong = False
    for rank in range(mesh.world):
        group, heads = own.group(rank), own.group_heads(rank)
        width = len(heads) // len(group)
        me = group.index(rank)
        # every member attends for all heads of the group, in group head order, and packs by member
        received = [heads[me * width : (me + 1) * width] for _ in group]
        assert all(list(part) == list(own.decode_heads(rank)) for part in received)
        natural = sorted(heads)[me * width : (me + 1) * width]
        natural_is_wrong |= natural != list(own.decode_heads(rank))
    assert natural_is_wrong == (c > 1 and s > 1)


def test_ragged_groups_are_mapped_explicitly() -> None:
    """6 heads, 3 KV heads, cp 2: heads 0-2 use KV 0, 0, 1."""
    own = Ownership(Mesh(1, 2, 1, 1), 6, 3, Stripes(2, 1, 64))
    assert own.kv_map(0, own.decode_heads(0)) == (0, 0, 1)
    assert own.kv_map(1, own.decode_heads(1)) == (1, 2, 2)
