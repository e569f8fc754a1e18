"""Linear layers and their slices. A slice is a view made once at load; nothing is copied."""

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor


class Linear(Protocol):
    """y = x W^T (+ b); x [..., in] -> [..., out]. Slices along both dims are views."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def rows(self, start: int, stop: int) -> "Linear":
        """Outputs [start, stop), with their bias."""
        ...

    def columns(self, start: int, stop: int) -> "Linear":
        """Inputs [start, stop), without the bias: it is owed once, by whoever sums."""
        ...


@dataclass(frozen=True)
class Dense:
    """weight [out, in], bias [out] or None, as torch.nn.Linear."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def rows(self, start: int, stop: int) -> "Dense":
        return Dense(self.weight[start:stop], None if self.bias is None else self.bias[start:stop])

    def columns(self, start: int, stop: int) -> "Dense":
        return Dense(self.weight[:, start:stop])
