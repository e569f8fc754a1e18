"""References of the row ops: copy_rows, sum_members.

Owns what they mean and what they refuse; knows nothing of ranks or of why rows move.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from anabranch.ops.signatures import Direction

SUMMED = (torch.float32, torch.bfloat16, torch.float16)


def copy_rows(
    dst: Tensor, src: Tensor, offset: int | Tensor, count: int | Tensor, direction: Direction
) -> None:
    """See ``signatures.CopyRows``."""
    _check_rows(dst, src, direction)
    first, n = _integer("offset", offset, dst), _integer("count", count, dst)
    window, plain = (src, dst) if direction == "scatter" else (dst, src)
    low = max(0, -first)
    high = min(n, plain.shape[0], window.shape[0] - first)
    if high <= low:
        return
    if direction == "scatter":
        dst[low:high] = src[first + low : first + high]
    else:
        dst[first + low : first + high] = src[low:high]


def sum_members(parts: Tensor | Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """See ``signatures.SumMembers``."""
    members = list(parts.unbind(0)) if isinstance(parts, Tensor) else list(parts)
    if not members:
        raise ValueError("sum_members: no parts; give one per member")
    first = members[0]
    if first.dtype not in SUMMED:
        raise ValueError(f"sum_members: dtype {first.dtype}; one of {SUMMED} can be summed")
    for n, part in enumerate([*members, *([] if out is None else [out])]):
        if part.shape != first.shape or part.dtype != first.dtype:
            raise ValueError(
                f"sum_members: part {n} is {tuple(part.shape)} {part.dtype}, "
                f"part 0 is {tuple(first.shape)} {first.dtype}; all must be alike"
            )
        _check_dense("sum_members", f"part {n}", part)
    total = first.float().clone()
    for part in members[1:]:
        total += part
    if out is None:
        return total.to(first.dtype)
    return out.copy_(total)


def _check_rows(dst: Tensor, src: Tensor, direction: str) -> None:
    if direction not in ("scatter", "gather"):
        raise ValueError(f"copy_rows: direction {direction!r}; use 'scatter' or 'gather'")
    if dst.dim() == 0 or src.dim() == 0:
        raise ValueError("copy_rows: a 0-dim tensor has no rows; give at least one dim")
    if dst.shape[1:] != src.shape[1:] or dst.dtype != src.dtype:
        raise ValueError(
            f"copy_rows: rows of dst are {tuple(dst.shape[1:])} {dst.dtype}, of src "
            f"{tuple(src.shape[1:])} {src.dtype}; they must be alike"
        )
    _check_dense("copy_rows", "dst", dst)
    _check_dense("copy_rows", "src", src)


def _check_dense(op: str, name: str, t: Tensor) -> None:
    """Rows are strided over the first dim only."""
    expected = 1
    for size, stride in zip(reversed(t.shape[1:]), reversed(t.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            raise ValueError(
                f"{op}: {name} {tuple(t.shape)} has strides {t.stride()}; past dim 0 it must be "
                "dense (rows are copied whole, along dim 0 only)"
            )
        expected *= size


def _integer(name: str, value: int | Tensor, dst: Tensor) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if (
        not isinstance(value, Tensor)
        or value.dim()
        or value.dtype not in (torch.int32, torch.int64)
    ):
        raise ValueError(f"copy_rows: {name} {value!r}; give an int or a 0-dim int32/int64 tensor")
    if value.device != dst.device:
        raise ValueError(
            f"copy_rows: {name} is on {value.device}, dst on {dst.device}; move it there"
        )
    return int(value)
