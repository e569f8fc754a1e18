"""The key-value header of a GGUF file (versions 2 and 3), read without touching tensors.

Owns the byte format of metadata only; weights are read elsewhere. Source: the GGUF specification in
the ggml repository (docs/gguf.md). Every length is checked against the file's size, so a truncated
or hostile file ends in a ValueError, not in a huge allocation.
"""

import mmap
import struct
from pathlib import Path

Value = int | float | bool | str | list["Value"]

_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?",
    10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MAX_DEPTH = 4


class _Cursor:
    """A read position in the mapped file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._size = len(data)
        self._path = path
        self.at = 0

    def take(self, count: int) -> int:
        start = self.at
        if count > self._size - start:
            raise ValueError(
                f"{self._path}: truncated GGUF header: {count} bytes wanted at {start}, "
                f"the file has {self._size}; download it again"
            )
        self.at = start + count
        return start

    def scalar(self, layout: str) -> int | float | bool:
        value: int | float | bool = struct.unpack_from(
            layout, self._data, self.take(struct.calcsize(layout))
        )[0]
        return value

    def string(self) -> str:
        count = int(self.scalar("<Q"))
        start = self.take(count)
        return self._data[start : start + count].decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> Value:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(depth + 1)
        if kind not in _SCALARS:
            raise ValueError(f"{self._path}: GGUF value type {kind} is not in the specification")
        return self.scalar(_SCALARS[kind])

    def _array(self, depth: int) -> list[Value]:
        kind, count = int(self.scalar("<I")), int(self.scalar("<Q"))
        if depth > _MAX_DEPTH:
            raise ValueError(f"{self._path}: GGUF arrays nested over {_MAX_DEPTH} deep")
        if kind not in _SCALARS:
            if count > self._size - self.at:
                self.take(count)
            return [self.value(kind, depth) for _ in range(count)]
        layout = _SCALARS[kind]
        start = self.take(count * struct.calcsize(layout))
        return list(struct.unpack_from(f"<{count}{layout[1]}", self._data, start))


def read_metadata(path: Path) -> dict[str, Value]:
    """All key-value pairs of the header. Raises ValueError if the file is not a readable GGUF."""
    with path.open("rb") as file:
        if path.stat().st_size < 24:
            raise ValueError(f"{path}: {path.stat().st_size} bytes are no GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data, path)
            start = cursor.take(4)
            if data[start : start + 4] != b"GGUF":
                raise ValueError(f"{path}: does not begin with GGUF")
            version = int(cursor.scalar("<I"))
            if version not in (2, 3):
                raise ValueError(f"{path}: GGUF version {version} is not supported (2 and 3 are)")
            cursor.scalar("<Q")  # tensors
            pairs = int(cursor.scalar("<Q"))
            found: dict[str, Value] = {}
            for _ in range(pairs):
                key = cursor.string()
                found[key] = cursor.value(int(cursor.scalar("<I")))
            return found
