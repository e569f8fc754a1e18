"""Quantised matrices: a legal slice equals the slice of the dequantised, and is a view (T2, T3)."""

from typing import get_args

import pytest
import torch

from anabranch.nn.linear import Dense, Linear
from anabranch.nn.quantised import QuantDense
from anabranch.weights.quantised import SCHEMES, QuantWeight, SchemeName, quantise

NAMES = get_args(SchemeName)
SHAPES = [(300, 224), (128, 128), (129, 32), (5, 288), (257, 160)]


def _weight(shape: tuple[int, int]) -> torch.Tensor:
    g = torch.Generator().manual_seed(shape[0])
    # rows and columns of very different size, so that a wrong scale shows
    sizes = torch.rand(shape[0], 1, generator=g) + 0.1, torch.rand(1, shape[1], generator=g) + 0.1
    return torch.randn(shape, generator=g) * sizes[0] * sizes[1]


def _bounds(size: int, step: int) -> list[tuple[int, int]]:
    """Slices at block borders, inside blocks, across several, empty and whole."""
    raw = [(0, size), (0, size // 2), (size // 3, size), (size // 4, size // 2 + 1), (4, 4)]
    raw += [(0, min(128, size)), (min(32, size), min(96, size)), (min(127, size - 1), size)]
    return sorted({(a // step * step, max(a // step, b // step) * step) for a, b in raw})


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_every_slice_equals_the_slice_of_the_dequantised(
    name: SchemeName, shape: tuple[int, int]
) -> None:
    packed = quantise(_weight(shape), name)
    whole = packed.dequantise()
    assert packed.shape == shape == tuple(whole.shape)
    for top, bottom in _bounds(shape[0], 1):
        rows = packed.rows(top, bottom)
        assert torch.equal(rows.dequantise(), whole[top:bottom])
        for left, right in _bounds(shape[1], SCHEMES[name].per_byte):
            cut = rows.columns(left, right)
            assert torch.equal(cut.dequantise(), whole[top:bottom, left:right])
            swapped = packed.columns(left, right).rows(top, bottom)
            assert torch.equal(swapped.dequantise(), cut.dequantise())


@pytest.mark.parametrize("name", NAMES)
def test_a_slice_of_a_slice(name: SchemeName) -> None:
    packed = quantise(_weight((300, 224)), name)
    whole = packed.dequantise()
    inner = packed.rows(50, 290).columns(30, 220).rows(90, 200).columns(100, 190)
    assert torch.equal(inner.dequantise(), whole[140:250, 130:220])


@pytest.mark.parametrize("name", NAMES)
def test_slices_are_views(name: SchemeName) -> None:
    packed = quantise(_weight((300, 224)), name)
    cut = packed.rows(130, 290).columns(32, 224)
    parts = [(packed.packed, cut.packed), (packed.scale, cut.scale)]
    if packed.low is not None and cut.low is not None:
        parts.append((packed.low, cut.low))
    for whole, part in parts:
        assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", NAMES)
def test_linear_and_its_slices(name: SchemeName) -> None:
    weight = quantise(_weight((300, 224)), name)
    bias = torch.randn(300, generator=torch.Generator().manual_seed(0))
    made: Linear = QuantDense(weight, bias)
    plain: Linear = Dense(weight.dequantise(), bias)
    x = torch.randn(7, 224, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(made(x), plain(x))
    torch.testing.assert_close(made.rows(100, 200)(x), plain(x)[:, 100:200])
    halves = [made.columns(0, 96)(x[:, :96]), made.columns(96, 224)(x[:, 96:])]
    torch.testing.assert_close(halves[0] + halves[1] + bias, plain(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "error"),
    [("fp8_block", 0.07), ("fp8_tensor", 0.07), ("int8_channel", 0.02), ("int4_group", 0.15)],
)
def test_rounding_error_is_that_of_the_format(name: SchemeName, error: float) -> None:
    weight = _weight((300, 224))
    off = quantise(weight, name).dequantise() - weight
    assert float(off.norm() / weight.norm()) < error


def test_int4_columns_that_cut_a_byte_or_group_are_refused_with_numbers() -> None:
    packed = quantise(_weight((10, 64)), "int4_group")
    with pytest.raises(ValueError, match=r"\[3, 64\) cut a byte that holds 2.*\[2, 64\)"):
        packed.columns(3, 64)
    with pytest.raises(ValueError, match="50 columns are not a multiple of its group of 32"):
        quantise(_weight((10, 50)), "int4_group")


def test_bounds_and_scales_that_do_not_fit() -> None:
    packed = quantise(_weight((300, 224)), "fp8_block")
    with pytest.raises(ValueError, match=r"rows \[0, 301\) are outside 0\.\.300"):
        packed.rows(0, 301)
    with pytest.raises(ValueError, match=r"300 rows in blocks of 128 need 3 scales, found 2"):
        QuantWeight(packed.scheme, packed.packed, packed.scale[:2])


def test_packed_weights_are_no_tensors() -> None:
    assert not isinstance(quantise(_weight((10, 64)), "int8_channel"), torch.Tensor)
    assert quantise(_weight((256, 64)), "int4_group").nbytes < 256 * 64  # 4 bits + 8 bytes per 32
