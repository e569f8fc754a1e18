"""Random weights made from (seed, tensor name, element index): no file is read.

An element's value does not depend on the slice it is read in, so every layout sees the same whole
tensors. Values are uniform, scaled by fan-in so that activations and logits keep a spread near 1.
"""

import math
import zlib
from collections.abc import Collection

import torch

from anabranch.weights.readers.base import Given, whole_ranges
from anabranch.weights.readers.entries import TensorsReader
from anabranch.weights.recipe import Source

_TABLE = "tid2eid"  # experts of a token id: integers, all different


def _wrap(value: int) -> int:
    """`value` modulo 2^32 as a signed 32-bit integer, which is how torch multiplies int32."""
    return (value + 2**31) % 2**32 - 2**31


def _mix(x: torch.Tensor, seed: int) -> torch.Tensor:
    """MurmurHash3's 32-bit finaliser over int32 counters, in place (public domain algorithm)."""
    x.mul_(_wrap(0x9E3779B1)).add_(_wrap(seed))
    for shift, mask, factor in ((16, 0xFFFF, 0x85EBCA6B), (13, 0x7FFFF, 0xC2B2AE35)):
        x.bitwise_xor_((x >> shift).bitwise_and_(mask)).mul_(_wrap(factor))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


class DummyReader:
    """Reader of every tensor a recipe can name; `names` is therefore empty."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def names(self) -> Collection[str]:
        return ()

    def shape(self, name: str) -> tuple[int, ...] | None:
        return None

    def dtype(self, name: str) -> torch.dtype:
        return torch.int64 if name.endswith(_TABLE) else torch.float32

    def read(self, source: Source) -> torch.Tensor:
        assert math.prod(source.shape) < 2**32, f"{source.name}: more than 2^32 elements"
        index = torch.zeros((), dtype=torch.int64)
        stride = math.prod(source.shape)
        for size, (start, stop) in zip(source.shape, whole_ranges(source), strict=True):
            stride //= max(size, 1)
            index = index.unsqueeze(-1) + torch.arange(start, stop) * stride
        if source.name.endswith(_TABLE):
            return index % source.shape[-1]
        key = zlib.crc32(f"{self._seed}/{source.name}".encode())
        noise = _mix(index.to(torch.int32), key).float().mul_(3**0.5 / 2**31)  # variance 1
        if len(source.shape) > 1:
            return noise.mul_(1.0 / math.sqrt(source.shape[-1]))
        norm = source.name.endswith("norm.weight")
        return noise.mul_(0.1).add_(1.0) if norm else noise.mul_(0.02)

    def given(self) -> Given:
        return TensorsReader

    def release(self) -> None:
        return
