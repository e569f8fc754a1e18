"""Root-mean-square norm (arXiv 1910.07467)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.ops.signatures import RmsNorm


@dataclass(frozen=True)
class RMSNorm:
    """x / rms(x) * weight over the last dim, in fp32, where an fp32 weight is applied too."""

    weight: Tensor
    eps: float
    rms_norm: RmsNorm

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight.dtype is x.dtype:
            return self.rms_norm(x, self.weight, self.eps)
        return (self.weight * unit_rms(x.float(), self.eps)).to(x.dtype)


def unit_rms(x: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last dim, without a weight."""
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps).to(x.dtype)
