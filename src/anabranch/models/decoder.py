"""A decoder-only transformer on one rank: embedding, layers, norm, head. The arithmetic of a step.

Rows between blocks are this rank's residual rows; every move is behind `nn.boundary`.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from anabranch.kv.pool import Pool
from anabranch.nn.attention.kernel import Kernel
from anabranch.nn.boundary import Add, Combine, enter_attn, leave_attn
from anabranch.nn.norm import RMSNorm
from anabranch.nn.rotary import Angles, Rotary
from anabranch.nn.step import SegmentInputs, StepInputs
from anabranch.nn.vocab import Embedding, Head


class Attention(Protocol):
    @property
    def in_place(self) -> Kernel:
        """The kernel that reads the pool where it lies."""
        ...

    def __call__(self, x: Tensor, pool: Tensor, seg: SegmentInputs, angles: Angles) -> Tensor: ...


class Ffn(Protocol):
    def __call__(self, x: Tensor, step: StepInputs) -> Tensor: ...


class Ends(Protocol):
    """How residual rows begin from embedded rows and end in rows [M, d]: one stream or several."""

    def open(self, rows: Tensor) -> Tensor: ...

    def close(self, x: Tensor) -> Tensor: ...


class OneStream:
    def open(self, rows: Tensor) -> Tensor:
        return rows

    def close(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class Layer:
    attn_norm: RMSNorm
    attn: Attention
    ffn_norm: RMSNorm
    ffn: Ffn
    attn_bias: Tensor | None = None
    """Bias of the output projection: added once, after the sum over its partial rows."""
    attn_join: Combine = Add()
    ffn_join: Combine = Add()

    def __call__(self, x: Tensor, step: StepInputs, pool: Tensor, angles: list[Angles]) -> Tensor:
        read, carry = self.attn_join.read(x)
        normed = self.attn_norm(read)
        parts = [
            self.attn(enter_attn(seg, normed), pool, seg, angle)
            for seg, angle in zip(step.segments, angles, strict=True)
        ]
        y = leave_attn(step, parts)
        x = self.attn_join.write(x, y if self.attn_bias is None else y + self.attn_bias, carry)
        read, carry = self.ffn_join.read(x)
        return self.ffn_join.write(x, self.ffn(self.ffn_norm(read), step), carry)


@dataclass(frozen=True)
class Decoder:
    embedding: Embedding
    layers: tuple[Layer, ...]
    norm: RMSNorm
    head: Head
    rotary: Rotary
    ends: Ends = OneStream()

    def __call__(self, step: StepInputs, pool: Pool) -> Tensor:
        """Residual rows after the last layer: [M, d], or [M, streams, d]."""
        rows = [move(self.embedding(ids)) for ids, move in zip(step.ids, step.embed, strict=True)]
        x = self.ends.open(rows[0] if len(rows) == 1 else torch.cat(rows))
        angles = [self.rotary.at(seg.positions) for seg in step.segments]
        for index, layer in enumerate(self.layers):
            x = layer(x, step, pool.layer(index), angles)
        return x

    def pad_lens(self) -> frozenset[int]:
        """What the kernels now in use want a padded row to see."""
        return frozenset(layer.attn.in_place.pad_len for layer in self.layers)

    def logits(self, x: Tensor, step: StepInputs) -> Tensor:
        """Residual rows -> fp32 [n, vocab] of the own replica's picked rows, in plan order."""
        picked = step.picked
        rows = picked.gather(self.norm(self.ends.close(x.index_select(0, picked.rows))))
        if picked.order is not None:
            rows = rows.index_select(0, picked.order)
        return self.head(rows)[picked.own[0] : picked.own[1]]
