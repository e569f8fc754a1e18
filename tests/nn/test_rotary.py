"""Rotary tables equal transformers' for every kind of scaling, and rotations are what they say."""

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from anabranch.core.arch import Rope
from anabranch.core.arch_reader import read_arch
from anabranch.nn.rotary import Angles, Rotary

LENGTH = 3000
CPU = torch.device("cpu")
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
SCALINGS = {
    "plain": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
    "yarn": YARN,
    "yarn, not truncated": YARN | {"truncate": False},
    "yarn, mscales": YARN
    | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707, "beta_fast": 16, "beta_slow": 2},
    "yarn, given factor": YARN | {"attention_factor": 1.25},
}


@pytest.mark.parametrize("name", SCALINGS)
def test_tables_equal_transformers(name: str) -> None:
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        rope_theta=50000.0,
        rope_scaling=SCALINGS[name],
        max_position_embeddings=4096,
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(LENGTH)[None])
    rope = read_arch(config.to_dict() | {"architectures": ["LlamaForCausalLM"]}).rope
    table = Rotary(rope, LENGTH, CPU)
    # an ulp in a frequency is 4e-4 in the angle at the last position
    torch.testing.assert_close(table.cos, cos[0, :, :32], atol=4e-4, rtol=0)
    torch.testing.assert_close(table.sin, sin[0, :, :32], atol=4e-4, rtol=0)


def test_dynamic_is_plain_up_to_its_length_and_transformers_beyond() -> None:
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        rope_scaling={"rope_type": "dynamic", "factor": 2.0},
        max_position_embeddings=100,
    )
    rope = read_arch(config.to_dict() | {"architectures": ["LlamaForCausalLM"]}).rope
    table, plain = Rotary(rope, 200, CPU), Rotary(Rope(16), 200, CPU)
    assert torch.equal(table.cos[:100], plain.cos[:100])
    for position in (100, 150, 199):  # a token decoded at this position, in transformers
        inverse, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=position + 1)
        torch.testing.assert_close(table.cos[position], (position * inverse).cos())


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_turns_pairs_and_back(interleaved: bool) -> None:
    angle = torch.tensor([[[0.3, 1.2]]])
    angles = Angles(angle.cos(), angle.sin(), interleaved)
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    pairs = [(0, 1), (2, 3)] if interleaved else [(0, 2), (1, 3)]
    turned = angles.rotate(x)[0, 0]
    for (a, b), turn in zip(pairs, angle[0, 0], strict=True):
        before = torch.complex(x[0, 0, a], x[0, 0, b])
        after = before * torch.polar(torch.tensor(1.0), turn)
        torch.testing.assert_close(torch.complex(turned[a], turned[b]), after)
    torch.testing.assert_close(angles.inverse().rotate(turned[None, None]), x)
