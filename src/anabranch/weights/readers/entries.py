"""Tensors that lie somewhere whole, read in slices; DeepSeek's fp8 blocks are dequantised as read.

Where they lie, in files or in memory, is the entries' affair. Knows nothing of models.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from anabranch.weights.readers.base import Given, check_source, cut, found, whole_ranges
from anabranch.weights.recipe import Source

Block = tuple[int, int]
_SCALE = "_scale_inv"


class Entry(Protocol):
    """One whole tensor. where: what errors call the place it lies in."""

    @property
    def where(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def view(self) -> torch.Tensor: ...


def _packed(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1 and dtype.is_floating_point


class EntriesReader:
    """Reader over entries by name.

    block: rows and columns that share one scale of `NAME_scale_inv` (DeepSeek-V3 release: 128x128;
    the last block of either dim may be short). Such tensors read as float32.
    """

    def __init__(self, where: str, entries: Mapping[str, Entry], block: Block) -> None:
        self._where = where
        self._entries = entries
        self._block = block

    def names(self) -> Collection[str]:
        scales = {n + _SCALE for n, entry in self._entries.items() if _packed(entry.dtype)}
        return [name for name in self._entries if name not in scales]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name)[0].shape

    def dtype(self, name: str) -> torch.dtype:
        entry, scale = self._find(name)
        return entry.dtype if scale is None else torch.float32

    def read(self, source: Source) -> torch.Tensor:
        entry, scale = self._find(source.name)
        check_source(source, entry.shape, entry.where)
        part = cut(entry.view(), whole_ranges(source))
        return part if scale is None else self._dequantise(source, part, scale.view().float())

    def given(self) -> Given:
        return partial(TensorsReader, block=self._block)

    def release(self) -> None:
        return

    def _entry(self, name: str) -> Entry:
        return found(self._entries, name, self._where)

    def _find(self, name: str) -> tuple[Entry, Entry | None]:
        """A tensor and, if it is packed in blocks, the scales that fit it."""
        entry = self._entry(name)
        if not _packed(entry.dtype):
            return entry, None
        scale = self._entries.get(name + _SCALE)
        what = f"{entry.where}: tensor {name!r} is {entry.dtype}"
        if scale is None:
            raise ValueError(f"{what}, but has no {name + _SCALE!r}: give both, or plain floats")
        if len(entry.shape) != 2:
            raise ValueError(f"{what} of shape {list(entry.shape)}, not 2 dims")
        blocks = tuple(-(-n // b) for n, b in zip(entry.shape, self._block, strict=True))
        if scale.shape != blocks or not scale.dtype.is_floating_point:
            raise ValueError(
                f"{scale.where}: tensor {name + _SCALE!r} has shape {list(scale.shape)} of "
                f"{scale.dtype}; {list(entry.shape)} in blocks of "
                f"{self._block[0]}x{self._block[1]} needs {list(blocks)} of floats"
            )
        return entry, scale

    def _dequantise(self, source: Source, part: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """fp8 blocks times their scales; a slice that cuts a block takes that block's scale."""
        (top, bottom), (left, right) = whole_ranges(source)
        columns = torch.arange(left, right) // self._block[1]
        out = part.float()
        height = self._block[0]
        for block in range(top // height, -(-bottom // height)):
            rows = slice(max(block * height, top) - top, min((block + 1) * height, bottom) - top)
            out[rows] *= scale[block, columns]
        return out


@dataclass(frozen=True)
class _Held:
    """A tensor in memory, as an entry."""

    where: str
    tensor: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def view(self) -> torch.Tensor:
        return self.tensor


class TensorsReader(EntriesReader):
    """Reader of tensors that `update_weights` was given."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], block: Block = (128, 128)) -> None:
        where = "update_weights"
        super().__init__(where, {name: _Held(where, t) for name, t in tensors.items()}, block)
