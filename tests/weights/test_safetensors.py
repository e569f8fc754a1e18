"""Safetensors: slices, shards, fp8 blocks, and every way a checkpoint can be damaged."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from anabranch.weights.readers.open import open_reader
from anabranch.weights.readers.safetensors import INDEX, SafetensorsReader
from anabranch.weights.recipe import Source


def _sharded(folder: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {f"t{i}": torch.randn(7 + i, 5) for i in range(6)} | {"scalar": torch.tensor(3.0)}
    placed = {}
    for shard in range(3):
        name = f"model-{shard}.safetensors"
        part = {k: v for n, (k, v) in enumerate(tensors.items()) if n % 3 == shard}
        save_file(part, folder / name)
        placed |= dict.fromkeys(part, name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return tensors


def test_sharded_slices_equal_the_tensors(tmp_path: Path) -> None:
    tensors = _sharded(tmp_path)
    reader = SafetensorsReader(tmp_path)
    assert sorted(reader.names()) == sorted(tensors)
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        assert reader.shape(name) == shape
        assert torch.equal(reader.read(Source(name, shape)), tensor)
    assert torch.equal(
        reader.read(Source("t3", (10, 5), ((2, 9), (1, 4)))), tensors["t3"][2:9, 1:4]
    )
    assert torch.equal(reader.read(Source("t3", (10, 5), ((4, 4),))), tensors["t3"][4:4])


def test_a_plain_slice_is_a_view_of_the_file(tmp_path: Path) -> None:
    _sharded(tmp_path)
    reader = SafetensorsReader(tmp_path)
    whole = reader.read(Source("t1", (8, 5)))
    part = reader.read(Source("t1", (8, 5), ((2, 5),)))
    assert part.data_ptr() == whole.data_ptr() + 2 * 5 * 4


def test_writing_to_a_view_leaves_the_file_alone(tmp_path: Path) -> None:
    tensors = _sharded(tmp_path)
    SafetensorsReader(tmp_path).read(Source("t0", (7, 5))).zero_()
    assert torch.equal(SafetensorsReader(tmp_path).read(Source("t0", (7, 5))), tensors["t0"])


@pytest.mark.parametrize("shape", [(300, 200), (128, 128), (129, 5), (1, 257), (256, 384)])
def test_fp8_blocks_any_slice_equals_the_dequantised(
    tmp_path: Path, shape: tuple[int, int]
) -> None:
    torch.manual_seed(1)
    rows, cols = shape
    weight = torch.randn(shape).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-rows // 128), -(-cols // 128)) + 0.5
    save_file({"w": weight, "w_scale_inv": scale}, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)
    assert list(reader.names()) == ["w"] and reader.dtype("w") == torch.float32
    wide = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]
    wanted = weight.float() * wide
    cuts = [
        (0, rows, 0, cols),
        (rows // 3, rows, cols // 4, cols),
        (rows // 2, rows // 2 + 1, 0, 1),
    ]
    cuts += [(min(127, rows - 1), min(129, rows), min(127, cols - 1), min(130, cols))]
    for top, bottom, left, right in cuts:
        got = reader.read(Source("w", shape, ((top, bottom), (left, right))))
        assert torch.equal(got, wanted[top:bottom, left:right])


def test_fp8_without_or_with_wrong_scales(tmp_path: Path) -> None:
    weight = torch.zeros(130, 4).to(torch.float8_e4m3fn)
    save_file({"w": weight}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"a\.safetensors.*'w'.*no 'w_scale_inv'"):
        SafetensorsReader(tmp_path / "a.safetensors").read(Source("w", (130, 4)))
    save_file({"w": weight, "w_scale_inv": torch.ones(1, 1)}, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=r"w_scale_inv' has shape \[1, 1\].*needs \[2, 1\]"):
        SafetensorsReader(tmp_path / "b.safetensors").read(Source("w", (130, 4)))


def test_absent_tensor_and_wrong_shape_are_named(tmp_path: Path) -> None:
    _sharded(tmp_path)
    reader = SafetensorsReader(tmp_path)
    with pytest.raises(ValueError, match=r"'nope' is absent among the 7 tensors"):
        reader.read(Source("nope", (1,)))
    with pytest.raises(ValueError, match=r"'t0' has shape \[7, 5\].*asks for \[7, 6\]"):
        reader.read(Source("t0", (7, 6)))


def test_missing_shard_is_named(tmp_path: Path) -> None:
    _sharded(tmp_path)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"1 of 3 checkpoint files are missing: model-1"):
        SafetensorsReader(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 60, -8])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    save_file({"w": torch.ones(64)}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors: truncated"):
        SafetensorsReader(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[]",
        b'{"w":{}}',
        b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
        b'{"w":{"dtype":"X9","shape":[2],"data_offsets":[0,8]}}',
        b'{"w":{"dtype":"F32","shape":[-1],"data_offsets":[0,-4]}}',
        b"\xff\xfe",
        b'{"w":{"dtype":"F32","shape":"ab","data_offsets":[0,8]}}',
        b'{"w":{"dtype":"F32","shape":"2","data_offsets":[0,8]}}',
        b'{"w":{"dtype":"F32","shape":[2.5],"data_offsets":[0,8]}}',
        b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,4,8]}}',
        b'{"w":{"dtype":["F32"],"shape":[2],"data_offsets":[0,8]}}',
        b'{"w":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}',
        b'{"w":' * 100_000,
    ],
    ids=range(14),
)
def test_damaged_header(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ValueError, match=r"model\.safetensors: "):
        SafetensorsReader(tmp_path)


@pytest.mark.parametrize(
    "content", [b"{}", b"\xff\xff", b"[]", b'{"weight_map":{"w":[]}}', b"[" * 100_000],
    ids=range(5),
)  # fmt: skip
def test_damaged_index(tmp_path: Path, content: bytes) -> None:
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json: "):
        SafetensorsReader(tmp_path)


def test_index_that_reaches_out(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": "../x.safetensors"}}))
    with pytest.raises(ValueError, match="outside its folder"):
        SafetensorsReader(tmp_path)


def test_pickles_are_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    with pytest.raises(ValueError, match=r"pickle checkpoints \(pytorch_model\.bin\).*runs code"):
        SafetensorsReader(tmp_path)
    with pytest.raises(ValueError, match="runs code"):
        open_reader(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="no such file"):
        SafetensorsReader(tmp_path / "nowhere")


def test_mxfp4_experts_equal_transformers(tmp_path: Path) -> None:
    torch.manual_seed(3)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 10, 4), dtype=torch.uint8)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {
        f"{name}_blocks": blocks,
        f"{name}_scales": scales,
        f"{name}_bias": torch.ones(3, 10),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    reader = open_reader(tmp_path)
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert sorted(reader.names()) == [name, f"{name}_bias"]
    assert reader.shape(name) == tuple(wanted.shape) == (3, 128, 10)
    assert torch.equal(reader.read(Source(name, (3, 128, 10))), wanted)
    cut = Source(name, (3, 128, 10), ((1, 3), (33, 100), (2, 9)))
    assert torch.equal(reader.read(cut), wanted[1:3, 33:100, 2:9])
    with pytest.raises(ValueError, match=r"has shape \[3, 128, 10\]"):
        reader.read(Source(name, (3, 128, 12)))

    packed = {part: tensors[part] for part in (f"{name}_blocks", f"{name}_scales")}
    given = reader.given()(packed)
    assert list(given.names()) == [name]
    assert torch.equal(given.read(Source(name, (3, 128, 10))), wanted)
    wrong = {
        "scales' is absent": {f"{name}_blocks": blocks},
        "scales' has shape": packed | {f"{name}_scales": scales[:2]},
        "blocks' is torch.float32": packed | {f"{name}_blocks": blocks.float()},
    }
    for message, part in wrong.items():
        with pytest.raises(ValueError, match=message):
            reader.given()(part).shape(name)
    assert list(reader.given()({f"{name}_scales": scales}).names()) == [f"{name}_scales"]


def test_deepseek_v4_saved_by_transformers_has_released_names(tmp_path: Path) -> None:
    saved = ["model.embed_tokens.weight", "model.layers.0.attn.norm.weight", "model.norm.weight",
             "model.hc_head.hc_base", "head.weight"]  # fmt: skip
    save_file(
        {n: torch.full((2,), float(i)) for i, n in enumerate(saved)}, tmp_path / "m.safetensors"
    )
    (tmp_path / "config.json").write_text('{"architectures": ["DeepseekV4ForCausalLM"]}')
    reader = open_reader(tmp_path)
    wanted = ["embed.weight", "layers.0.attn.kv_norm.weight", "norm.weight", "hc_head_base",
              "head.weight"]  # fmt: skip
    assert sorted(reader.names()) == sorted(wanted)
    for i, name in enumerate(wanted):
        assert reader.read(Source(name, (2,))).tolist() == [i, i]
    ones = torch.ones(2)
    given = reader.given()({"hc_head_base": ones, "model.layers.0.attn.norm.weight": ones})
    assert sorted(given.names()) == ["hc_head_base", "layers.0.attn.kv_norm.weight"]


@pytest.mark.parametrize(
    "quant",
    [
        {"quant_method": "awq"},
        {"quant_method": "fp8"},
        "gptq",
        {"quant_method": "fp8", "weight_block_size": [0, 1]},
    ],
)
def test_quantisations_that_are_not_read(tmp_path: Path, quant: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quant}))
    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="known: fp8 with weight_block_size"):
        open_reader(tmp_path)
