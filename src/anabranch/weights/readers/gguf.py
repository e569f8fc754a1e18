"""GGUF as released tensors: names and row order of the original checkpoint, blocks dequantised.

F32, F16, BF16, Q8_0, Q4_0 and Q4_1 are unpacked here, bit-equal to the gguf package; every other
type goes through the package itself. Knows no config and no rank.
"""

import mmap
from collections.abc import Callable, Collection

import torch

from anabranch.weights.gguf_file import TYPES, GGUFFile, GGUFTensor
from anabranch.weights.gguf_names import architecture, released_name
from anabranch.weights.readers.base import Given, check_source, cut, found, whole_ranges
from anabranch.weights.readers.entries import TensorsReader
from anabranch.weights.recipe import Source

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The fp16 number at byte `at` of each block, as float32 [rows, blocks, 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor, low: int) -> torch.Tensor:
    """16 bytes as 32 numbers less `low`, float32: the low halves, then the high ones."""
    numbers = torch.empty((*packed.shape[:-1], 32))
    numbers[..., :16] = packed & 15
    numbers[..., 16:] = packed >> 4
    return numbers.sub_(low) if low else numbers


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[..., 2:], 8).mul_(_half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[..., 4:], 0).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[..., 2:].view(torch.int8).float() * _half(blocks, 0)


_UNPACK: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
}


def dequantise(rows: torch.Tensor, kind: int) -> torch.Tensor:
    """Packed rows, uint8 [n, row_bytes], as numbers [n, elements]: float32, or the plain dtype."""
    name, elements, nbytes = TYPES.get(kind, ("", 0, 0))
    if name in _PLAIN:
        return rows.view(_PLAIN[name])
    if name in _UNPACK:
        blocks = rows.view(rows.shape[0], -1, nbytes)
        return _UNPACK[name](blocks).view(rows.shape[0], blocks.shape[1] * elements)
    import gguf

    try:
        values = gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType(kind))
    except NotImplementedError as e:
        kinds = gguf.GGMLQuantizationType(kind).name
        raise ValueError(f"ggml type {kinds} cannot be dequantised; use another file") from e
    return torch.from_numpy(values).float()


class GGUFReader:
    """Reader of one .gguf file of a known architecture (`gguf_names.ARCHITECTURES`)."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._tensors: dict[str, GGUFTensor] = {}
        for tensor in file.tensors.values():
            name = released_name(tensor.name)
            if name is not None:
                self._tensors[name] = tensor
        arch = architecture(file)
        # llama's converter reorders rows so that rotary pairs are neighbours; the others keep them
        self._heads = {
            f"self_attn.{proj}_proj": file.metadata.get(f"{arch}.attention.{key}")
            for proj, key in (("q", "head_count"), ("k", "head_count_kv"))
            if arch == "llama"
        }
        self._flat = torch.frombuffer(file.map, dtype=torch.uint8)

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def _tensor(self, name: str) -> GGUFTensor:
        return found(self._tensors, name, self._file.path)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return _PLAIN.get(TYPES.get(self._tensor(name).kind, ("",))[0], torch.float32)

    def read(self, source: Source) -> torch.Tensor:
        tensor = self._tensor(source.name)
        check_source(source, tensor.shape, str(self._file.path))
        ranges = whole_ranges(source)
        size = tensor.rows * tensor.row_bytes
        rows = self._flat[tensor.start : tensor.start + size].view(tensor.rows, tensor.row_bytes)
        order = self._row_order(source.name, tensor)
        if len(tensor.shape) == 1:
            row = dequantise(rows, tensor.kind)[0]
            return cut(row if order is None else row[order], ranges)
        if len(tensor.shape) > 2:
            return cut(dequantise(rows, tensor.kind).view(tensor.shape), ranges)
        start, stop = ranges[0]
        picked = rows[start:stop] if order is None else rows.index_select(0, order[start:stop])
        return cut(dequantise(picked, tensor.kind), ((0, stop - start), ranges[1]))

    def _row_order(self, name: str, tensor: GGUFTensor) -> torch.Tensor | None:
        """The file's row for each released row, where they differ.

        Released rows of a head are (half, i), those of the file (i, half): pairs are neighbours.
        """
        heads = self._heads.get(".".join(name.split(".")[-3:-1]))
        if heads is None:
            return None
        count = tensor.shape[0]
        if not isinstance(heads, int) or count % (2 * heads):
            raise ValueError(
                f"{self._file.path}: {name!r} has {count} rows, not a multiple of 2 x {heads}"
            )
        return torch.arange(count).view(heads, -1, 2).transpose(1, 2).reshape(count)

    def given(self) -> Given:
        return TensorsReader

    def release(self) -> None:
        self._file.map.madvise(mmap.MADV_DONTNEED)
