"""pack_partials and merge_partials on every wire: X1 to X6, at the level of the op."""

import itertools
import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from anabranch import ops
from anabranch.ops import wires

SHAPES = [(2, 4, 8, 128), (4, 1, 16, 512), (2, 8, 12, 512), (3, 2, 2, 96)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def rows_then_lse(n: int, b: int, h: int, d: int, dtype: torch.dtype) -> wires.Wire:
    """A third wire, which the op never heard of: [N, B, h*D] rows, then [N, B, h] lse, in bytes."""
    size = n * b * h * d * dtype.itemsize
    buffer = torch.empty(size + n * b * h * 4, dtype=torch.uint8)
    out = buffer[:size].view(dtype).view(n, b, h, d)
    return wires.Wire((buffer,), out, buffer[size:].view(torch.float32).view(n, b, h))


MAKERS: dict[str, Callable[..., wires.Wire]] = {
    "interleaved": wires.interleaved,
    "split": wires.split,
    "rows_then_lse": rows_then_lse,
}


def random_bytes(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    """Any bit pattern at all, NaN included."""
    gen = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=gen)
    return raw.to(torch.uint8).view(dtype)


def as_bits(t: Tensor) -> Tensor:
    return t.view(BITS[t.element_size()])


@pytest.mark.parametrize("wire_name", MAKERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_pack_is_bit_exact(
    bound: ops.Ops, shape: tuple[int, int, int, int], dtype: torch.dtype, wire_name: str
) -> None:
    """X1. fp8 travels as uint8; no row past B is touched (X4)."""
    n, b, h, d = shape
    travels = torch.uint8 if dtype.itemsize == 1 else dtype
    wire = MAKERS[wire_name](n, b + 2, h, d, travels)
    for buffer in wire.buffers:
        buffer.view(torch.uint8).fill_(0xA5)
    out = random_bytes(1, b, n * h, d, dtype=dtype)
    lse = random_bytes(2, b, n * h, dtype=torch.float32)
    bound.pack_partials(out, lse, wire.out, wire.lse)
    for member, j in itertools.product(range(n), range(h)):
        head = member * h + j
        assert torch.equal(as_bits(wire.out[member, :b, j]), as_bits(out[:, head]))
        assert torch.equal(as_bits(wire.lse[member, :b, j]), as_bits(lse[:, head]))
    assert bool((as_bits(wire.out[:, b:].contiguous()).view(torch.uint8) == 0xA5).all())
    assert bool((as_bits(wire.lse[:, b:].contiguous()).view(torch.uint8) == 0xA5).all())


def test_pack_takes_strided_partials(bound: ops.Ops) -> None:
    n, b, h, d = 3, 4, 2, 64
    wide, stats = torch.randn(b, 2, n * h, d + 16), torch.randn(n * h, b)
    wire = wires.interleaved(n, b, h, d, torch.float32)
    bound.pack_partials(wide[:, 1, :, :d], stats.t(), wire.out, wire.lse)
    assert torch.equal(wire.out.permute(1, 0, 2, 3).reshape(b, n * h, d), wide[:, 1, :, :d])
    assert torch.equal(wire.lse.permute(1, 0, 2).reshape(b, n * h), stats.t())


def test_zero_rows(bound: ops.Ops) -> None:
    wire = wires.split(2, 0, 3, 64, torch.bfloat16)
    bound.pack_partials(
        torch.empty(0, 6, 64, dtype=torch.bfloat16), torch.empty(0, 6), wire.out, wire.lse
    )
    out, lse = bound.merge_partials(wire.out, wire.lse)
    assert out.shape == (0, 3, 64) and lse.shape == (0, 3)


@pytest.mark.parametrize("fill", [0.0, math.nan])
def test_stats_slot_1_is_nobodys(bound: ops.Ops, fill: float) -> None:
    """X2: pack leaves it as it was, merge does not read it."""
    n, b, h, d = 2, 3, 4, 64
    wire = wires.split(n, b, h, d, torch.float32)
    wire.buffers[1].fill_(fill)
    bound.pack_partials(torch.randn(b, n * h, d), torch.randn(b, n * h), wire.out, wire.lse)
    slot = wire.buffers[1][..., 1]
    assert bool(slot.isnan().all() if math.isnan(fill) else (slot == 0).all())
    out, lse = bound.merge_partials(wire.out, wire.lse)
    assert bool(out.isfinite().all()) and bool(lse.isfinite().all())


class Seen(TorchDispatchMode):
    """Counts the array library's calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


VIEWS = {"slice", "select", "view", "permute", "squeeze", "detach", "alias", "as_strided", "t"}


@pytest.mark.compiled
@pytest.mark.parametrize("name, empties", [("interleaved", 1), ("split", 2)])
def test_a_warm_exchange_copies_nothing(name: str, empties: int) -> None:
    """X3: no clone, copy_, contiguous, zeros or fill_; only its own ``empty`` buffers."""
    bound = ops.bind("cpu", provider="cpp")
    n, b, h, d = 2, 4, 6, 128
    partials, lse = torch.randn(b, n * h, d).bfloat16(), torch.randn(b, n * h)
    out, lse_out = torch.empty(b, h, d, dtype=torch.bfloat16), torch.empty(b, h)
    with Seen() as seen:
        wire = MAKERS[name](n, b, h, d, torch.bfloat16)
        bound.pack_partials(partials, lse, wire.out, wire.lse)
        bound.merge_partials(wire.out, wire.lse, out=out, lse_out=lse_out)
    assert seen.calls["empty"] == empties
    assert set(seen.calls) - VIEWS == {"empty"}


def exchange(sent: list[wires.Wire], me: int, name: str, width: int) -> wires.Wire:
    """An emulated all_to_all: peer-outside moves row blocks, peer-inside opaque bytes of stats."""
    if name == "interleaved":
        return wires.interleaved_views(torch.stack([w.buffers[0][me] for w in sent]), width)
    payload = torch.stack([w.buffers[0][:, :, me] for w in sent], 2)
    stats = torch.stack([w.buffers[1].view(torch.uint8)[:, :, me] for w in sent], 2)
    return wires.split_views(payload, stats.view(torch.float32))


@pytest.mark.parametrize("name", ["interleaved", "split"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_whole_path_equals_one_softmax(bound: ops.Ops, n: int, name: str) -> None:
    """X6: keys split over n members, some of them empty; each member merges its own heads."""
    b, h, d, keys = 3, 2, 64, 7
    q, k, v = torch.randn(b, n * h, d), torch.randn(keys, d), torch.randn(keys, d)
    score = q @ k.t() / 8
    whole = torch.softmax(score, -1) @ v
    sent = []
    for member in range(n):
        mine = [s for s in range(keys) if s % n == member and (member != 1 or n != 3)]
        if n == 3 and member == 0:
            mine = [s for s in range(keys) if s % n != 2]
        part = score[..., mine]
        out = torch.softmax(part, -1) @ v[mine] if mine else torch.zeros(b, n * h, d)
        lse = torch.logsumexp(part, -1) if mine else torch.full((b, n * h), -math.inf)
        sent.append(MAKERS[name](n, b, h, d, torch.float32))
        bound.pack_partials(out, lse, sent[-1].out, sent[-1].lse)
    for me in range(n):
        got = exchange(sent, me, name, d)
        out, lse = bound.merge_partials(got.out, got.lse)
        own = slice(me * h, (me + 1) * h)
        torch.testing.assert_close(out, whole[:, own], atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(lse, torch.logsumexp(score, -1)[:, own], atol=2e-6, rtol=1e-5)


def good() -> dict[str, Tensor]:
    """Arguments of a pack that is accepted: B 2 of 3, N 2, h 2, D 8, bf16."""
    return {
        "out": torch.zeros(2, 4, 8, dtype=torch.bfloat16),
        "lse": torch.zeros(2, 4),
        "dst_out": torch.zeros(2, 3, 2, 8, dtype=torch.bfloat16),
        "dst_lse": torch.zeros(2, 3, 2),
    }


def bf16(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "change, numbers",
    [
        ({"lse": bf16(2, 4)}, "float"),
        ({"dst_lse": bf16(2, 3, 2)}, "float"),
        ({"out": bf16(2, 5, 8), "lse": torch.zeros(2, 5)}, "5 heads.*2 members"),
        ({"out": bf16(2, 4, 7), "dst_out": bf16(2, 3, 2, 7)}, "7 x 2 bytes.*4 bytes"),
        ({"out": bf16(2, 4, 16)[..., ::2]}, "stride"),
        ({"dst_out": bf16(2, 3, 8, 2).transpose(2, 3)}, "stride"),
        ({"out": bf16(4, 4, 8), "lse": torch.zeros(4, 4)}, "4 rows.*3"),
        ({"lse": torch.zeros(2, 3)}, "2, 3"),
        ({"dst_out": bf16(2, 3, 2, 10)}, "10"),
        ({"dst_out": bf16(2, 3, 3, 8)}, "3"),
        ({"dst_lse": torch.zeros(2, 2, 2)}, "2, 2, 2"),
        ({"dst_out": torch.zeros(2, 3, 2, 8)}, "float32"),
        ({"dst_out": bf16(0, 3, 2, 8), "dst_lse": torch.zeros(0, 3, 2)}, "0 members"),
        ({"out": bf16(4, 8)}, "dims"),
    ],
)
def test_pack_refuses_with_the_numbers(
    bound: ops.Ops, change: dict[str, Tensor], numbers: str
) -> None:
    """X4."""
    bound.pack_partials(**good())
    with pytest.raises(ValueError, match=f"(?s)pack_partials.*{numbers}"):
        bound.pack_partials(**{**good(), **change})


def in_fp64(partials: Tensor, lse: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The merge by its definition, in double precision, on finite inputs or -inf lse."""
    z, x = lse.double(), partials.double()
    everything = z if sink is None else torch.cat((z, sink.double().expand(1, *z.shape[1:])))
    total = torch.logsumexp(everything, 0)
    weight = torch.where(total == -math.inf, 0.0, torch.exp(z - total))
    weighted = torch.where(weight[..., None] > 0, weight[..., None] * x, 0.0)
    return weighted.sum(0), total


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 8, 70])
@pytest.mark.parametrize("d", [64, 96, 128, 512, 576, 5])
def test_merge_against_fp64(bound: ops.Ops, n: int, d: int) -> None:
    """X5: with an empty shard (NaN payload) in one head, all empty in another."""
    gen = torch.Generator().manual_seed(n * 1000 + d)
    partials, lse = torch.randn(n, 3, 4, d, generator=gen), 4 * torch.randn(n, 3, 4, generator=gen)
    lse[0, 0, 0] = -math.inf
    partials[0, 0, 0] = math.nan
    lse[:, 1, 1] = -math.inf
    partials[:, 1, 1] = math.nan
    out, merged = bound.merge_partials(partials, lse)
    expected, total = in_fp64(partials, lse)
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(merged.double(), total, atol=1e-6, rtol=1e-6)
    assert not out[1, 1].any() and merged[1, 1] == -math.inf


def test_merge_in_bf16(bound: ops.Ops) -> None:
    """X5: the error at (B 8, h 12, D 512) is at most 7.8e-3."""
    for n in (2, 4):
        gen = torch.Generator().manual_seed(n)
        partials = torch.randn(n, 8, 12, 512, generator=gen).bfloat16()
        lse = torch.randn(n, 8, 12, generator=gen)
        out, _ = bound.merge_partials(partials, lse)
        assert out.dtype == torch.bfloat16
        assert float((out.double() - in_fp64(partials, lse)[0]).abs().max()) <= 7.8e-3
        wide = torch.empty(8, 12, 512)
        bound.merge_partials(partials, lse, out=wide)
        assert float((wide.double() - in_fp64(partials, lse)[0]).abs().max()) <= 2e-6


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_lse_counts_as_empty(bound: ops.Ops, bad: float) -> None:
    partials, lse = torch.randn(3, 2, 2, 64), torch.randn(3, 2, 2)
    lse[1] = bad
    partials[1] = math.nan
    out, merged = bound.merge_partials(partials, lse)
    expected = bound.merge_partials(partials[::2], lse[::2])
    assert torch.equal(out, expected[0]) and torch.equal(merged, expected[1])


def test_the_base_of_the_lse(bound: ops.Ops) -> None:
    """Partition sums 2 and 8, values 0 and 10: 8 with the right base, else something else."""
    z, value = torch.tensor([2.0, 8.0]).view(2, 1, 1), torch.tensor([0.0, 10.0]).view(2, 1, 1, 1)
    out, lse = bound.merge_partials(value, z.log())
    assert float(out) == pytest.approx(8.0, abs=1e-5)
    assert float(lse) == pytest.approx(math.log(10.0), abs=1e-6)
    out, lse = bound.merge_partials(value, z.log2(), base="2")
    assert float(out) == pytest.approx(8.0, abs=1e-5)
    assert float(lse) == pytest.approx(math.log(10.0), abs=1e-6), "the merged lse is natural"
    assert abs(float(bound.merge_partials(value, z.log2())[0]) - 8.0) > 0.5


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_sink_joins_once(bound: ops.Ops, n: int) -> None:
    partials, lse = torch.randn(n, 3, 5, 64), torch.randn(n, 3, 5)
    lse[:, 0, 1] = -math.inf
    sink = torch.randn(5)
    out, merged = bound.merge_partials(partials, lse, sink=sink)
    expected, total = in_fp64(partials, lse, sink)
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(merged.double(), total, atol=1e-6, rtol=1e-6)
    assert merged[0, 1] == sink[1] and not out[0, 1].any()


def test_a_sink_that_is_no_number_counts_as_none(bound: ops.Ops) -> None:
    partials, lse = torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3)
    sink = torch.tensor([math.nan, math.inf, 0.5])
    out, merged = bound.merge_partials(partials, lse, sink=sink)
    expected, total = in_fp64(partials, lse, torch.tensor([-math.inf, -math.inf, 0.5]))
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(merged.double(), total, atol=1e-6, rtol=1e-6)


def test_strides_of_everything(bound: ops.Ops) -> None:
    """Padded V, lse out of a wider row, out and lse_out given in other strides; in place too."""
    n, b, h, d = 3, 4, 5, 96
    padded, stats = torch.randn(n, h, b, d + 32), torch.randn(b, n, h, 2)
    partials, lse = padded.transpose(1, 2)[..., :d], stats.transpose(0, 1)[..., 0]
    expected, total = in_fp64(partials, lse)
    out, lse_out = torch.zeros(h, b, d + 8).transpose(0, 1)[..., :d], torch.zeros(h, b).t()
    result = bound.merge_partials(partials, lse, out=out, lse_out=lse_out)
    assert result[0].data_ptr() == out.data_ptr() and result[1].data_ptr() == lse_out.data_ptr()
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse_out.double(), total, atol=1e-6, rtol=1e-6)
    bound.merge_partials(partials, lse, out=partials[0])
    torch.testing.assert_close(partials[0].double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.compiled
def test_large_merges_over_threads() -> None:
    partials, lse = torch.randn(4, 64, 8, 512), torch.randn(4, 64, 8)
    one = ops.bind("cpu", provider="cpp", threads=1).merge_partials(partials, lse)
    many = ops.bind("cpu", provider="cpp", threads=3).merge_partials(partials, lse)
    assert torch.equal(one[0], many[0]) and torch.equal(one[1], many[1])


@pytest.mark.parametrize(
    "change",
    [
        {"lse": torch.zeros(2, 3, 4, dtype=torch.bfloat16)},
        {"lse": torch.zeros(2, 3, 5)},
        {"partials": torch.zeros(2, 3, 4, 8, dtype=torch.int32)},
        {"partials": torch.zeros(2, 3, 4, 16)[..., ::2]},
        {"base": "10"},
        {"sink": torch.zeros(3)},
        {"sink": torch.zeros(4).bfloat16()},
        {"out": torch.zeros(3, 4, 9)},
        {"out": torch.zeros(3, 4, 8).bfloat16()},
        {"lse_out": torch.zeros(4, 3)},
        {"lse_out": torch.zeros(3, 4).double()},
    ],
)
def test_merge_refuses(bound: ops.Ops, change: dict[str, Tensor]) -> None:
    args = {"partials": torch.zeros(2, 3, 4, 8), "lse": torch.zeros(2, 3, 4), **change}
    with pytest.raises(ValueError, match="merge_partials"):
        bound.merge_partials(args.pop("partials"), args.pop("lse"), **args)  # type: ignore[arg-type]


def test_wires_refuse_what_cannot_hold_an_lse() -> None:
    with pytest.raises(ValueError, match="12 x 2 bytes"):
        wires.interleaved_views(torch.zeros(1, 1, 1, 12, dtype=torch.bfloat16), 11)
    with pytest.raises(ValueError, match="12 x 2 bytes"):
        wires.interleaved_views(torch.zeros(1, 1, 1, 12, dtype=torch.bfloat16), 12)
    with pytest.raises(ValueError, match="stats"):
        wires.split_views(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3))
