"""Safetensors folders and files, mapped into memory.

Format: https://huggingface.co/docs/safetensors (8-byte header length, JSON header, data). Pages are
mapped privately, so processes share them through the page cache and nobody can change the file.
Knows nothing of models; never reads pickles.
"""

import json
import math
import mmap
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from anabranch.weights.config import read_json
from anabranch.weights.readers.entries import Block, EntriesReader

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
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class _Entry:
    """Where a tensor lies. start: byte offset in the file."""

    file: "_File"
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def where(self) -> str:
        return str(self.file.path)

    def view(self) -> torch.Tensor:
        return self.file.view(self)


def _integers(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(n) is int for n in value):
        raise TypeError("shape and data_offsets must be lists of integers")
    return tuple(value)


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
            table.pop("__metadata__", None)
            found = []
            for name, facts in table.items():
                begin, end = _integers(facts["data_offsets"])
                found.append((name, str(facts["dtype"]), _integers(facts["shape"]), begin, end))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise ValueError(f"{self.path}: the safetensors header is damaged: {e!r}") from e
        for name, kind, shape, begin, end in found:
            dtype = _DTYPES.get(kind)
            if dtype is None:
                raise ValueError(f"{self.path}: tensor {name!r}: unknown dtype {kind}")
            wanted = dtype.itemsize * math.prod(shape)
            if end - begin != wanted or begin < 0 or any(n < 0 for n in shape):
                raise ValueError(
                    f"{self.path}: tensor {name!r}: {end - begin} bytes, "
                    f"but {kind} {list(shape)} takes {wanted}"
                )
            if base + end > size:
                raise ValueError(
                    f"{self.path}: truncated: tensor {name!r} ends at byte {base + end}, "
                    f"the file has {size}"
                )
            yield name, _Entry(self, dtype, shape, base + begin)

    def view(self, entry: _Entry) -> torch.Tensor:
        """The whole tensor as a view of the mapping."""
        count = math.prod(entry.shape)
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
        placed = read_json(index).get("weight_map")
        if not isinstance(placed, dict) or not all(isinstance(n, str) for n in placed.values()):
            raise ValueError(f"{index}: not an index: weight_map must name a file for each tensor")
        wanted = sorted(set(placed.values()))
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


class SafetensorsReader(EntriesReader):
    """Reader of a folder (single or sharded with an index) or of one file."""

    def __init__(self, path: Path, block: Block = (128, 128)) -> None:
        self._files = [_File(file) for file in _files(path)]
        entries: dict[str, _Entry] = {}
        for file in self._files:
            for name, entry in file.entries.items():
                if name in entries:
                    other = entries[name].where
                    raise ValueError(f"tensor {name!r} is in both {other} and {file.path}")
                entries[name] = entry
        super().__init__(str(path), entries, block)

    def release(self) -> None:
        for file in self._files:
            file.release()
