"""Root-mean-square norm (arXiv 1910.07467)."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RMSNorm:
    """x / rms(x) * weight over the last dim, computed in fp32."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype is torch.float32:
            return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)
