"""From recipes to the tensors of one rank, streamed: peak memory stays near the rank's own weights.

Weights are copied into arenas of anonymous (or shared) memory that asks for huge pages: decode
reads every weight once a token, and 4 KiB file pages cost it TLB misses. What several ranks of the
host hold alike lies in one shared arena and is written by its lowest holder.
Knows no checkpoint format and no model.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from anabranch.weights.readers.base import Given, Reader, check_source, whole_ranges
from anabranch.weights.readers.entries import TensorsReader
from anabranch.weights.recipe import Param, Recipe, Source, Transform
from anabranch.weights.share import ALIGN, Share, aborting, private_arena

_STREAM = 1 << 18  # elements read and converted at a time: near the cache, many for a call's cost

Params = dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Slot:
    """Where a parameter lies. writer: the rank that fills it; offset: bytes into its arena."""

    param: Param
    dtype: torch.dtype
    shared: bool
    offset: int
    writer: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.param.shape) * self.dtype.itemsize


def _dtype(param: Param, model: torch.dtype) -> torch.dtype:
    if param.dtype is None:
        return model
    named = getattr(torch, param.dtype, None)
    assert isinstance(named, torch.dtype), f"{param.name}: {param.dtype} is not a dtype"
    return named


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def plan_slots(
    recipes: Sequence[Recipe], rank: int, dtype: torch.dtype
) -> tuple[list[_Slot], int, int]:
    """Slots of `rank`'s parameters, bytes of its private arena, bytes of the shared one.

    Pure integers: every rank of the host computes the same shared offsets from the same recipes.
    Equal parameters of one rank (a tied embedding and head) are one memory too.
    """
    Key = tuple[tuple[Source, ...], tuple[int, ...], torch.dtype, tuple[Transform, ...]]

    def key_of(param: Param) -> Key:
        return param.sources, param.shape, _dtype(param, dtype), param.transforms

    holders: dict[Key, list[int]] = {}
    for holder, recipe in enumerate(recipes):
        for param in recipe:
            ranks = holders.setdefault(key_of(param), [])
            if holder not in ranks:
                ranks.append(holder)
    shared: dict[Key, int] = {}
    shared_bytes = 0
    for key, ranks in holders.items():
        if len(ranks) > 1:
            shared[key] = shared_bytes
            shared_bytes += _aligned(math.prod(key[1]) * key[2].itemsize)
    private: dict[Key, int] = {}
    private_bytes = 0
    slots = []
    for param in recipes[rank]:
        key = key_of(param)
        if key not in shared and key not in private:
            private[key] = private_bytes
            private_bytes += _aligned(math.prod(key[1]) * key[2].itemsize)
        at = shared[key] if key in shared else private[key]
        slots.append(_Slot(param, key[2], key in shared, at, holders[key][0]))
    return slots, private_bytes, shared_bytes


def _parts(param: Param, tensor: torch.Tensor) -> Iterator[tuple[Source, torch.Tensor]]:
    """Each source with the view of the parameter's memory that it fills (joined along dim 0).

    The view has the elements of the source in their order, and its first dim; a transform is only
    in the view's strides (an unzipped dim becomes two).
    """
    flat, at = tensor.view(-1), 0
    for source in param.sources:
        shape = list(source.local_shape)
        if "transpose" in param.transforms:
            shape[-2:] = shape[:-3:-1]
        count = math.prod(shape)
        out = flat[at : at + count].view(shape)
        for transform in reversed(param.transforms):
            out = (out if transform == "transpose" else out.view(*out.shape[:-1], 2, -1)).mT
        yield source, out
        at += count
    assert at == flat.numel(), (
        f"{param.name}: sources hold {at} elements, shape {param.shape} has {flat.numel()}"
    )


def _check(source: Source, dtype: torch.dtype, reader: Reader, where: str) -> None:
    """ValueError unless the tensor has the source's shape and numbers of the parameter's kind."""
    check_source(source, reader.shape(source.name), where)
    found = reader.dtype(source.name)
    floats = dtype.is_floating_point
    if found.is_floating_point != floats or found.is_complex or found == torch.bool:
        wanted = "float32, bfloat16, float16, or fp8 with scales" if floats else "int64 or int32"
        raise ValueError(
            f"{where}: tensor {source.name!r} is {found}, but the model computes with it as "
            f"{dtype}; wanted {wanted}"
        )


def _fill(source: Source, out: torch.Tensor, reader: Reader) -> None:
    """Reads `source` into `out`, some rows at a time, so that conversions need little memory."""
    ranges = whole_ranges(source)
    if not ranges:
        out.copy_(reader.read(source))
        return
    start, stop = ranges[0]
    rows = max(1, _STREAM * (stop - start) // max(1, out.numel()))
    for top in range(start, stop, rows):
        bottom = min(stop, top + rows)
        piece = Source(source.name, source.shape, ((top, bottom), *ranges[1:]))
        into = out[top - start : bottom - start]
        into.copy_(reader.read(piece).reshape(into.shape))
    reader.release()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Pieces this small take longer to share out among torch's threads than to convert."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _fill_all(parts: Iterable[tuple[Source, torch.Tensor]], reader: Reader) -> None:
    with ThreadPoolExecutor(torch.get_num_threads()) as pool, _one_thread():
        filled = [pool.submit(_fill, source, out, reader) for source, out in parts]
        try:
            for part in filled:
                part.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def load(
    recipes: Sequence[Recipe],
    rank: int,
    reader: Reader,
    dtype: torch.dtype,
    share: Share,
) -> Params:
    """Parameters of `rank` by name, in CPU memory.

    recipes: one per rank of this host, in rank order; `rank` indexes it. dtype: of parameters that
    name none. share: how the host's ranks hold equal parameters once (`weights.share`). Raises
    ValueError for tensors that are absent, of another shape, or integers where floats are wanted.
    """
    slots, private_bytes, shared_bytes = plan_slots(recipes, rank, dtype)
    with aborting(share):  # every fault of the checkpoint shows before memory is taken
        for slot in slots:
            for source in slot.param.sources:
                _check(source, slot.dtype, reader, "checkpoint")
    private = private_arena(private_bytes)
    shared = share.arena(shared_bytes)
    params: Params = {}
    for slot in slots:
        arena = shared if slot.shared else private
        memory = arena[slot.offset : slot.offset + slot.nbytes]
        params[slot.param.name] = memory.view(slot.dtype).view(slot.param.shape)
    with aborting(share):
        parts = (
            part
            for slot in slots
            if slot.writer == rank
            for part in _parts(slot.param, params[slot.param.name])
        )
        _fill_all(parts, reader)
    share.barrier()
    return params


def update(
    recipes: Sequence[Recipe],
    rank: int,
    params: Params,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    share: Share,
    given: Given = TensorsReader,
) -> None:
    """Writes checkpoint tensors (whole, by released name) in place into what `load` returned.

    given: the form they come in, that of the reader which was loaded from. Views of the parameters
    see the new values. Every rank of the host calls it with the same tensors. ValueError, before
    anything is written, for a name no parameter uses and for whatever `load` refuses.
    """
    reader = given(tensors)
    names = set(reader.names())
    used = [(s, p) for recipe in recipes for p in recipe for s in p.sources if s.name in names]
    unknown = names.difference(source.name for source, _ in used)
    if unknown:
        raise ValueError(f"update_weights: the model has no tensor {min(unknown)!r}")
    for source, param in used:
        _check(source, _dtype(param, dtype), reader, "update_weights")
    slots, _, _ = plan_slots(recipes, rank, dtype)
    parts = (
        (source, out)
        for slot in slots
        if slot.writer == rank
        for source, out in _parts(slot.param, params[slot.param.name])
        if source.name in names
    )
    _fill_all(parts, reader)
    share.barrier()
