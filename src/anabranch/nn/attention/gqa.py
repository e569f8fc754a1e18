"""Grouped-query attention of one layer on one rank. The arithmetic only; the exchange moves.

Legend: T rows of the segment, h query heads of this rank in the segment's phase, g stored KV heads,
D head width, d hidden.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.core.plan import Phase
from anabranch.nn.attention.exchange import Exchange
from anabranch.nn.attention.kernel import Kernel
from anabranch.nn.linear import Linear
from anabranch.nn.norm import RMSNorm
from anabranch.nn.rotary import Angles
from anabranch.nn.step import SegmentInputs


@dataclass(frozen=True)
class GqaPhase:
    """What differs between phases: the heads' slice of q and o, the kernel's map, the exchange."""

    q: Linear
    o: Linear
    kernel: Kernel
    exchange: Exchange
    sink: Tensor | None = None


@dataclass(frozen=True)
class GqaAttention:
    k: Linear
    v: Linear
    phases: Mapping[Phase, GqaPhase]
    head_dim: int
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None

    @property
    def in_place(self) -> Kernel:
        return self.phases[Phase.DECODE].kernel

    def __call__(self, x: Tensor, pool: Tensor, seg: SegmentInputs, angles: Angles) -> Tensor:
        """x [T, d] -> [T, d], partial along the axes that cut the heads."""
        phase = self.phases[seg.phase]
        q_ThD = self._heads(phase.q(x), self.q_norm, angles)
        k_TgD = self._heads(self.k(x), self.k_norm, angles)
        fresh = torch.cat((k_TgD.flatten(1), self.v(x)), dim=1)
        out = phase.exchange.attend(phase.kernel, q_ThD, fresh, pool, seg, phase.sink)
        return phase.o(out.flatten(1))

    def _heads(self, flat: Tensor, norm: RMSNorm | None, angles: Angles) -> Tensor:
        heads = torch.unflatten(flat, -1, (-1, self.head_dim))
        return angles.rotate(heads if norm is None else norm(heads))
