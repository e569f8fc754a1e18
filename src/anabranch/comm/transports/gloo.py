"""torch.distributed's gloo: the reference between processes, and the way across hosts.

One process group per group of ranks. v-forms are padded to the longest member (gloo has no ragged
all-gather); reduced-precision rows travel as bytes, so every dtype is accepted.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from anabranch.comm.group import Counts


@dataclass(frozen=True)
class GlooTransport:
    group: dist.ProcessGroup
    me: int

    def all_gather(self, x: Tensor, counts: Counts) -> Tensor:
        size, longest = len(counts), max(counts)
        rows = _bytes(x)
        padded = rows.new_empty(longest, rows.shape[1])
        padded[: rows.shape[0]] = rows
        out = rows.new_empty(size, longest, rows.shape[1])
        dist.all_gather(list(out.unbind(0)), padded, group=self.group)
        if min(counts) == longest:
            return _typed(out.view(size * longest, -1), x)
        return _typed(torch.cat([out[i, :n] for i, n in enumerate(counts)]), x)

    def all_to_all(self, x: Tensor, send: Counts, recv: Counts) -> Tensor:
        rows = _bytes(x)
        out = rows.new_empty(sum(recv), rows.shape[1])
        dist.all_to_all_single(out, rows, list(recv), list(send), group=self.group)
        return _typed(out, x)


def _bytes(x: Tensor) -> Tensor:
    """[rows, ...] -> uint8 [rows, bytes]."""
    if not x.numel():
        return x.reshape(x.shape[0], _width(x)).view(torch.uint8)
    flat = x.contiguous().view(-1).view(torch.uint8)  # a dim of size 1 may have any stride
    return flat.view(x.shape[0], -1)


def _typed(rows: Tensor, like: Tensor) -> Tensor:
    return rows.view(like.dtype).view(rows.shape[0], *like.shape[1:])


def _width(x: Tensor) -> int:
    width = 1
    for n in x.shape[1:]:
        width *= n
    return width
