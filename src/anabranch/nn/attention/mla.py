"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) of one layer on one rank.

What is cached is one row per position for all heads: the normed latent and the rotated shared key.
Absorbed form: queries are taken into the latent space (w_kc) and outputs back out of it (w_vc),
which suits few rows; expanded form: keys and values are computed from the latents, which suits
many.

Legend: T rows, h heads of this rank in the segment's phase, L kv_lora, N nope, R rope, V v width.
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
class MlaPhase:
    """The heads' slices of one phase, views of the absorbed kv_b [heads, N + V, L].

    w_kc [hq, N, L]: of the heads whose queries are computed here; w_vc [h, V, L]: of those whose
    outputs arrive. expand_from: rows from which the expanded form is cheaper, on the cp rank that
    has most, as all must decide alike; None where only the absorbed one works.
    """

    q: Linear
    w_kc: Tensor
    w_vc: Tensor
    o: Linear
    latent: Kernel
    expanded: Kernel
    exchange: Exchange
    expand_from: int | None


@dataclass(frozen=True)
class MlaAttention:
    q_a: Linear | None
    q_a_norm: RMSNorm | None
    kv_a: Linear
    kv_a_norm: RMSNorm
    phases: Mapping[Phase, MlaPhase]
    nope: int
    kv_lora: int

    @property
    def in_place(self) -> Kernel:
        return self.phases[Phase.DECODE].latent

    def __call__(self, x: Tensor, pool: Tensor, seg: SegmentInputs, angles: Angles) -> Tensor:
        """x [T, d] -> [T, d], partial along the axes that cut the heads."""
        phase = self.phases[seg.phase]
        q_ThNR = self._queries(x, phase, angles)
        fresh = self._entries(x, angles)
        if phase.expand_from is not None and seg.longest >= phase.expand_from:
            out = phase.exchange.attend(phase.expanded, q_ThNR, fresh, pool, seg, None)
        else:
            q_ThLR = self._absorb(q_ThNR, phase.w_kc)
            out = phase.exchange.attend(phase.latent, q_ThLR, fresh, pool, seg, None)
            out = torch.bmm(out.transpose(0, 1), phase.w_vc.transpose(1, 2)).transpose(0, 1)
        return phase.o(out.flatten(1))

    def _queries(self, x: Tensor, phase: MlaPhase, angles: Angles) -> Tensor:
        if self.q_a is not None:
            assert self.q_a_norm is not None
            x = self.q_a_norm(self.q_a(x))
        q = phase.q(x)
        q = torch.unflatten(q, -1, (-1, self.nope + 2 * angles.cos.shape[-1]))
        return torch.cat((q[..., : self.nope], angles.rotate(q[..., self.nope :])), dim=-1)

    def _absorb(self, q: Tensor, w_kc: Tensor) -> Tensor:
        inside = torch.bmm(q[..., : self.nope].transpose(0, 1), w_kc)
        return torch.cat((inside.transpose(0, 1), q[..., self.nope :]), dim=-1)

    def _entries(self, x: Tensor, angles: Angles) -> Tensor:
        row = self.kv_a(x)
        latent, key = row[:, : self.kv_lora], row[:, self.kv_lora :]
        key = angles.rotate(key.unsqueeze(1)).squeeze(1)
        return torch.cat((self.kv_a_norm(latent), key), dim=-1)
