"""GGUF: each type bit-equal to the gguf package, released names and rows, config; damaged files."""

import math
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from anabranch.core.arch import GQA
from anabranch.core.arch_reader import read_arch
from anabranch.weights.config import read_config
from anabranch.weights.gguf_file import GGUFFile
from anabranch.weights.gguf_names import released_config
from anabranch.weights.readers.gguf import GGUFReader
from anabranch.weights.recipe import Source

Kind = gguf.GGMLQuantizationType
HIDDEN, HEADS, KV_HEADS, DIM, FFN, VOCAB = 64, 4, 2, 16, 96, 1003


def _tensors(arch: str) -> dict[str, np.ndarray]:
    """A one-layer checkpoint under released names."""
    rng = np.random.default_rng(0)
    q, kv = HEADS * DIM, KV_HEADS * DIM
    layer = {
        "input_layernorm.weight": (HIDDEN,),
        "self_attn.q_proj.weight": (q, HIDDEN),
        "self_attn.k_proj.weight": (kv, HIDDEN),
        "self_attn.v_proj.weight": (kv, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, q),
        "post_attention_layernorm.weight": (HIDDEN,),
        "mlp.gate_proj.weight": (FFN, HIDDEN),
        "mlp.up_proj.weight": (FFN, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, FFN),
    }
    if arch != "qwen3":
        layer |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,)}
    else:
        layer |= {"self_attn.q_norm.weight": (DIM,), "self_attn.k_norm.weight": (DIM,)}
    shapes = {f"model.layers.0.{name}": shape for name, shape in layer.items()}
    shapes |= {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def _as_converted(name: str, value: np.ndarray) -> np.ndarray:
    """llama's q and k rows as its converter writes them: pairs (i, i + d/2) become neighbours."""
    heads = HEADS if ".q_proj." in name else KV_HEADS
    if ".q_proj." not in name and ".k_proj." not in name:
        return value
    halves = value.reshape(heads, 2, DIM // 2, *value.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))


def _write(
    path: Path, arch: str, kind: Kind, extra: dict[str, np.ndarray] | None = None, **values: object
) -> dict[str, torch.Tensor]:
    """Writes a file with matrices of `kind`; returns what each released tensor must read as."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_eos_token_id(2)
    writer.add_token_list(["<a>", "b", "ü"])
    for key, value in values.items():
        writer.add_key_value(key.replace("__", "."), value, gguf.GGUFValueType.get_type(value))
    table = gguf.get_tensor_name_map(
        next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == arch), 1
    )
    wanted = {}
    for name, value in _tensors(arch).items():
        target = table.get_name(name, try_suffixes=(".weight", ".bias"))
        stored = _as_converted(name, value) if arch == "llama" else value
        used = kind if value.ndim == 2 else Kind.F32
        packed = gguf.quants.quantize(stored, used)
        writer.add_tensor(target, packed, raw_dtype=used)
        numbers = gguf.quants.dequantize(packed, used)
        # quantisation never crosses rows, so undoing the row order gives what must be read
        order = _as_converted(name, np.arange(len(value), dtype=np.float32)).astype(int)
        back = np.argsort(order) if arch == "llama" else np.arange(len(value))
        wanted[name] = torch.from_numpy(numbers[back].copy())
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return wanted


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_tensors_are_bit_equal_under_released_names(tmp_path: Path, arch: str, kind: Kind) -> None:
    wanted = _write(tmp_path / "m.gguf", arch, kind)
    reader = GGUFReader(GGUFFile(tmp_path / "m.gguf"))
    assert set(reader.names()) == set(wanted)
    for name, value in wanted.items():
        shape = tuple(value.shape)
        got = reader.read(Source(name, shape))
        assert got.dtype == reader.dtype(name) and reader.shape(name) == shape
        assert torch.equal(got.float(), value), name
        if value.dim() == 2:  # a slice that cuts heads and quantisation blocks
            rows, cols = shape
            cut = Source(name, shape, ((rows // 3, rows - 1), (5, cols - 3)))
            assert torch.equal(reader.read(cut).float(), value[rows // 3 : rows - 1, 5 : cols - 3])


def test_other_types_go_through_the_package(tmp_path: Path) -> None:
    wanted = _write(tmp_path / "m.gguf", "qwen2", Kind.Q5_0)
    reader = GGUFReader(GGUFFile(tmp_path / "m.gguf"))
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(reader.read(Source(name, (FFN, HIDDEN))), wanted[name])


def test_plain_types_are_views_of_the_file(tmp_path: Path) -> None:
    _write(tmp_path / "m.gguf", "qwen2", Kind.BF16)
    reader = GGUFReader(GGUFFile(tmp_path / "m.gguf"))
    name = "model.layers.0.mlp.up_proj.weight"
    whole = reader.read(Source(name, (FFN, HIDDEN)))
    part = reader.read(Source(name, (FFN, HIDDEN), ((3, 5),)))
    assert part.data_ptr() == whole.data_ptr() + 3 * HIDDEN * 2


def test_config_feeds_read_arch(tmp_path: Path) -> None:
    _write(tmp_path / "m.gguf", "llama", Kind.Q4_1, tokenizer__ggml__eot_token_id=7)
    arch = read_arch(read_config(tmp_path / "m.gguf"))
    assert arch.family == "llama" and arch.attn == GQA(HEADS, KV_HEADS, DIM, 0.25, True, True)
    assert (arch.hidden, arch.layers, arch.vocab, arch.ffn_width) == (HIDDEN, 1, VOCAB, FFN)
    assert arch.tied and arch.eos_ids == (2, 7) and arch.dtype == "bfloat16"
    assert arch.max_len == 512 and arch.eps == pytest.approx(1e-5)
    for kind, dtype in (Kind.F32, "float32"), (Kind.F16, "float16"), (Kind.BF16, "bfloat16"):
        _write(tmp_path / "m.gguf", "qwen3", kind)
        arch = read_arch(read_config(tmp_path / "m.gguf"))
        assert arch.dtype == dtype and isinstance(arch.attn, GQA) and arch.attn.qk_norm


def test_rope_scaling(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 128}
    values = {f"qwen2__rope__scaling__{key}": value for key, value in scaling.items()}
    _write(tmp_path / "m.gguf", "qwen2", Kind.F32, **values)
    rope = read_arch(read_config(tmp_path / "m.gguf")).rope
    assert (rope.kind, rope.factor, rope.original_len) == ("yarn", 4.0, 128)
    _write(tmp_path / "m.gguf", "qwen2", Kind.F32, qwen2__rope__scaling__type="longrope")
    with pytest.raises(ValueError, match="longrope"):
        read_config(tmp_path / "m.gguf")


def _llama3_divisors(factor: float) -> np.ndarray:
    out = []
    for i in range(DIM // 2):
        wavelength = 2 * math.pi * 10000.0 ** (i / (DIM // 2))
        smooth = min(1.0, max(0.0, (8192 / wavelength - 1) / 3))
        out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, dtype=np.float32)


def test_llama3_rope_is_recovered_from_its_divisors(tmp_path: Path) -> None:
    divisors = _llama3_divisors(32.0)
    _write(tmp_path / "m.gguf", "llama", Kind.F32, {"rope_freqs.weight": divisors})
    rope = read_arch(read_config(tmp_path / "m.gguf")).rope
    assert (rope.kind, rope.original_len) == ("llama3", 8192)
    assert rope.factor == pytest.approx(float(divisors.max()))
    odd = np.linspace(1, 8, DIM // 2, dtype=np.float32)
    _write(tmp_path / "m.gguf", "llama", Kind.F32, {"rope_freqs.weight": odd})
    with pytest.raises(ValueError, match=r"rope_freqs\.weight divides"):
        read_config(tmp_path / "m.gguf")


def test_absent_tensor_wrong_shape_and_unknown_architecture(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    _write(path, "llama", Kind.F32)
    reader = GGUFReader(GGUFFile(path))
    with pytest.raises(ValueError, match=r"m\.gguf.*'lm_head\.weight' is absent"):
        reader.read(Source("lm_head.weight", (VOCAB, HIDDEN)))
    with pytest.raises(ValueError, match=r"has shape \[64\].*asks for \[65\]"):
        reader.read(Source("model.norm.weight", (65,)))
    _write(path, "llama", Kind.F32, llama__expert_count=8)
    with pytest.raises(ValueError, match="'llama' with 8 experts is not supported"):
        released_config(GGUFFile(path))
    writer = gguf.GGUFWriter(path, "gemma")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"'gemma'.*known.*llama, qwen2, qwen3"):
        released_config(GGUFFile(path))


def test_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    _write(path, "llama", Kind.Q4_0)
    whole = path.read_bytes()
    for keep in (0, 3, 10, 23, 100, 700, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:keep])
        with pytest.raises(ValueError, match=r"m\.gguf"):
            GGUFFile(path)
    for at, junk in ((0, b"GGML"), (4, b"\x01\x00\x00\x00"), (8, b"\xff" * 8), (16, b"\xff" * 8)):
        path.write_bytes(whole[:at] + junk + whole[at + len(junk) :])
        with pytest.raises(ValueError, match=r"m\.gguf"):
            GGUFFile(path)
    rng = np.random.default_rng(0)
    for _ in range(300):  # whatever a flipped byte of the header does, it is no crash
        spoilt = bytearray(whole)
        spoilt[int(rng.integers(0, 900))] = int(rng.integers(0, 256))
        path.write_bytes(spoilt)
        try:
            GGUFReader(GGUFFile(path))
        except ValueError:
            continue
