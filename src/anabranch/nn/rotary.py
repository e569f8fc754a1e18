"""Rotary position embedding (arXiv 2104.09864) in the variants of released models.

Owns the frequency tables. Sources: linear and dynamic scaling as in transformers' documentation,
llama3 as released with Llama 3.1, yarn as arXiv 2309.00071.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.core.arch import Rope


@dataclass(frozen=True)
class Angles:
    """cos and sin, fp32 [T, 1, dim / 2], of the rows of one segment."""

    cos: Tensor
    sin: Tensor
    interleaved: bool

    def rotate(self, x: Tensor) -> Tensor:
        """x [T, heads, dim] -> rotated, same dtype. Pairs are (2i, 2i+1) or (i, i + dim/2)."""
        wide = x.float()
        if self.interleaved:
            a, b = wide[..., 0::2], wide[..., 1::2]
        else:
            a, b = wide.chunk(2, dim=-1)
        left, right = a * self.cos - b * self.sin, b * self.cos + a * self.sin
        if self.interleaved:
            return torch.stack((left, right), dim=-1).flatten(-2).to(x.dtype)
        return torch.cat((left, right), dim=-1).to(x.dtype)

    def inverse(self) -> "Angles":
        """Those that rotate back (where cos and sin are not scaled)."""
        return Angles(self.cos, -self.sin, self.interleaved)


class Rotary:
    """Tables of cos and sin for positions 0 .. max_len - 1.

    Angles are fp32 products of position and frequency, as models were trained and as every engine
    computes them: exact ones would differ by 1e-4 in logits after some hundred positions.
    """

    def __init__(self, rope: Rope, max_len: int, device: torch.device) -> None:
        position = torch.arange(max_len, dtype=torch.float32)
        if rope.kind == "dynamic":
            angles = torch.stack([p * _dynamic(rope, p + 1) for p in range(max_len)])
        else:
            angles = position[:, None] * _frequencies(rope)
        scale = attention_factor(rope)
        self.cos = (angles.cos() * scale).float().to(device)
        self.sin = (angles.sin() * scale).float().to(device)
        self.interleaved = rope.interleaved

    def at(self, positions: Tensor) -> Angles:
        """positions int64 [T] -> angles of those rows."""
        return Angles(
            self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1), self.interleaved
        )


def _plain(dim: int, theta: float) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _dynamic(rope: Rope, length: int) -> Tensor:
    """Base grown with the length beyond the original one (NTK-aware)."""
    if length <= rope.original_len:
        return _plain(rope.dim, rope.theta)
    grown = rope.factor * length / rope.original_len - (rope.factor - 1)
    return _plain(rope.dim, rope.theta * grown ** (rope.dim / (rope.dim - 2)))


def _frequencies(rope: Rope) -> Tensor:
    plain = _plain(rope.dim, rope.theta)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain)
    return plain


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Long waves are divided by `factor`, short ones kept, those between blended."""
    turns = rope.original_len * plain / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return blend * plain + (1 - blend) * plain / rope.factor


def _yarn(rope: Rope, plain: Tensor) -> Tensor:
    """Dims that turn often keep their frequency, those that turn rarely are interpolated."""

    def dim_of(turns: float) -> float:
        ratio = rope.original_len / (turns * 2 * math.pi)
        return rope.dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = torch.arange(rope.dim // 2, dtype=torch.float32) - low
    ramp = (ramp / max(high - low, 1e-3)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def attention_factor(rope: Rope) -> float:
    """What cos and sin are multiplied by: 1 except for yarn."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return yarn_mscale(rope.factor, 1.0)
