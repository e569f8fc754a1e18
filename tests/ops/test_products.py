"""What lies around attention against fp64: rms_norm, gated, linear, run_experts."""

import pytest
import torch
import torch.nn.functional as F
from tests.ops.providers import Bind
from torch import Tensor

from anabranch import ops
from anabranch.ops.cpu.provider import library_from

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CLOSE = {torch.float32: 3e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}
"""Of the largest value: a rounding of what is stored and the sums' own."""
ROWS = [0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 30]
WIDTHS = [1, 7, 64, 333, 1500]
"""From less than a register to more than the nearest cache keeps of many rows."""


def rand(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(found: Tensor, wanted: Tensor, slack: float = 1.0) -> None:
    assert found.shape == wanted.shape
    if wanted.numel():
        error = (found.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3)
        assert error <= slack * CLOSE[found.dtype], float(error)


def gated64(both: Tensor, limit: float | None, alpha: float, shift: float) -> Tensor:
    g, up = both.double().chunk(2, dim=-1)
    if limit is not None:
        g, up = g.clamp(max=limit), up.clamp(-limit, limit)
    return g * torch.sigmoid(alpha * g) * (up + shift)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_linear_is_fp64s(bind: Bind, width: int, dtype: torch.dtype) -> None:
    """Any number of rows, of weights and of threads; slices of wider rows; a bias or none."""
    for rows in ROWS:
        for outputs, threads in ((1, 1), (5, 2), (130, 1), (1031, 2)):
            x = rand(rows, rows, width + 3, dtype=dtype)[:, 3:]
            weight = rand(outputs, outputs, width + 5, dtype=dtype)[:, 2:-3]
            bias = rand(7, outputs, dtype=dtype) if outputs % 2 else None
            found = bind(threads).linear(x, weight, bias)
            wanted = x.double() @ weight.double().T
            check(found, wanted if bias is None else wanted + bias.double())


def test_linear_keeps_leading_dims(bound: ops.Ops) -> None:
    x, weight = rand(0, 2, 3, 40, dtype=torch.float32), rand(1, 6, 40, dtype=torch.float32)
    check(bound.linear(x, weight), x.double() @ weight.double().T)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_is_fp64s(bound: ops.Ops, dtype: torch.dtype) -> None:
    for rows in (0, 1, 5):
        for width in WIDTHS:
            x = rand(width, rows, width + 2, dtype=dtype)[:, 1:-1]
            weight = rand(1, width, dtype=dtype)
            wide = x.double()
            unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
            check(bound.rms_norm(x, weight, 1e-5), unit * weight.double(), slack=1.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("limit", "alpha", "shift"), [(None, 1.0, 0.0), (0.5, 1.702, 1.0)])
def test_gated_is_fp64s(
    bound: ops.Ops, limit: float | None, alpha: float, shift: float, dtype: torch.dtype
) -> None:
    for rows in (0, 1, 5):
        for width in WIDTHS:
            both = 3 * rand(width, rows, 2 * width, dtype=dtype)
            found = bound.gated(both, limit=limit, alpha=alpha, shift=shift)
            check(found, gated64(both, limit, alpha, shift), slack=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "dim", "width"), [(1, 33, 20), (6, 130, 31), (40, 700, 300)])
@pytest.mark.parametrize("form", ["plain", "biased and cut"])
def test_experts_are_fp64s(
    bind: Bind, rows: int, dim: int, width: int, form: str, dtype: torch.dtype
) -> None:
    """Experts of somebody else, one that no row takes, one that most rows take."""
    experts, first, kinds = 5, 2, 9
    limit, alpha, shift = (None, 1.0, 0.0) if form == "plain" else (2.0, 1.702, 1.0)
    ids = torch.randint(0, kinds, (rows, 3), generator=torch.Generator().manual_seed(rows))
    ids[ids == first + 1] = first
    ids[0, :2] = torch.tensor([-1, 2**40])
    weights = rand(1, rows, 3, dtype=torch.float32).softmax(-1)
    x = rand(2, rows, dim, dtype=dtype)
    gate_up = rand(3, experts, 2 * width, dim, dtype=dtype) / dim**0.5
    down = rand(4, experts, dim, width, dtype=dtype) / width**0.5
    extra: dict[str, Tensor] = {}
    if form != "plain":
        extra["gate_up_bias"] = rand(5, experts, 2 * width, dtype=dtype)
        extra["down_bias"] = rand(6, experts, dim, dtype=dtype)
    wanted = torch.zeros(rows, dim, dtype=torch.float64)
    for e in range(experts):
        share = (weights * (ids == first + e)).sum(-1, keepdim=True).double()
        both = F.linear(x.double(), gate_up[e].double())
        out = gated64(both + (extra["gate_up_bias"][e] if extra else 0), limit, alpha, shift)
        out = F.linear(out, down[e].double()) + (extra["down_bias"][e] if extra else 0)
        wanted += share * out
    for threads in (1, 3):
        found = bind(threads).run_experts(
            x, ids, weights, first=first, gate_up=gate_up, down=down, limit=limit, alpha=alpha,
            shift=shift, **extra,
        )  # fmt: skip
        check(found, wanted, slack=4)


def test_the_library_takes_over_where_it_is_quicker() -> None:
    """bfloat16 has quick products with AVX-512 alone, and sooner where tiles are multiplied."""
    assert torch.bfloat16 not in library_from("avx2", tiles=False)
    few, many = (library_from("avx512", tiles=t)[torch.bfloat16] for t in (True, False))
    assert few < many == library_from("generic", tiles=False)[torch.float32]
