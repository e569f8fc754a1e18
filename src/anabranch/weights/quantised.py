"""Quantised matrices with their scales: the reference storage, sliceable in both dims as views.

A `QuantWeight` is not a tensor, so nothing can multiply its packed numbers as if they were plain.
Its one way out is `dequantise`. Fast kernels bring packed forms of their own. Knows no rank.

Legend: n outputs (rows), k inputs (columns), as in torch.nn.Linear's weight.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

SchemeName = Literal["fp8_block", "fp8_tensor", "int8_channel", "int4_group"]
_FP8_MAX = 448.0  # largest float8_e4m3fn


@dataclass(frozen=True)
class Scheme:
    """How numbers are packed. block: rows and columns that share a scale; None is the whole dim.

    per_byte: columns packed into one byte; a slice must begin and end between bytes.
    """

    name: SchemeName
    block: tuple[int | None, int | None]
    per_byte: int = 1


SCHEMES: dict[SchemeName, Scheme] = {
    "fp8_block": Scheme("fp8_block", (128, 128)),  # DeepSeek-V3's release
    "fp8_tensor": Scheme("fp8_tensor", (None, None)),
    "int8_channel": Scheme("int8_channel", (1, None)),
    "int4_group": Scheme("int4_group", (1, 32), per_byte=2),
}


@dataclass(frozen=True)
class QuantWeight:
    """A matrix [n, k], or a slice of one that shares its memory.

    packed: float8_e4m3fn or int8 [n, k], or uint8 [n, k / 2] (even columns in the low half).
    scale: float32 [row blocks, column blocks]; the last block of either dim may be short.
    low: what 0 stands for (int4: numbers are packed * scale + low), shaped as scale, or None.
    origin: of the first row and column, inside the first block of `scale`.
    """

    scheme: Scheme
    packed: Tensor
    scale: Tensor
    low: Tensor | None = None
    origin: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        for dim, name in enumerate(("rows", "columns")):
            size, block = self.shape[dim], self.scheme.block[dim]
            wanted = 1 if block is None else -(-(self.origin[dim] + size) // block)
            if self.scale.shape[dim] != wanted:
                raise ValueError(
                    f"{self.scheme.name}: {size} {name} in blocks of {block} need {wanted} scales, "
                    f"found {self.scale.shape[dim]}"
                )

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], self.packed.shape[1] * self.scheme.per_byte

    @property
    def nbytes(self) -> int:
        low = 0 if self.low is None else self.low.nbytes
        return self.packed.nbytes + self.scale.nbytes + low

    def rows(self, start: int, stop: int) -> "QuantWeight":
        """Rows [start, stop) with the scales they need; a cut block keeps its scale."""
        self._inside("rows", 0, start, stop)
        return self._cut(0, start, stop, self.packed[start:stop])

    def columns(self, start: int, stop: int) -> "QuantWeight":
        """Columns [start, stop); ValueError if a bound lies inside a byte."""
        self._inside("columns", 1, start, stop)
        step = self.scheme.per_byte
        if start % step or stop % step:
            raise ValueError(
                f"{self.scheme.name}: columns [{start}, {stop}) cut a byte that holds {step}; "
                f"bounds must be multiples of {step}, such as "
                f"[{start // step * step}, {-(-stop // step) * step})"
            )
        return self._cut(1, start, stop, self.packed[:, start // step : stop // step])

    def _inside(self, name: str, dim: int, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.shape[dim]:
            raise ValueError(f"{name} [{start}, {stop}) are outside 0..{self.shape[dim]}")

    def _cut(self, dim: int, start: int, stop: int, packed: Tensor) -> "QuantWeight":
        block = self.scheme.block[dim]
        if block is None:
            return replace(self, packed=packed)
        first, last = self.origin[dim] + start, self.origin[dim] + stop
        at, count = first // block, -(-last // block) - first // block
        origin = (first % block, self.origin[1]) if dim == 0 else (self.origin[0], first % block)
        if start == stop:
            count, origin = 0, (0, origin[1]) if dim == 0 else (origin[0], 0)
        low = None if self.low is None else self.low.narrow(dim, at if count else 0, count)
        scale = self.scale.narrow(dim, at if count else 0, count)
        return QuantWeight(self.scheme, packed, scale, low, origin)

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The plain matrix [n, k]: new memory."""
        if self.scheme.per_byte == 2:
            halves = torch.stack((self.packed & 15, self.packed >> 4), dim=-1)
            numbers = halves.flatten(1).float()
        else:
            numbers = self.packed.float()
        out = numbers * self._spread(self.scale)
        return (out if self.low is None else out + self._spread(self.low)).to(dtype)

    def _spread(self, per_block: Tensor) -> Tensor:
        """One number per element that shares it (dims with one scale broadcast)."""
        for dim in (0, 1):
            block = self.scheme.block[dim]
            if block is not None:
                index = torch.arange(self.shape[dim], device=per_block.device) + self.origin[dim]
                per_block = per_block.index_select(dim, index // block)
        return per_block


def _blocks(weight: Tensor, scheme: Scheme) -> Tensor:
    """weight as [row blocks, rows, column blocks, columns], short blocks filled with zeros."""
    n, k = weight.shape
    rows, columns = scheme.block[0] or n, scheme.block[1] or k
    padded = torch.nn.functional.pad(weight.float(), (0, -k % columns, 0, -n % rows))
    shape = (padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    return padded.view(shape)


def quantise(weight: Tensor, name: SchemeName) -> QuantWeight:
    """Rounds a plain matrix [n, k] to the nearest numbers of a scheme.

    ValueError for int4 unless k is a multiple of its group, 32.
    """
    scheme = SCHEMES[name]
    n, k = weight.shape
    blocks = _blocks(weight, scheme)
    if name == "int4_group":
        if k % 32:
            raise ValueError(f"int4_group: {k} columns are not a multiple of its group of 32")
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
        scale = ((high - low) / 15).clamp(min=1e-12)
        levels = (blocks - low[:, None, :, None]) / scale[:, None, :, None]
        pairs = levels.round().clamp(0, 15).to(torch.uint8).view(n, k // 2, 2)
        return QuantWeight(scheme, pairs[..., 0] | pairs[..., 1] << 4, scale, low)
    top = 127.0 if name == "int8_channel" else _FP8_MAX
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-12) / top
    levels = blocks / scale[:, None, :, None]
    whole = levels.reshape(blocks.shape[0] * blocks.shape[1], -1)[:n, :k]
    if name == "int8_channel":
        return QuantWeight(scheme, whole.round().to(torch.int8), scale)
    return QuantWeight(scheme, whole.to(torch.float8_e4m3fn), scale)
