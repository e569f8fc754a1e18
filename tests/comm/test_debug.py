"""The collective trace tells where ranks parted; checksums tell whose bits differ."""

import torch
from tests.comm.ranks import run_threads

from anabranch.comm.debug import (
    Checked,
    CollectiveTrace,
    Entry,
    check_equal,
    checksum,
    differences,
    read_traces,
)
from anabranch.comm.group import CommError, Group

HERE = tuple(range(3))


def traced(world, rank: int, size: int, folder: str, wrong: bool) -> None:
    trace = CollectiveTrace.to_folder(folder, rank)
    g = Group(HERE, rank, world.transport(HERE, rank), trace=trace)
    pair = (
        Group((0, 2), rank // 2, world.transport((0, 2), rank // 2), trace=trace)
        if rank != 1
        else None
    )
    for step in range(2):
        trace.step = step
        g.all_gather(torch.ones(rank, 4), [0, 1, 2])
        g.all_reduce(torch.ones(2, 4))
        if pair is not None:
            pair.broadcast(torch.ones(1, dtype=torch.bfloat16))
        if wrong and step == 1:
            g.all_reduce(torch.ones(2, 4 if rank else 5)[:, :4])
            trace("all_reduce", HERE, torch.ones(2, 4 + rank))
    g.merge_partials(torch.ones(1, 3, 4), torch.zeros(1, 3), None)


def test_equal_traces_have_no_differences(tmp_path) -> None:
    run_threads("threads", 3, traced, str(tmp_path), False)
    traces = read_traces(tmp_path)
    assert sorted(traces) == [0, 1, 2] and len(traces[0]) == 7 and len(traces[1]) == 5
    assert traces[0][2] == Entry(0, (0, 2), "broadcast", (1,), "bfloat16")
    assert differences(traces) == []


def test_differences_name_group_entry_and_ranks(tmp_path) -> None:
    run_threads("threads", 3, traced, str(tmp_path), True)
    found = differences(read_traces(tmp_path))
    assert len(found) == 2 and all("group (0, 1, 2), entry 5" in text for text in found), found
    assert "rank 0 1 0,1,2 all_reduce 2,4 float32" in found[0] and "rank 1 1" in found[0]


def test_missing_entries_are_differences() -> None:
    entry = Entry(3, (0, 1), "all_reduce", (), "float32")
    assert Entry.parse(entry.line()) == entry
    (text,) = differences({0: [entry], 1: []})
    assert "rank 0 has 1 entries, rank 1 0" in text


def test_checksum_sees_bits_not_strides() -> None:
    x = torch.randn(6, 4).bfloat16()
    assert checksum(x) == checksum(x.t().contiguous().t())
    y = x.clone()
    y[3, 1] += 1e-2 + y[3, 1].abs()
    assert checksum(x) != checksum(y) and checksum(x[:0]) == 0


def compared(world, rank: int, size: int, spoilt: int | None) -> str:
    inner = world.transport(HERE, rank)
    g = Group(HERE, rank, Checked(inner))
    rows = g.all_gather(torch.full((1, 2), float(rank)), [1, 1, 1])
    assert g.all_reduce(rows).tolist() == [[0.0, 0.0], [3.0, 3.0], [6.0, 6.0]]
    if rank == spoilt:
        rows[2, 1] += 1e-6
    try:
        check_equal(g, rows, "rows after attention")
    except CommError as error:
        return str(error)
    return ""


def test_other_bits_are_named() -> None:
    assert run_threads("threads", 3, compared, None) == [""] * 3
    for text in run_threads("threads", 3, compared, 1):
        assert "rows after attention among ranks (0, 1, 2): rank 1 holds other bits" in text


def test_checked_results_that_differ_are_an_error() -> None:
    class Spoilt(Checked):
        """A transport whose sums differ on member 1."""

        def all_reduce(self, x):
            return super().all_reduce(x) + self.me

    def body(world, rank: int, size: int) -> str:
        g = Group(HERE, rank, Checked(Spoilt(world.transport(HERE, rank))))
        try:
            g.all_reduce(torch.ones(2))
        except CommError as error:
            return str(error)
        return ""

    assert all("rank 1, 2 holds other bits" in text for text in run_threads("threads", 3, body))
