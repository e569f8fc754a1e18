"""The wires of partial outputs: buffers a transport moves, and the views ops read and write.

Owns where (out, lse) lie in a buffer; pack and merge see only the strides of these views. Buffers
are ``empty``: what no row reaches stays unwritten and is never read. N members, B rows, h heads of
one member, D width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LSE_BYTES = 4
ROW_BYTES = 16


@dataclass(frozen=True)
class Wire:
    """One side of an exchange: the buffers to move, in order, and the views on them.

    ``out`` is [N, B, h, D] and ``lse`` [N, B, h] fp32, each with the wire's own strides. On the
    sending side n is the member that owns the heads, on the receiving side the one that attended.
    """

    buffers: tuple[Tensor, ...]
    out: Tensor
    lse: Tensor


def interleaved(
    members: int,
    rows: int,
    heads: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Wire:
    """Peer-outside rows with the lse in each row's tail: one buffer [N, B, h, D + w] to move.

    w is 16 bytes' worth of elements, so a row of aligned D stays aligned.
    """
    tail = ROW_BYTES // dtype.itemsize
    buffer = torch.empty(members, rows, heads, width + tail, dtype=dtype, device=device)
    return interleaved_views(buffer, width)


def interleaved_views(buffer: Tensor, width: int) -> Wire:
    """The views of a buffer [N, B, h, D + w], where w holds at least an fp32."""
    tail = LSE_BYTES // buffer.element_size()
    if width * buffer.element_size() % LSE_BYTES or buffer.shape[-1] < width + tail:
        raise ValueError(
            f"interleaved wire: rows of {buffer.shape[-1]} x {buffer.element_size()} bytes cannot "
            f"hold {width} elements and an aligned fp32; use at least {width + tail} elements and "
            f"D a multiple of {tail}"
        )
    lse = buffer[..., width : width + tail].view(torch.float32).squeeze(-1)
    return Wire((buffer,), buffer[..., :width], lse)


def split(
    members: int,
    rows: int,
    heads: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Wire:
    """Peer-inside payload [B, h, N, D] and stats [B, h, N, 2] fp32, two buffers to move.

    The form of FlashInfer's ``decode_cp_a2a_alltoall``. Slot 0 of the stats is the lse; slot 1 is
    neither written nor read.
    """
    payload = torch.empty(rows, heads, members, width, dtype=dtype, device=device)
    stats = torch.empty(rows, heads, members, 2, dtype=torch.float32, device=device)
    return split_views(payload, stats)


def split_views(payload: Tensor, stats: Tensor) -> Wire:
    """The views of a payload [B, h, N, D] and its stats [B, h, N, 2] fp32."""
    if stats.shape != (*payload.shape[:3], 2) or stats.dtype != torch.float32:
        raise ValueError(
            f"split wire: stats are {tuple(stats.shape)} {stats.dtype}; they must be float32 "
            f"{(*payload.shape[:3], 2)}"
        )
    return Wire((payload, stats), payload.permute(2, 0, 1, 3), stats[..., 0].permute(2, 0, 1))
