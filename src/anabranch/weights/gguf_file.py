"""The GGUF container: metadata and where each tensor lies. No torch: the front reads it too.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian).
The gguf package's own reader takes seconds on a tokenizer's arrays, which is why this one exists.
Knows no names of models or tensors.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

Value = int | float | bool | str | list["Value"]

_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
# ggml type number: (name, elements of a block, bytes of a block)
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    30: ("BF16", 1, 2),
}


@dataclass(frozen=True)
class GGUFTensor:
    """kind: ggml's type number. shape: row-major (GGUF lists dims reversed). start: in bytes."""

    name: str
    kind: int
    shape: tuple[int, ...]
    start: int
    row_bytes: int

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])


def _block(kind: int) -> tuple[int, int]:
    """Elements and bytes of a block; types beyond TYPES are looked up in the gguf package."""
    if kind in TYPES:
        return TYPES[kind][1:]
    import gguf  # costs 0.15 s, and the usual types do not need it

    try:
        elements, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    except (KeyError, ValueError) as e:
        raise ValueError(f"unknown ggml tensor type {kind}") from e
    return int(elements), int(nbytes)


_LENGTH = struct.Struct("<Q")


class GGUFFile:
    """A mapped .gguf file. ValueError if it is truncated, damaged or of another version.

    metadata: values by key, arrays as lists. tensors: by their names in the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as stream:
                self.map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as e:
            raise ValueError(f"{path}: cannot be read: {e}") from e
        self._at = 0
        self.metadata: dict[str, Value] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            self._parse()
        except (struct.error, IndexError, OverflowError, MemoryError) as e:
            raise ValueError(
                f"{path}: truncated or damaged GGUF near byte {self._at} of {len(self.map)}"
            ) from e

    def _take(self, fmt: str) -> tuple[int | float | bool, ...]:
        values = struct.unpack_from("<" + fmt, self.map, self._at)
        self._at += struct.calcsize("<" + fmt)
        return values

    def _count(self, fmt: str) -> int:
        (value,) = self._take(fmt)
        if not 0 <= value <= len(self.map):  # every counted thing takes at least a byte
            raise ValueError(
                f"{self.path}: damaged GGUF: a count of {value} in a file of {len(self.map)} bytes"
            )
        return int(value)

    def _string(self) -> str:
        length = self._count("Q")
        start, self._at = self._at, self._at + length
        if self._at > len(self.map):
            raise IndexError
        return self.map[start : self._at].decode("utf-8", "replace")

    def _strings(self, count: int) -> list[Value]:
        """As `_string`, many times over: a vocabulary is most of a file's head."""
        data, at, end = self.map, self._at, len(self.map)
        found: list[Value] = []
        for _ in range(count):
            (length,) = _LENGTH.unpack_from(data, at)
            start, at = at + 8, at + 8 + length
            if at > end:
                raise IndexError
            found.append(data[start:at].decode("utf-8", "replace"))
        self._at = at
        return found

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, count = int(self._take("I")[0]), self._count("Q")
            if inner in _SCALARS:
                return list(self._take(f"{count}{_SCALARS[inner]}"))
            if inner == _STRING:
                return self._strings(count)
            return [self._value(inner) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"{self.path}: damaged GGUF: unknown value type {kind}")
        return self._take(_SCALARS[kind])[0]

    def _parse(self) -> None:
        if self.map[:4] != b"GGUF":
            raise ValueError(f"{self.path}: not a GGUF file (starts with {self.map[:4]!r})")
        self._at = 4
        version = int(self._take("I")[0])
        if version not in (2, 3):
            raise ValueError(f"{self.path}: GGUF version {version} is not supported; known: 2, 3")
        tensor_count, value_count = self._count("Q"), self._count("Q")
        for _ in range(value_count):
            key = self._string()
            self.metadata[key] = self._value(int(self._take("I")[0]))
        facts = [self._tensor() for _ in range(tensor_count)]
        align = self.metadata.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1:
            raise ValueError(f"{self.path}: general.alignment: wanted an integer, found {align!r}")
        base = -(-self._at // align) * align
        for name, kind, shape, offset in facts:
            self._place(name, kind, shape, base + offset)

    def _tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name, dims = self._string(), int(self._take("I")[0])
        if not 1 <= dims <= _MAX_DIMS:
            raise ValueError(f"{self.path}: tensor {name!r}: {dims} dims, wanted 1 to {_MAX_DIMS}")
        shape = tuple(int(n) for n in reversed(self._take(f"{dims}Q")))
        kind, offset = (int(v) for v in self._take("IQ"))
        return name, kind, shape, offset

    def _place(self, name: str, kind: int, shape: tuple[int, ...], start: int) -> None:
        elements, nbytes = _block(kind)
        if shape[-1] % elements:
            raise ValueError(
                f"{self.path}: tensor {name!r}: rows of {shape[-1]} are not whole "
                f"blocks of {elements}"
            )
        tensor = GGUFTensor(name, kind, shape, start, shape[-1] // elements * nbytes)
        end = start + tensor.rows * tensor.row_bytes
        if end > len(self.map):
            raise ValueError(
                f"{self.path}: truncated: tensor {name!r} ends at byte {end}, "
                f"the file has {len(self.map)}"
            )
        self.tensors[name] = tensor
