"""A decoder-only transformer on one rank: embedding, layers, norm, head. The arithmetic of a step.

Rows between blocks are this rank's residual rows; every move is behind `nn.boundary`.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from anabranch.kv.pool import Pool
from anabranch.nn.boundary import Add, Combine, enter_attn, leave_attn
from anabranch.nn.norm import RMSNorm
from anabranch.nn.rotary import Angles, Rotary
from anabranch.nn.step import SegmentInputs, StepInputs
from anabranch.nn.vocab import Embedding, Head


class Attention(Protocol):
    def __call__(self, x: Tensor, pool: Tensor, seg: SegmentInputs, angles: Angles) -> Tensor: ...


class Ffn(Protocol):
    def __call__(self, x: Tensor, step: StepInputs) -> Tensor: ...


@dataclass(frozen=True)
class Layer:
    attn_norm: RMSNorm
    attn: Attention
    ffn_norm: RMSNorm
    ffn: Ffn
    attn_bias: Tensor | None = None
    """Bias of the output projection: added once, after the sum over its partial rows."""
    combine: Combine = Add()

    def __call__(self, x: Tensor, step: StepInputs, pool: Tensor, angles: list[Angles]) -> Tensor:
        read, carry = self.combine.read(x)
        normed = self.attn_norm(read)
        parts = [
            self.attn(enter_attn(seg, normed), pool, seg, angle)
            for seg, angle in zip(step.segments, angles, strict=True)
        ]
        y = leave_attn(step, parts)
        x = self.combine.write(x, y if self.attn_bias is None else y + self.attn_bias, carry)
        read, carry = self.combine.read(x)
        return self.combine.write(x, self.ffn(self.ffn_norm(read), step), carry)


@dataclass(frozen=True)
class Decoder:
    embedding: Embedding
    layers: tuple[Layer, ...]
    norm: RMSNorm
    head: Head
    rotary: Rotary

    def __call__(self, step: StepInputs, pool: Pool) -> Tensor:
        """Residual rows [M, d] after the last layer."""
        rows = [move(self.embedding(ids)) for ids, move in zip(step.ids, step.embed, strict=True)]
        x = rows[0] if len(rows) == 1 else torch.cat(rows)
        angles = [self.rotary.at(seg.positions) for seg in step.segments]
        for index, layer in enumerate(self.layers):
            x = layer(x, step, pool.layer(index), angles)
        return x

    def logits(self, x: Tensor, step: StepInputs) -> Tensor:
        """Residual rows -> fp32 [n, vocab] of the own replica's picked rows, in plan order."""
        picked = step.picked
        rows = picked.gather(self.norm(x.index_select(0, picked.rows)))
        if picked.order is not None:
            rows = rows.index_select(0, picked.order)
        return self.head(rows)[picked.own[0] : picked.own[1]]
