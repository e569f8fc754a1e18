"""Debug switches of the collectives: what each rank entered, and whether equal rows are equal.

`CollectiveTrace` is a group's `trace`: one line a verb, flushed, so that after a hang the last line
says where a rank stood. `differences` compares the ranks' traces inside every group. `check_equal`
and `Checked` compare bits across the ranks that should hold the same rows. No result changes.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

from anabranch.comm.group import CommError, Counts, Group, Transport

WHOLE = ("all_reduce", "broadcast", "merge_partials")
"""Verbs into which all members put the same number of rows."""


@dataclass(frozen=True)
class Entry:
    """One verb as one rank entered it. shape: of the tensor it put in."""

    step: int
    group: tuple[int, ...]
    verb: str
    shape: tuple[int, ...]
    dtype: str

    def line(self) -> str:
        group, shape = ",".join(map(str, self.group)), ",".join(map(str, self.shape))
        return f"{self.step} {group} {self.verb} {shape or '-'} {self.dtype}\n"

    @classmethod
    def parse(cls, line: str) -> "Entry":
        step, group, verb, shape, dtype = line.split()
        sizes = () if shape == "-" else tuple(map(int, shape.split(",")))
        return cls(int(step), tuple(map(int, group.split(","))), verb, sizes, dtype)

    @property
    def common(self) -> tuple[int, str, tuple[int, ...], str]:
        """What is the same on every member; rows differ where verbs are ragged."""
        shape = self.shape if self.verb in WHOLE else self.shape[1:]
        return self.step, self.verb, shape, self.dtype


class CollectiveTrace:
    """Writes this rank's entries. The runner sets `step` to the number of the plan it runs."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self.step = 0

    @classmethod
    def to_folder(cls, folder: str | Path, rank: int) -> "CollectiveTrace":
        """One file per rank, `rank<N>.trace`, begun anew."""
        path = Path(folder) / f"rank{rank}.trace"
        path.parent.mkdir(parents=True, exist_ok=True)
        return cls(path.open("w", buffering=1))

    def __call__(self, verb: str, members: tuple[int, ...], x: Tensor) -> None:
        dtype = str(x.dtype).removeprefix("torch.")
        self._out.write(Entry(self.step, members, verb, tuple(x.shape), dtype).line())


def read_traces(folder: str | Path) -> dict[int, list[Entry]]:
    """The entries of every rank that wrote to `folder`."""
    found = {}
    for path in Path(folder).glob("rank*.trace"):
        with path.open() as lines:
            found[int(path.stem.removeprefix("rank"))] = [Entry.parse(line) for line in lines]
    return found


def differences(traces: Mapping[int, Iterable[Entry]]) -> list[str]:
    """Where members of a group did not enter the same verbs in the same order; empty if nowhere."""
    by_group: dict[tuple[int, ...], dict[int, list[Entry]]] = {}
    for rank, entries in traces.items():
        for entry in entries:
            by_group.setdefault(entry.group, {}).setdefault(rank, []).append(entry)
    found = []
    for group, runs in sorted(by_group.items()):
        first = runs.get(group[0], [])
        for rank in group[1:]:
            found += _first_difference(group, first, rank, runs.get(rank, []))
    return found


def _first_difference(
    group: tuple[int, ...], ours: Sequence[Entry], rank: int, theirs: Sequence[Entry]
) -> list[str]:
    for i, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a.common != b.common:
            return [
                f"group {group}, entry {i}: rank {group[0]} {a.line().strip()}, "
                f"rank {rank} {b.line().strip()}"
            ]
    if len(ours) != len(theirs):
        return [
            f"group {group}: rank {group[0]} has {len(ours)} entries, rank {rank} {len(theirs)}"
        ]
    return []


def checksum(x: Tensor) -> int:
    """CRC-32 of the bits of x, whatever its strides."""
    if not x.numel():
        return 0
    return zlib.crc32(x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def check_equal(group: Group, x: Tensor, what: str) -> None:
    """CommError, naming ranks and `what`, unless x has the same bits on every member."""
    if group.transport is not None:
        _compare(group.transport, x, what)


def _compare(transport: Transport, x: Tensor, what: str) -> None:
    members = transport.members
    mine = torch.tensor([checksum(x)])
    sums = transport.all_gather(mine, [1] * len(members)).tolist()
    others = [r for r, s in zip(members, sums, strict=True) if s != sums[0]]
    if others:
        raise CommError(
            f"checksum of {what} among ranks {members}: rank {', '.join(map(str, others))} holds "
            f"other bits than rank {members[0]}"
        )


class Checked(Transport):
    """A transport whose results that must be equal on all members are compared by their bits."""

    def __init__(self, inner: Transport) -> None:
        self.members, self.me = inner.members, inner.me
        self._inner = inner

    def _same(self, verb: str, x: Tensor) -> Tensor:
        _compare(self._inner, x, verb)
        return x

    def all_gather(self, x: Tensor, counts: Counts) -> Tensor:
        return self._same("all_gather", self._inner.all_gather(x, counts))

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._same("all_reduce", self._inner.all_reduce(x))

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        return self._same("broadcast", self._inner.broadcast(x, root))

    def all_to_all(self, x: Tensor, send: Counts, recv: Counts) -> Tensor:
        return self._inner.all_to_all(x, send, recv)

    def reduce_scatter(self, x: Tensor, counts: Counts) -> Tensor:
        return self._inner.reduce_scatter(x, counts)

    def merge_partials(self, out: Tensor, lse: Tensor, sink: Tensor | None) -> Tensor:
        return self._inner.merge_partials(out, lse, sink)

    def accepts(self, verb: str, nbytes: int, dtype: torch.dtype) -> bool:
        return self._inner.accepts(verb, nbytes, dtype)

    def landing(
        self, rows: int, heads: int, width: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor] | None:
        return self._inner.landing(rows, heads, width, dtype)
