"""The reference quantised linear: dequantise, then multiply. Slices share memory and scales."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from anabranch.weights.quantised import QuantWeight


@dataclass(frozen=True)
class QuantDense:
    """A `Linear` over a quantised weight [out, in]; computes in x's dtype."""

    weight: QuantWeight
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.dequantise(x.dtype), self.bias)

    def rows(self, start: int, stop: int) -> "QuantDense":
        bias = None if self.bias is None else self.bias[start:stop]
        return QuantDense(self.weight.rows(start, stop), bias)

    def columns(self, start: int, stop: int) -> "QuantDense":
        return QuantDense(self.weight.columns(start, stop))
