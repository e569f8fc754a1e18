"""The seam every checkpoint format fills: named tensors, read in slices.

Owns the checks and the slicing that all formats share. Knows no file format and no rank.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Protocol, TypeVar

import torch

from anabranch.weights.recipe import Range, Source


class Reader(Protocol):
    """Tensors of one checkpoint under their released names.

    Tensors that only describe others (block scales) are not listed. `dtype` is that of what `read`
    returns. All methods raise ValueError naming the file, the tensor, what was wanted and found.
    """

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...] | None:
        """None if the reader makes any shape it is asked for."""
        ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, source: Source) -> torch.Tensor:
        """The slice, of shape `source.local_shape`: a view of the file's pages where possible."""
        ...

    def given(self) -> "Given":
        """Makes readers of tensors in memory that have this checkpoint's form; holds no file."""
        ...

    def release(self) -> None:
        """Lets go of file pages read so far (they can be read again)."""
        ...


T = TypeVar("T")
Given = Callable[[Mapping[str, torch.Tensor]], Reader]


def found(tensors: Mapping[str, T], name: str, where: object) -> T:
    """The tensor of that name. ValueError, with where it was looked for, if there is none."""
    tensor = tensors.get(name)
    if tensor is None:
        raise ValueError(
            f"{where}: tensor {name!r} is absent among the {len(tensors)} tensors of the checkpoint"
        )
    return tensor


def whole_ranges(source: Source) -> tuple[Range, ...]:
    """`source.ranges` with the dims that were left out."""
    return source.ranges + tuple((0, n) for n in source.shape[len(source.ranges) :])


def check_source(source: Source, found: tuple[int, ...] | None, where: str) -> None:
    """ValueError if the checkpoint's tensor is not the one the recipe was made for."""
    if found is not None and found != source.shape:
        raise ValueError(
            f"{where}: tensor {source.name!r} has shape {list(found)}, "
            f"but config.json asks for {list(source.shape)}"
        )
    for dim, (start, stop) in enumerate(whole_ranges(source)):
        assert 0 <= start <= stop <= source.shape[dim], (
            f"{source.name} dim {dim}: [{start}, {stop})"
        )


def cut(tensor: torch.Tensor, ranges: tuple[Range, ...]) -> torch.Tensor:
    """The view of `tensor` at `ranges`."""
    for dim, (start, stop) in enumerate(ranges):
        tensor = tensor.narrow(dim, start, stop - start)
    return tensor
