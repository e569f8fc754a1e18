"""Root-mean-square norm (arXiv 1910.07467)."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RMSNorm:
    """x / rms(x) * weight over the last dim, in fp32, where an fp32 weight is applied too."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype is torch.float32:
            return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = unit_rms(x.float(), self.eps)
        if self.weight.dtype is torch.float32:
            return (self.weight * wide).to(x.dtype)
        return self.weight * wide.to(x.dtype)


def unit_rms(x: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last dim, without a weight."""
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps).to(x.dtype)
