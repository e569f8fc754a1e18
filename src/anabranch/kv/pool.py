"""The cached rows of one rank: a pool of slots per layer, and where a page's positions lie in it.

A slot holds one *entry*: for GQA the K heads then the V heads of a position, for MLA its latent and
rope part. Pages are logical; with N stripes each rank stores 1/N of a page's positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KvSpec:
    """One cache kind: what a layer stores per position on this rank.

    width: elements of an entry. local_page: slots of a page on this rank. pages: pages of the pool.
    """

    layers: int
    width: int
    pages: int
    local_page: int
    dtype: torch.dtype

    @property
    def bytes_per_page(self) -> int:
        return self.layers * self.width * self.local_page * self.dtype.itemsize


class Pool:
    """Tensors [pages * local_page, width], one per layer."""

    def __init__(self, spec: KvSpec, device: torch.device, poison: bool = False) -> None:
        self.spec = spec
        shape = (spec.layers, spec.pages * spec.local_page, spec.width)
        # not filled: memory is taken from the system as pages are first written, and nothing reads
        # a slot that was not written
        self.slots = torch.empty(shape, dtype=spec.dtype, device=device)
        self.poison = poison
        if poison:
            self.slots.fill_(float("nan"))

    def layer(self, index: int) -> Tensor:
        """The pool of one layer: [slots, width]."""
        return self.slots[index]

    def copy_pages(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Copy whole pages (source, destination) in every layer."""
        size = self.spec.local_page
        for source, target in pairs:
            self.slots[:, target * size : (target + 1) * size] = self.slots[
                :, source * size : (source + 1) * size
            ]

    def poison_pages(self, pages: list[int]) -> None:
        """Debugging: make reads of freed pages visible."""
        size = self.spec.local_page
        for page in pages:
            self.slots[:, page * size : (page + 1) * size].fill_(float("nan"))


def store(pool: Tensor, slots: Tensor, entries: Tensor) -> None:
    """pool[slots[i]] = entries[i]. Exactly one rank of a stripe group writes a position."""
    pool.index_copy_(0, slots, entries)
