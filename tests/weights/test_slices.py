"""Slices of transformed parameters: by expert and by width, loaded and updated in place."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from anabranch.weights.load import load, update
from anabranch.weights.readers.safetensors import SafetensorsReader
from anabranch.weights.recipe import Param, Recipe, Source, Transform
from anabranch.weights.share import Alone

EXPERTS, INPUTS, WIDTH = 6, 20, 7
SHAPE = (EXPERTS, INPUTS, 2 * WIDTH)


def _zipped(start: int, stop: int, low: int, high: int) -> Source:
    """Experts [start, stop), gate and up columns [low, high), which alternate."""
    return Source("zipped", SHAPE, ((start, stop), (0, INPUTS), (2 * low, 2 * high)))


def _recipe(start: int, stop: int, low: int, high: int) -> Recipe:
    n, w = stop - start, high - low
    bias = Source("bias", (EXPERTS, 2 * WIDTH), ((start, stop), (2 * low, 2 * high)))
    both: tuple[Transform, ...] = ("unzip", "transpose")
    return (
        Param("plain", (n, INPUTS, 2 * w), (_zipped(start, stop, low, high),)),
        Param("gate_up", (n, 2 * w, INPUTS), (_zipped(start, stop, low, high),), transforms=both),
        Param("turned", (n, 2 * w, INPUTS), (_zipped(start, stop, low, high),),
              transforms=("transpose",)),
        Param("bias", (n, 2 * w), (bias,), transforms=("unzip",)),
        Param("flat", (INPUTS, 9), (Source("flat", (9, INPUTS)),), transforms=("transpose",)),
    )  # fmt: skip


def _tensors(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = {"zipped": SHAPE, "bias": (EXPERTS, 2 * WIDTH), "flat": (9, INPUTS)}
    return {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}


def _check(params: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor], *cut: int) -> None:
    start, stop, low, high = cut
    zipped = tensors["zipped"][start:stop, :, 2 * low : 2 * high]
    bias = tensors["bias"][start:stop, 2 * low : 2 * high]
    apart = torch.cat((zipped[..., 0::2], zipped[..., 1::2]), dim=-1)
    assert torch.equal(params["plain"], zipped)
    assert torch.equal(params["turned"], zipped.mT)
    assert torch.equal(params["gate_up"], apart.mT)
    assert torch.equal(params["bias"], torch.cat((bias[:, 0::2], bias[:, 1::2]), dim=-1))
    assert torch.equal(params["flat"], tensors["flat"].t())
    assert all(p.is_contiguous() for p in params.values())


@pytest.mark.parametrize("cut", [(0, 6, 0, 7), (2, 5, 0, 7), (0, 6, 3, 5), (5, 6, 6, 7)])
def test_transforms_of_slices(cut: tuple[int, int, int, int], tmp_path: Path) -> None:
    tensors = _tensors(0)
    save_file(tensors, tmp_path / "model.safetensors")
    recipe = _recipe(*cut)
    params = load([recipe], 0, SafetensorsReader(tmp_path), torch.float32, Alone())
    _check(params, tensors, *cut)
    views = {name: p[:, 1:] for name, p in params.items()}
    other = _tensors(1)
    update([recipe], 0, params, other, torch.float32, Alone())
    _check(params, other, *cut)
    assert all(torch.equal(views[name], params[name][:, 1:]) for name in params)


def test_equal_sources_with_other_transforms_are_other_memory(tmp_path: Path) -> None:
    save_file(_tensors(0), tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)
    params = load([_recipe(0, 6, 0, 7)], 0, reader, torch.float32, Alone())
    assert params["turned"].data_ptr() != params["gate_up"].data_ptr()
