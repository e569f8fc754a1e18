"""What each parameter of a rank is made of: pure integers and names, so it tests without torch.

A family's `recipe(arch, place)` returns one `Param` per parameter that exists (absent parameters
are absent). `weights.load` reads exactly these slices. Quantised sources are sliced with their
scales.
"""

import math
from dataclasses import dataclass
from typing import Literal

Range = tuple[int, int]


@dataclass(frozen=True)
class Source:
    """A slice of one checkpoint tensor.

    name: as in the released checkpoint. ranges: per dim (start, stop); trailing dims may be left
    out and are then whole. shape: of the whole tensor in the checkpoint (for errors and dummies).
    """

    name: str
    shape: tuple[int, ...]
    ranges: tuple[Range, ...] = ()

    @property
    def local_shape(self) -> tuple[int, ...]:
        kept = tuple(stop - start for start, stop in self.ranges)
        return kept + self.shape[len(kept) :]


Transform = Literal["transpose", "unzip"]
"""What is done to a slice as read: transpose swaps its last two dims; unzip takes the last dim's
even elements, then its odd ones."""

Heads = Literal["", "queries", "outputs"]
"""Which query heads cut a parameter further in decode: those whose queries are computed, those
whose outputs are projected, or none."""


@dataclass(frozen=True)
class Param:
    """One parameter of this rank: sources, transformed, joined along dim 0, reshaped to `shape`.

    dtype: None takes the model's; otherwise a torch dtype name, such as float32 for router biases.
    unit: smallest number of elements a further slice of dim 0 may have (a head, an expert).
    transforms: applied in this order; slices are those of the source, so an unzipped dim is cut in
    pairs. heads: by which it is cut further in decode.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    dtype: str | None = None
    unit: int = 1
    transforms: tuple[Transform, ...] = ()
    heads: Heads = ""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def whole(self) -> bool:
        """True if no source is cut, so that every rank that has the parameter holds the same."""
        return all(source.local_shape == source.shape for source in self.sources)


Recipe = tuple[Param, ...]
