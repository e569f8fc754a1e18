"""References of the exchange's ops: pack_partials, merge_partials.

Owns the arithmetic of a softmax split over members and what is refused; the wire's layout comes in
through strides, so no layout is named here.
"""

import math

import torch
from torch import Tensor

from anabranch.ops.signatures import Base

LN2 = math.log(2.0)
INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WORD = 4  # bytes: an fp32 lse must be addressable right behind a row of D elements
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
MERGED = (torch.float32, torch.bfloat16, torch.float16)


def pack_partials(out: Tensor, lse: Tensor, dst_out: Tensor, dst_lse: Tensor) -> None:
    """See ``signatures.PackPartials``."""
    _check_pack(out, lse, dst_out, dst_lse)
    rows, (members, _, heads, _) = out.shape[0], dst_out.shape
    bits = INTS[out.element_size()]
    for n in range(members):
        own = slice(n * heads, (n + 1) * heads)
        dst_out[n, :rows].view(bits).copy_(out[:, own].view(bits))
        dst_lse[n, :rows].copy_(lse[:, own])


def merge_partials(
    partials: Tensor,
    lse: Tensor,
    *,
    base: Base = "e",
    sink: Tensor | None = None,
    out: Tensor | None = None,
    lse_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``signatures.MergePartials``."""
    _check_merge(partials, lse, base, sink, out, lse_out)
    members, rows, heads, width = partials.shape
    z = lse * LN2 if base == "2" else lse
    z = torch.where(torch.isfinite(z), z, -math.inf)
    peak = z.amax(0) if members else lse.new_full((rows, heads), -math.inf)
    if sink is not None:
        sink = torch.where(torch.isfinite(sink), sink, -math.inf)
        peak = torch.maximum(peak, sink)
    shift = torch.where(peak == -math.inf, 0.0, peak)
    total = torch.zeros_like(peak)
    acc = torch.zeros(rows, heads, width, dtype=torch.float32, device=partials.device)
    for n in range(members):
        weight = torch.exp(z[n] - shift)
        total += weight
        used = (weight > 0).unsqueeze(-1)
        acc = torch.where(used, acc + weight.unsqueeze(-1) * partials[n].float(), acc)
    if sink is not None:
        total += torch.exp(sink - shift)
    merged = torch.where((total > 0).unsqueeze(-1), acc / total.unsqueeze(-1), 0.0)
    natural = torch.log(total) + shift
    if out is None:
        out = torch.empty(rows, heads, width, dtype=partials.dtype, device=partials.device)
    if lse_out is None:
        lse_out = torch.empty(rows, heads, dtype=torch.float32, device=partials.device)
    return out.copy_(merged), lse_out.copy_(natural)


def _dense_last(t: Tensor) -> bool:
    return t.shape[-1] <= 1 or t.stride(-1) == 1


def _check_pack(out: Tensor, lse: Tensor, dst_out: Tensor, dst_lse: Tensor) -> None:
    op = "pack_partials"
    if out.dim() != 3 or lse.dim() != 2 or dst_out.dim() != 4 or dst_lse.dim() != 3:
        raise ValueError(
            f"{op}: out, lse, dst_out, dst_lse have {out.dim()}, {lse.dim()}, {dst_out.dim()}, "
            f"{dst_lse.dim()} dims; they must have 3, 2, 4, 3"
        )
    if lse.dtype != torch.float32 or dst_lse.dtype != torch.float32:
        raise ValueError(f"{op}: lse is {lse.dtype}, dst_lse {dst_lse.dtype}; both must be float32")
    if dst_out.dtype != out.dtype and not (out.dtype in FP8 and dst_out.dtype == torch.uint8):
        raise ValueError(
            f"{op}: out is {out.dtype}, dst_out {dst_out.dtype}; they must be the same"
        )
    rows, group, width = out.shape
    members, room, heads, _ = dst_out.shape
    if members == 0 or group % members:
        raise ValueError(f"{op}: {group} heads do not divide over {members} members")
    if width * out.element_size() % WORD:
        raise ValueError(
            f"{op}: D {width} x {out.element_size()} bytes is not a multiple of the word, "
            f"{WORD} bytes"
        )
    if not _dense_last(out) or not _dense_last(dst_out):
        raise ValueError(
            f"{op}: last dim of out has stride {out.stride(-1)}, of dst_out {dst_out.stride(-1)}; "
            "both must be 1"
        )
    if rows > room:
        raise ValueError(f"{op}: {rows} rows do not fit a buffer of {room}")
    if (lse.shape, heads, dst_out.shape[3], dst_lse.shape) != (
        out.shape[:2],
        group // members,
        width,
        dst_out.shape[:3],
    ):
        raise ValueError(
            f"{op}: out {tuple(out.shape)} and lse {tuple(lse.shape)} do not match dst_out "
            f"{tuple(dst_out.shape)} and dst_lse {tuple(dst_lse.shape)}; these must be "
            f"[{members}, >={rows}, {group // members}, {width}] and the same less the last dim"
        )


def _check_merge(
    partials: Tensor,
    lse: Tensor,
    base: str,
    sink: Tensor | None,
    out: Tensor | None,
    lse_out: Tensor | None,
) -> None:
    op = "merge_partials"
    if base not in ("e", "2"):
        raise ValueError(f"{op}: base {base!r}; use 'e' or '2'")
    if partials.dim() != 4 or lse.shape != partials.shape[:3]:
        raise ValueError(
            f"{op}: partials {tuple(partials.shape)}, lse {tuple(lse.shape)}; they must be "
            "[N, B, h, D] and [N, B, h]"
        )
    for name, stats in (("lse", lse), ("sink", sink), ("lse_out", lse_out)):
        if stats is not None and stats.dtype != torch.float32:
            raise ValueError(f"{op}: {name} is {stats.dtype}; it must be float32")
    if partials.dtype not in MERGED:
        raise ValueError(f"{op}: partials are {partials.dtype}; one of {MERGED} can be merged")
    if not _dense_last(partials) or (out is not None and not _dense_last(out)):
        raise ValueError(f"{op}: the last dim of partials and out must have stride 1")
    _, rows, heads, width = partials.shape
    if sink is not None and sink.shape != (heads,):
        raise ValueError(f"{op}: sink {tuple(sink.shape)}; one per head, [{heads}], is needed")
    if out is not None and (
        out.shape != (rows, heads, width) or out.dtype not in (partials.dtype, torch.float32)
    ):
        raise ValueError(
            f"{op}: out {tuple(out.shape)} {out.dtype}; it must be {(rows, heads, width)} "
            f"{partials.dtype} or float32"
        )
    if lse_out is not None and lse_out.shape != (rows, heads):
        raise ValueError(f"{op}: lse_out {tuple(lse_out.shape)}; it must be {(rows, heads)}")
