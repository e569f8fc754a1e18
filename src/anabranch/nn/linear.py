"""Linear layers and their slices. A slice is a view made once at load; nothing is copied."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from anabranch.ops.reference.products import linear as plain
from anabranch.ops.signatures import Linear as Product


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
    """weight [out, in], bias [out] or None, as torch.nn.Linear. product: how it is computed."""

    weight: Tensor
    bias: Tensor | None = None
    product: Product = plain

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)

    def rows(self, start: int, stop: int) -> "Dense":
        bias = None if self.bias is None else self.bias[start:stop]
        return Dense(self.weight[start:stop], bias, self.product)

    def columns(self, start: int, stop: int) -> "Dense":
        return Dense(self.weight[:, start:stop], None, self.product)


@dataclass(frozen=True)
class ColumnBlocks:
    """weight [blocks, out, in / blocks]: inputs in blocks that each lie in one run of memory, as a
    slice of whole blocks does. The blocks' products are added in their order."""

    weight: Tensor
    product: Product = plain

    def __call__(self, x: Tensor) -> Tensor:
        first, *others = self.weight.unbind(0)
        parts = x.chunk(len(self.weight), dim=-1)
        y = self.product(parts[0], first)
        for part, block in zip(parts[1:], others, strict=True):
            y += self.product(part, block)
        return y

    def rows(self, start: int, stop: int) -> "ColumnBlocks":
        return ColumnBlocks(self.weight[:, start:stop], self.product)

    def columns(self, start: int, stop: int) -> "ColumnBlocks":
        """Whole blocks, or a part of one."""
        width = self.weight.shape[2]
        first, last = start // width, -(-stop // width)
        low, high = start - first * width, stop - (last - 1) * width
        assert last - first == 1 or (low, high) == (0, width), (start, stop, width)
        return ColumnBlocks(self.weight[first:last, :, low:high], self.product)
