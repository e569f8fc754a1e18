"""Experts in MXFP4 as gpt-oss ships them, read as the plain tensors they stand for.

NAME_blocks [E, out, in / 32, 16] holds two 4-bit floats a byte (low half first), NAME_scales
[E, out, in / 32] their exponents (OCP Microscaling Formats 1.0). NAME reads as [E, in, out], as the
unpacked release has it.
"""

from collections.abc import Collection, Mapping

import torch

from anabranch.weights.readers.base import Given, Reader, check_source, cut, whole_ranges
from anabranch.weights.recipe import Source

_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Mxfp4Reader:
    """A reader over `inner` in which packed experts have plain names; they read as float32."""

    def __init__(self, inner: Reader) -> None:
        self._inner = inner
        names = set(inner.names())
        self._packed = {n.removesuffix(_BLOCKS) for n in names if n.endswith(_BLOCKS)}
        parts = {name + end for name in self._packed for end in (_BLOCKS, _SCALES)}
        self._names = sorted(names - parts | self._packed)
        self._values = torch.tensor([*_E2M1, *(-v for v in _E2M1)])

    def names(self) -> Collection[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...] | None:
        if name not in self._packed:
            return self._inner.shape(name)
        found = self._inner.shape(name + _BLOCKS)
        if found is None or len(found) != 4 or found[3] * 2 != _GROUP:
            raise ValueError(f"tensor {name + _BLOCKS!r} has shape {found}, wanted [E, out, n, 16]")
        scales = self._inner.shape(name + _SCALES)
        if scales != found[:3]:
            raise ValueError(f"tensor {name + _SCALES!r} has shape {scales}, wanted {found[:3]}")
        for part in (name + _BLOCKS, name + _SCALES):
            if self._inner.dtype(part) != torch.uint8:
                raise ValueError(f"tensor {part!r} is {self._inner.dtype(part)}, wanted uint8")
        return found[0], found[2] * _GROUP, found[1]

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32 if name in self._packed else self._inner.dtype(name)

    def read(self, source: Source) -> torch.Tensor:
        if source.name not in self._packed:
            return self._inner.read(source)
        check_source(source, self.shape(source.name), "checkpoint")
        experts, (top, bottom), outs = whole_ranges(source)
        count, inputs, outputs = source.shape
        groups = (top // _GROUP, -(-bottom // _GROUP))  # outward, to whole groups
        shape = (count, outputs, inputs // _GROUP)
        ranges = (experts, outs, groups)
        blocks = self._inner.read(Source(source.name + _BLOCKS, (*shape, _GROUP // 2), ranges))
        scales = self._inner.read(Source(source.name + _SCALES, shape, ranges))
        halves = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(3).int()
        numbers = torch.ldexp(self._values[halves], scales.int().unsqueeze(-1) - 127)
        kept = (top - groups[0] * _GROUP, bottom - groups[0] * _GROUP)
        return cut(numbers.flatten(2), ((0, len(blocks)), (0, blocks.shape[1]), kept)).mT

    def given(self) -> Given:
        inner = self._inner.given()

        def made(tensors: Mapping[str, torch.Tensor]) -> Reader:
            return Mxfp4Reader(inner(tensors))

        return made

    def release(self) -> None:
        self._inner.release()
