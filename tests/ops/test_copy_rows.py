"""copy_rows, case by case (D3), and its speed (D4)."""

import itertools
import time
from collections.abc import Callable
from typing import cast

import pytest
import torch
from tests.ops.providers import Bind

from anabranch import ops
from anabranch.ops.signatures import Direction

DIRECTIONS: tuple[Direction, ...] = ("scatter", "gather")


def by_hand(
    dst: torch.Tensor, src: torch.Tensor, offset: int, count: int, direction: Direction
) -> torch.Tensor:
    """What dst must hold: one row after another, rows that do not exist left out."""
    dst = dst.clone()
    for i in range(max(count, 0)):
        to, of = (i, offset + i) if direction == "scatter" else (offset + i, i)
        if 0 <= to < dst.shape[0] and 0 <= of < src.shape[0]:
            dst[to] = src[of]
    return dst


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_clamp(bound: ops.Ops, direction: Direction) -> None:
    for rows_dst, rows_src in itertools.product((0, 1, 4), (0, 3, 6)):
        for offset, count in itertools.product(range(-3, 8), range(-2, 9)):
            src = torch.arange(rows_src * 6, dtype=torch.float32).view(rows_src, 2, 3) + 1
            dst = -torch.ones(rows_dst, 2, 3)
            expected = by_hand(dst, src, offset, count, direction)
            bound.copy_rows(dst, src, offset, count, direction)
            assert torch.equal(dst, expected), (rows_dst, rows_src, offset, count)


@pytest.mark.parametrize("extreme", [2**62, -(2**62), 2**31])
def test_extreme_windows_copy_nothing(bound: ops.Ops, extreme: int) -> None:
    dst, src = torch.zeros(3, 2), torch.ones(3, 2)
    for direction in DIRECTIONS:
        bound.copy_rows(dst, src, extreme, 3, direction)
    bound.copy_rows(dst, src, 0, -extreme if extreme > 0 else extreme, "scatter")
    assert not dst.any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_counts_may_be_tensors(bound: ops.Ops, dtype: torch.dtype, direction: Direction) -> None:
    """They are read at each call: the same objects with other values give other rows."""
    offset, count = torch.tensor(0, dtype=dtype), torch.tensor(0, dtype=dtype)
    src = torch.arange(10.0).view(5, 2)
    for at, n in ((0, 2), (3, 1), (4, 9), (1, 0), (2, -5)):
        offset.fill_(at), count.fill_(n)
        dst = torch.zeros(5, 2)
        bound.copy_rows(dst, src, offset, count, direction)
        assert torch.equal(dst, by_hand(torch.zeros(5, 2), src, at, n, direction))


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.bool, torch.int64, torch.bfloat16, torch.float16, torch.float8_e4m3fn],
)
def test_any_dtype(bound: ops.Ops, dtype: torch.dtype) -> None:
    src = torch.randint(0, 2, (6, 7), generator=torch.Generator().manual_seed(0)).to(dtype)
    dst = torch.zeros(6, 7).to(dtype)
    bound.copy_rows(dst, src, 2, 3, "scatter")
    bits = (
        torch.int64 if dtype.itemsize == 8 else torch.int16 if dtype.itemsize == 2 else torch.uint8
    )
    assert torch.equal(dst[:3].view(bits), src[2:5].view(bits))
    assert not dst[3:].view(bits).any()


def test_rows_may_be_strided_and_one_dimensional(bound: ops.Ops) -> None:
    src, dst = torch.randn(8, 3, 4), torch.zeros(9, 2, 4)
    bound.copy_rows(dst[:, 1], src[:, 2], 5, 2, "gather")
    assert torch.equal(dst[5:7, 1], src[:2, 2])
    assert not dst[:, 0].any() and not dst[:5].any() and not dst[7:].any()
    line = torch.zeros(5)
    bound.copy_rows(line, torch.arange(10.0)[::2], 1, 3, "scatter")
    assert line.tolist() == [2.0, 4.0, 6.0, 0.0, 0.0]
    bound.copy_rows(torch.zeros(3, 0), torch.zeros(3, 0), 0, 3, "scatter")


def test_large_copies_over_threads(bind: Bind) -> None:
    src = torch.randn(3001, 257)
    dst = torch.zeros(2000, 257)
    bind(3).copy_rows(dst, src, 900, 1999, "scatter")
    assert torch.equal(dst[:1999], src[900:2899])
    assert not dst[1999:].any()


@pytest.mark.parametrize(
    "dst, src, offset, count, direction",
    [
        (torch.zeros(()), torch.zeros(3), 0, 1, "scatter"),
        (torch.zeros(3), torch.zeros(()), 0, 1, "gather"),
        (torch.zeros(3, 2), torch.zeros(3, 4), 0, 1, "scatter"),
        (torch.zeros(3, 2), torch.zeros(3, 2, 1), 0, 1, "scatter"),
        (torch.zeros(3, 2), torch.zeros(3, 2).bfloat16(), 0, 1, "scatter"),
        (torch.zeros(2, 3).t(), torch.zeros(3, 2), 0, 1, "scatter"),
        (torch.zeros(3, 2), torch.zeros(3, 4)[:, ::2], 0, 1, "gather"),
        (torch.zeros(3, 2), torch.zeros(3, 2), 0, 1, "across"),
        (torch.zeros(3, 2), torch.zeros(3, 2), 0.5, 1, "scatter"),
        (torch.zeros(3, 2), torch.zeros(3, 2), True, 1, "scatter"),
        (torch.zeros(3, 2), torch.zeros(3, 2), 0, torch.tensor([1]), "scatter"),
        (torch.zeros(3, 2), torch.zeros(3, 2), 0, torch.tensor(1.0), "scatter"),
        (torch.zeros(3, 2), torch.zeros(3, 2), torch.tensor(1, device="meta"), 1, "scatter"),
    ],
)
def test_refusals(
    bound: ops.Ops, dst: torch.Tensor, src: torch.Tensor, offset: int, count: int, direction: str
) -> None:
    with pytest.raises(ValueError, match="copy_rows"):
        bound.copy_rows(dst, src, offset, count, cast(Direction, direction))


def best(*jobs: Callable[[], object], rounds: int = 60, repeat: int = 1) -> list[float]:
    """Least seconds of each job, taken in turn: the minimum is what others leave alone."""
    least = [float("inf")] * len(jobs)
    for _ in range(rounds):
        for i, job in enumerate(jobs):
            start = time.perf_counter()
            for _ in range(repeat):
                job()
            least[i] = min(least[i], (time.perf_counter() - start) / repeat)
    return least


@pytest.mark.slow
def test_speed() -> None:
    """D4: at most 3 us at 4 KB; at least 0.9 of the copy bound at 4 MB."""
    bound = ops.bind("cpu", provider="cpp")
    src, dst = torch.randn(2048, 1024), torch.zeros(1024, 1024)
    (small,) = best(lambda: bound.copy_rows(dst[:1], src, 7, 1, "scatter"), repeat=200)
    assert small <= 3e-6
    ours, theirs = best(
        lambda: bound.copy_rows(dst, src, 1024, 1024, "scatter"), lambda: dst.copy_(src[1024:])
    )
    assert theirs / ours >= 0.9
