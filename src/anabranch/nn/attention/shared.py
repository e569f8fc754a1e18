"""DeepSeek-V4's attention of one layer on one rank, without compressors.

One cached head is key and value of all query heads. Its last elements are rotated, and so the
output is rotated back at the query's position before it is projected: group by group of heads into
a small width, then all groups together. Cut by heads, both projections give partial sums.

Legend: T rows, h query heads of this rank in the segment's phase, D head width, R rotated part,
g output groups, r width of a projected group, d hidden.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.core.plan import Phase
from anabranch.nn.attention.exchange import Exchange
from anabranch.nn.attention.kernel import Kernel
from anabranch.nn.linear import Linear
from anabranch.nn.norm import RMSNorm, unit_rms
from anabranch.nn.rotary import Angles
from anabranch.nn.step import SegmentInputs


@dataclass(frozen=True)
class GroupedOutput:
    """a [g, r, w]: projection of each group from its heads held here; b: from g * r to d."""

    a: Tensor
    b: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, g * w] -> [T, d]."""
        groups_Tgw = torch.unflatten(x, -1, (len(self.a), -1))
        return self.b(torch.einsum("tgw,grw->tgr", groups_Tgw, self.a).flatten(1))

    def heads(self, low: int, high: int, width: int) -> "GroupedOutput":
        """Views for heads [low, high) of `width` elements, counted from the first held here: whole
        groups, or heads of one group (`core.resolve` refuses other cuts)."""
        _, r, held = self.a.shape
        first, last = low * width // held, -(-high * width // held)
        start, stop = low * width - first * held, high * width - (last - 1) * held
        assert last - first == 1 or (start, stop) == (0, held), (low, high, tuple(self.a.shape))
        return GroupedOutput(self.a[first:last, :, start:stop], self.b.columns(first * r, last * r))


@dataclass(frozen=True)
class SharedPhase:
    """What differs between phases: the heads' slices, the kernel, the exchange."""

    q: Linear
    o: GroupedOutput
    sink: Tensor
    kernel: Kernel
    exchange: Exchange


@dataclass(frozen=True)
class SharedAttention:
    q_a: Linear
    q_a_norm: RMSNorm
    kv: Linear
    kv_norm: RMSNorm
    phases: Mapping[Phase, SharedPhase]
    head_dim: int
    eps: float

    @property
    def in_place(self) -> Kernel:
        return self.phases[Phase.DECODE].kernel

    def __call__(self, x: Tensor, pool: Tensor, seg: SegmentInputs, angles: Angles) -> Tensor:
        """x [T, d] -> [T, d], partial along the axes that cut the heads."""
        phase = self.phases[seg.phase]
        flat = phase.q(self.q_a_norm(self.q_a(x)))
        q_ThD = torch.unflatten(flat, -1, (-1, self.head_dim))
        q_ThD = _tail(angles, unit_rms(q_ThD, self.eps))
        fresh_TD = _tail(angles, self.kv_norm(self.kv(x)).unsqueeze(1)).squeeze(1)
        out = phase.exchange.attend(phase.kernel, q_ThD, fresh_TD, pool, seg, phase.sink)
        return phase.o(_tail(angles.inverse(), out).flatten(1))


def _tail(angles: Angles, x: Tensor) -> Tensor:
    """Rotates the last R elements of x [T, heads, D]."""
    rotated = 2 * angles.cos.shape[-1]
    return torch.cat((x[..., :-rotated], angles.rotate(x[..., -rotated:])), dim=-1)
