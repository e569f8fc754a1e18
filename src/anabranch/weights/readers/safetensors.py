"""Safetensors folders and files, mapped into memory; DeepSeek's fp8 blocks are dequantised as read.

Format: https://huggingface.co/docs/safetensors (8-byte header length, JSON header, data). Pages are
mapped privately, so processes share them through the page cache and nobody can change the file.
Knows nothing of models; never reads pickles.
"""

import json
import mmap
import os
import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from anabranch.weights.readers.base import check_source, cut, whole_ranges
from anabranch.weights.recipe import Source

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MAX_HEADER = 100_000_000  # bytes, as the format's own implementation limits it
_SCALE = "_scale_inv"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class _Entry:
    """Where a tensor lies. start: byte offset in the file."""

    file: "_File"
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class _File:
    """One mapped .safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        if size < 8:
            raise ValueError(f"{path}: truncated: {size} bytes, a safetensors file has at least 8")
        with path.open("rb") as stream:
            self._map = mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_COPY)
        (length,) = struct.unpack_from("<Q", self._map)
        if length > min(size - 8, _MAX_HEADER):
            raise ValueError(
                f"{path}: truncated or not safetensors: header of {length} bytes "
                f"in a file of {size}"
            )
        self.entries = dict(self._entries(self._map[8 : 8 + length], 8 + length, size))

    def _entries(self, header: bytes, base: int, size: int) -> Iterable[tuple[str, _Entry]]:
        try:
            table = json.loads(header)
            for name, facts in table.items():
                if name == "__metadata__":
                    continue
                shape = tuple(int(n) for n in facts["shape"])
                begin, end = (int(n) for n in facts["data_offsets"])
                dtype = _DTYPES.get(facts["dtype"])
                if dtype is None:
                    raise ValueError(
                        f"{self.path}: tensor {name!r}: unknown dtype {facts['dtype']}"
                    )
                wanted = dtype.itemsize
                for n in shape:
                    wanted *= n
                if end - begin != wanted or begin < 0 or any(n < 0 for n in shape):
                    raise ValueError(
                        f"{self.path}: tensor {name!r}: {end - begin} bytes, "
                        f"but {facts['dtype']} {list(shape)} takes {wanted}"
                    )
                if base + end > size:
                    raise ValueError(
                        f"{self.path}: truncated: tensor {name!r} ends at byte {base + end}, "
                        f"the file has {size}"
                    )
                yield name, _Entry(self, dtype, shape, base + begin)
        except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as e:
            raise ValueError(f"{self.path}: the safetensors header is damaged: {e!r}") from e

    def view(self, entry: _Entry) -> torch.Tensor:
        """The whole tensor as a view of the mapping."""
        count = 1
        for n in entry.shape:
            count *= n
        if count == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        if entry.start % entry.dtype.itemsize:
            part = bytearray(self._map[entry.start : entry.start + count * entry.dtype.itemsize])
            return torch.frombuffer(part, dtype=entry.dtype).view(entry.shape)
        flat = torch.frombuffer(self._map, dtype=entry.dtype, count=count, offset=entry.start)
        return flat.view(entry.shape)

    def release(self) -> None:
        self._map.madvise(mmap.MADV_DONTNEED)


def _files(path: Path) -> list[Path]:
    """The .safetensors files of a checkpoint; ValueError says what is missing."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"{path}: no such file or folder")
    index = path / INDEX
    if index.is_file():
        try:
            placed = json.loads(index.read_text())["weight_map"]
            wanted = sorted({str(name) for name in placed.values()})
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as e:
            raise ValueError(f"{index}: not an index with a weight_map: {e!r}") from e
        if any(os.path.basename(name) != name for name in wanted):
            raise ValueError(f"{index}: weight_map names files outside its folder")
        missing = [name for name in wanted if not (path / name).is_file()]
        if missing:
            raise ValueError(
                f"{path}: {len(missing)} of {len(wanted)} checkpoint files are missing: "
                + ", ".join(missing[:5])
            )
        return [path / name for name in wanted]
    found = sorted(path.glob("*.safetensors"))
    if found:
        return found
    pickles = sorted(p.name for s in ("bin", "pt", "pth", "ckpt") for p in path.glob(f"*.{s}"))
    if pickles:
        raise ValueError(
            f"{path}: holds only pickle checkpoints ({', '.join(pickles[:3])}); loading a pickle "
            "runs code from the file, so only safetensors and GGUF are read: convert it first"
        )
    raise ValueError(f"{path}: no .safetensors file in the folder")


class SafetensorsReader:
    """Reader of a folder (single or sharded with an index) or of one file.

    block: rows and columns that share one scale of `NAME_scale_inv` (DeepSeek-V3 release: 128x128;
    the last block of either dim may be short). Such tensors read as float32.
    """

    def __init__(self, path: Path, block: tuple[int, int] = (128, 128)) -> None:
        self._path = path
        self._block = block
        self._files = [_File(file) for file in _files(path)]
        self._entries: dict[str, _Entry] = {}
        for file in self._files:
            for name, entry in file.entries.items():
                if name in self._entries:
                    other = self._entries[name].file.path
                    raise ValueError(f"tensor {name!r} is in both {other} and {file.path}")
                self._entries[name] = entry

    def names(self) -> Collection[str]:
        return [name for name in self._entries if not name.endswith(_SCALE)]

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise ValueError(
                f"{self._path}: tensor {name!r} is absent among the "
                f"{len(self._entries)} tensors of the checkpoint"
            )
        return entry

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        dtype = self._entry(name).dtype
        return torch.float32 if dtype.itemsize == 1 and dtype.is_floating_point else dtype

    def read(self, source: Source) -> torch.Tensor:
        entry = self._entry(source.name)
        check_source(source, entry.shape, str(entry.file.path))
        whole = entry.file.view(entry)
        if self.dtype(source.name) == entry.dtype:
            return cut(whole, whole_ranges(source))
        return self._dequantise(source, whole, entry)

    def _dequantise(self, source: Source, whole: torch.Tensor, entry: _Entry) -> torch.Tensor:
        """fp8 blocks times their scales; a slice that cuts a block takes that block's scale."""
        where, name = entry.file.path, source.name
        scale_name = name + _SCALE
        if scale_name not in self._entries:
            raise ValueError(
                f"{where}: tensor {name!r} is {entry.dtype}, but has no {scale_name!r}"
            )
        if len(entry.shape) != 2:
            raise ValueError(
                f"{where}: fp8 tensor {name!r} has shape {list(entry.shape)}, not 2 dims"
            )
        scale_entry = self._entries[scale_name]
        blocks = tuple(-(-n // b) for n, b in zip(entry.shape, self._block, strict=True))
        if scale_entry.shape != blocks:
            raise ValueError(
                f"{scale_entry.file.path}: tensor {scale_name!r} has shape "
                f"{list(scale_entry.shape)}; {list(entry.shape)} in blocks of "
                f"{self._block[0]}x{self._block[1]} needs {list(blocks)}"
            )
        (top, bottom), (left, right) = whole_ranges(source)
        scale = scale_entry.file.view(scale_entry).float()
        columns = torch.arange(left, right) // self._block[1]
        out = cut(whole, whole_ranges(source)).float()
        height = self._block[0]
        for block in range(top // height, -(-bottom // height)):
            rows = slice(max(block * height, top) - top, min((block + 1) * height, bottom) - top)
            out[rows] *= scale[block, columns]
        return out

    def release(self) -> None:
        for file in self._files:
            file.release()
