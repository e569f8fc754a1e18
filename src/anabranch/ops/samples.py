"""Sample inputs of every op: what a provider is held to, against the reference.

Owns small, seeded, awkward cases (strides, ragged counts, empties, poison); knows no provider.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from anabranch.ops import wires

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Call:
    """One call's arguments, fresh tensors every time; ``written`` are compared after it."""

    args: tuple[object, ...]
    kwargs: Mapping[str, object] = field(default_factory=dict)
    written: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Sample:
    """A named case: ``make`` builds the same call each time."""

    name: str
    make: Callable[[], Call]

    def run(self, kernel: Callable[..., object]) -> tuple[Tensor, ...]:
        """All that the call wrote and returned."""
        call = self.make()
        result = kernel(*call.args, **call.kwargs)
        returned = result if isinstance(result, tuple) else (result,)
        return (*call.written, *(t for t in returned if isinstance(t, Tensor)))


def _normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def copy_rows() -> Iterator[Sample]:
    """Both directions, all clamps, tensor counts, strided rows."""

    def make(rows: int, offset: int, count: int, direction: str, strided: bool) -> Call:
        src = _normal(1, rows, 3, 8)
        dst = _normal(2, 7, 2, 3, 8)[:, 1] if strided else _normal(2, 7, 3, 8)
        tensors = (torch.tensor(offset), torch.tensor(count, dtype=torch.int32))
        return Call((dst, src, *(tensors if strided else (offset, count)), direction), {}, (dst,))

    for rows, offset, count, direction, strided in itertools.product(
        (0, 5, 9), (-2, 0, 3, 8), (-1, 0, 4, 99), ("scatter", "gather"), (False, True)
    ):
        yield Sample(
            f"{rows}-{offset}-{count}-{direction}-{strided}",
            partial(make, rows, offset, count, direction, strided),
        )


def pack_partials() -> Iterator[Sample]:
    """Both wires, buffers longer than the rows, the dtypes of partials."""

    def make(shape: tuple[int, int, int, int], dtype: torch.dtype, inside: bool) -> Call:
        n, b, h, d = shape
        wire = (wires.split if inside else wires.interleaved)(n, b + 1, h, d, dtype)
        for buffer in wire.buffers:
            buffer.zero_()
        out, lse = _normal(3, b, n * h, d, dtype=dtype), _normal(4, b, n * h)
        return Call((out, lse, wire.out, wire.lse), {}, wire.buffers)

    shapes = ((2, 4, 8, 128), (4, 1, 16, 512), (2, 8, 12, 512), (3, 2, 2, 96), (1, 0, 3, 8))
    for shape, dtype, inside in itertools.product(shapes, FLOATS, (False, True)):
        name = f"{shape}-{dtype}-{'split' if inside else 'interleaved'}"
        yield Sample(name, partial(make, shape, dtype, inside))


def merge_partials() -> Iterator[Sample]:
    """Empty shards, NaN payloads of weight 0, non-finite lse, sinks, both bases, both wires."""

    def make(n: int, d: int, dtype: torch.dtype, inside: bool, sink: bool) -> Call:
        b, h = 3, 5
        wire = (wires.split if inside else wires.interleaved)(n, b, h, d, dtype)
        wire.out.copy_(_normal(5, n, b, h, d, dtype=dtype))
        wire.lse.copy_(3 * _normal(6, n, b, h))
        for at, bad in enumerate((-math.inf, math.inf, math.nan)):
            wire.lse[at % n, at, 2] = bad
            wire.out[at % n, at, 2] = math.nan
        wire.lse[:, 1, 3] = -math.inf
        kwargs: dict[str, object] = {"base": "2" if inside else "e"}
        if sink:
            kwargs["sink"] = _normal(7, h)
            kwargs["lse_out"] = torch.zeros(h, b).t()
        return Call((wire.out, wire.lse), kwargs)

    for n, d, dtype, inside, sink in itertools.product(
        (1, 2, 3, 6), (64, 100, 512), FLOATS, (False, True), (False, True)
    ):
        name = f"{n}-{d}-{dtype}-{'split' if inside else 'interleaved'}-{sink}"
        yield Sample(name, partial(make, n, d, dtype, inside, sink))


def sum_members() -> Iterator[Sample]:
    """One tensor of members and a sequence of them, strided rows."""

    def make(n: int, dtype: torch.dtype, sequence: bool) -> Call:
        parts = _normal(8, n, 5, 2, 77, dtype=dtype)[:, :, 1]
        if not sequence:
            return Call((parts,))
        out = torch.zeros(5, 77, dtype=dtype)
        return Call((list(parts.unbind(0)), out), {}, (out,))

    for n, dtype, sequence in itertools.product((1, 2, 4, 7), FLOATS, (False, True)):
        yield Sample(f"{n}-{dtype}-{sequence}", partial(make, n, dtype, sequence))


def _paged(width: int, dtype: torch.dtype, windowed: bool) -> tuple[Tensor, ...]:
    """A poisoned pool [40 * 4, width] whose visible slots hold data, and its table, lens, start."""
    lens = torch.tensor([5, 0, 1, 37, 16, 4], dtype=torch.int32)
    start = torch.tensor([2, 0, 0, 30, 16, 0], dtype=torch.int32)
    pages = torch.randperm(40, generator=torch.Generator().manual_seed(9))
    table = torch.full((6, 10), -1, dtype=torch.int32)
    pool = torch.full((160, width), math.nan, dtype=dtype)
    for t, used in enumerate(lens.tolist()):
        table[t, : -(-used // 4)], pages = pages[: -(-used // 4)].int(), pages[-(-used // 4) :]
        for i in range(int(start[t]) if windowed else 0, used):
            pool[table[t, i // 4] * 4 + i % 4] = _normal(100 * t + i, width, dtype=dtype)
    return pool, table, lens, start


def attend_paged_gqa() -> Iterator[Sample]:
    """Empty and long rows, ragged KV maps, windows, sinks, poison in every unseen slot."""

    def make(dtype: torch.dtype, heads: int, kv: int, d: int, windowed: bool, sink: bool) -> Call:
        pool, table, lens, start = _paged(2 * kv * d, dtype, windowed)
        kwargs: dict[str, object] = {
            "page_slots": 4,
            "kv_map": torch.tensor([h * kv // heads for h in range(heads)], dtype=torch.int32),
            "scale": d**-0.5,
            "start": start if windowed else None,
            "sink": _normal(12, heads) if sink else None,
        }
        return Call((_normal(11, 6, heads, d, dtype=dtype), pool, table, lens), kwargs)

    for dtype, (heads, kv, d), windowed, sink in itertools.product(
        FLOATS, ((6, 3, 16), (9, 3, 64), (8, 1, 24), (3, 3, 80)), (False, True), (False, True)
    ):
        yield Sample(
            f"{heads}/{kv}-{d}-{dtype}-{windowed}-{sink}",
            partial(make, dtype, heads, kv, d, windowed, sink),
        )


def attend_paged_mla() -> Iterator[Sample]:
    """As for GQA, over latent entries."""

    def make(dtype: torch.dtype, heads: int, value: int, rope: int, windowed: bool) -> Call:
        pool, table, lens, start = _paged(value + rope, dtype, windowed)
        kwargs: dict[str, object] = {
            "page_slots": 4,
            "value_width": value,
            "scale": (value + rope) ** -0.5,
            "start": start if windowed else None,
            "sink": _normal(12, heads) if windowed else None,
        }
        return Call((_normal(11, 6, heads, value + rope, dtype=dtype), pool, table, lens), kwargs)

    for dtype, (heads, value, rope), windowed in itertools.product(
        FLOATS, ((6, 32, 16), (24, 64, 8), (1, 512, 64), (17, 40, 4)), (False, True)
    ):
        yield Sample(
            f"{heads}-{value}+{rope}-{dtype}-{windowed}",
            partial(make, dtype, heads, value, rope, windowed),
        )


def attend_rows() -> Iterator[Sample]:
    """Shuffled positions, keys no row sees (poisoned), windows, sinks, unequal widths."""

    def make(
        dtype: torch.dtype,
        shape: tuple[int, int, int, int, int, int],
        window: int | None,
        sink: bool,
    ) -> Call:
        rows, keys, heads, kv, dq, dv = shape
        order = torch.randperm(keys, generator=torch.Generator().manual_seed(13))
        q_pos = torch.arange(keys - rows, keys)[
            torch.randperm(rows, generator=torch.Generator().manual_seed(14))
        ]
        k = torch.cat((_normal(15, keys, kv, dq), torch.full((3, kv, dq), math.nan))).to(dtype)
        v = torch.cat((_normal(16, keys, kv, dv), torch.full((3, kv, dv), math.nan))).to(dtype)
        kwargs: dict[str, object] = {
            "kv_map": torch.tensor([h * kv // heads for h in range(heads)], dtype=torch.int32),
            "scale": dq**-0.5,
            "window": window,
            "sink": _normal(17, heads) if sink else None,
        }
        k_pos = torch.cat((order, torch.full((3,), 1 << 30)))
        return Call((_normal(18, rows, heads, dq, dtype=dtype), k, v, q_pos, k_pos.int()), kwargs)

    shapes = (
        (5, 9, 6, 3, 16, 16),
        (33, 33, 4, 4, 24, 16),
        (70, 150, 3, 1, 64, 64),
        (0, 4, 2, 1, 8, 8),
    )
    for dtype, shape, window, sink in itertools.product(FLOATS, shapes, (None, 4), (False, True)):
        yield Sample(f"{shape}-{dtype}-{window}-{sink}", partial(make, dtype, shape, window, sink))


def rms_norm() -> Iterator[Sample]:
    """Odd widths, rows of a wider tensor, no rows."""

    def make(rows: int, width: int, dtype: torch.dtype, strided: bool) -> Call:
        x = _normal(31, rows, width + 5, dtype=dtype)
        x = x[:, :width] if strided else x[:, :width].contiguous()
        return Call((x, 1 + 0.1 * _normal(32, width, dtype=dtype), 1e-6))

    for rows, width, dtype, strided in itertools.product(
        (0, 1, 5), (7, 64, 131), FLOATS, (False, True)
    ):
        yield Sample(
            f"{rows}-{width}-{dtype}-{strided}", partial(make, rows, width, dtype, strided)
        )


GATES: tuple[Mapping[str, float], ...] = ({}, {"limit": 0.7, "alpha": 1.702, "shift": 1.0})


def gated() -> Iterator[Sample]:
    """Odd widths, rows of a wider tensor, the plain and the clamped form, far tails."""

    def make(rows: int, width: int, dtype: torch.dtype, gate: Mapping[str, float]) -> Call:
        both = _normal(33, rows, 2 * width + 3, dtype=dtype)[:, : 2 * width]
        if rows > 1:
            both[0] = torch.linspace(-90, 90, 2 * width).to(dtype)
            both[0, width:] = 1
        return Call((both,), gate)

    for rows, width, dtype, gate in itertools.product((0, 1, 4), (5, 24, 65), FLOATS, GATES):
        yield Sample(f"{rows}-{width}-{dtype}-{gate}", partial(make, rows, width, dtype, gate))


def linear() -> Iterator[Sample]:
    """Few rows and many, odd widths, slices of wider weights and rows, with and without bias."""

    def make(rows: int, out: int, width: int, dtype: torch.dtype, bias: bool) -> Call:
        x = _normal(41, rows, width + 3, dtype=dtype)[:, :width]
        weight = (_normal(42, out, width + 5) / width**0.5).to(dtype)[:, 2 : width + 2]
        return Call((x, weight, _normal(43, out, dtype=dtype) if bias else None))

    for rows, (out, width), dtype, bias in itertools.product(
        (0, 1, 2, 7, 40), ((5, 9), (32, 131)), FLOATS, (False, True)
    ):
        yield Sample(
            f"{rows}-{out}-{width}-{dtype}-{bias}", partial(make, rows, out, width, dtype, bias)
        )


def run_experts() -> Iterator[Sample]:
    """Experts of others, experts without rows, biases, strided weights, few rows and many."""

    def make(
        rows: int, width: int, dtype: torch.dtype, biases: bool, gate: Mapping[str, float]
    ) -> Call:
        dim, held, known = 37, 3, 8
        draw = torch.Generator().manual_seed(rows)
        ids = torch.rand(rows, known, generator=draw).topk(2).indices
        x, weights = _normal(34, rows, dim, dtype=dtype), _normal(35, rows, 2).softmax(-1)
        gate_up = (_normal(36, held, 2 * width + 2, dim) / 2 / dim**0.5).to(dtype)[:, : 2 * width]
        down = (_normal(37, held, dim, width) / width**0.5).to(dtype)
        kwargs = {"first": 2, "gate_up": gate_up, "down": down, **gate}
        if biases:
            kwargs["gate_up_bias"] = _normal(38, held, 2 * width).mul(0.1).to(dtype)
            kwargs["down_bias"] = _normal(39, held, dim).mul(0.1).to(dtype)
        return Call((x, ids, weights), kwargs)

    for rows, width, dtype, biases, gate in itertools.product(
        (0, 1, 7, 30, 200), (5, 32), FLOATS, (False, True), GATES
    ):
        name = f"{rows}-{width}-{dtype}-{biases}-{gate}"
        yield Sample(name, partial(make, rows, width, dtype, biases, gate))
