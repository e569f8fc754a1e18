"""read_arch: both forms of config.json, every family, and bad fields named."""

import json
import math
from typing import Any

import pytest
import transformers

from anabranch.core.arch import GQA, MLA, Gate, Hyper, Rope, SharedKV
from anabranch.core.arch_reader import read_arch

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1003,
    "hidden_size": 96,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "float32",
    "eos_token_id": [2, 7],
}
V3: dict[str, Any] = {  # DeepSeek-V3's released config.json, as far as it matters
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
    "eos_token_id": 1,
}


def test_llama() -> None:
    arch = read_arch(LLAMA)
    assert arch.attn == GQA(24, 8, 4, 0.5) and arch.rope == Rope(4, 500000.0)
    assert (arch.eps, arch.dtype, arch.eos_ids, arch.tied) == (1e-5, "float32", (2, 7), False)
    ends: tuple[tuple[object, tuple[int, ...]], ...] = ((1003, ()), ([-1, 2, 10**9], (2,)))
    for listed, kept in ends:  # ids that the head has no row for are never drawn
        assert read_arch(LLAMA | {"eos_token_id": listed}).eos_ids == kept
    wide = read_arch(LLAMA | {"head_dim": 16, "attention_bias": True, "mlp_bias": True})
    assert isinstance(wide.attn, GQA) and wide.attn.head_dim == 16 and wide.attn.scale == 0.25
    assert wide.attn.qkv_bias and wide.attn.o_bias and wide.mlp_bias


def test_deepseek_v3_released() -> None:
    arch = read_arch(V3)
    attn, moe = arch.attn, arch.moe
    assert isinstance(attn, MLA) and moe is not None
    assert attn.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert arch.rope == Rope(
        64, 10000.0, "yarn", True, 40.0, original_len=4096, mscale=1.0, mscale_all_dim=1.0
    )
    assert (moe.score, moe.select, moe.groups, moe.top_groups) == ("sigmoid", "group_top2", 8, 4)
    assert moe.correction_bias and moe.renorm and moe.scaling == 2.5 and moe.shared_width == 2048
    assert [layer for layer in range(61) if not moe.is_moe(layer)] == [0, 1, 2]
    assert arch.entry_width == 576 and arch.kv_heads == 1


def test_kimi_k2_is_deepseek_v3s_architecture() -> None:
    changed = {"model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "n_routed_experts": 384}
    arch = read_arch(V3 | changed)
    assert arch.family == "deepseek_v3" and arch.moe is not None and arch.moe.groups == 1
    del changed["model_type"]
    bare = {k: v for k, v in (V3 | changed).items() if k != "architectures"}
    assert read_arch(bare | {"model_type": "kimi_k2"}) == arch


def test_deepseek_v2_lite_and_its_routers() -> None:
    lite = V3 | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "q_lora_rank": None,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 2,
        "num_hidden_layers": 6,
        "rope_scaling": V3["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
    }
    arch = read_arch(lite)
    assert isinstance(arch.attn, MLA) and arch.attn.q_lora is None and arch.moe is not None
    assert arch.moe.select == "topk" and not arch.moe.correction_bias and not arch.moe.renorm
    assert arch.moe.shared_width == 4096
    assert [n for n in range(6) if arch.moe.is_moe(n)] == [2, 4]  # the grid counts from layer 0
    grouped = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
    moe = read_arch(lite | grouped | {"routed_scaling_factor": 16.0}).moe
    assert moe is not None and (moe.select, moe.groups, moe.top_groups) == ("group_max", 8, 3)
    assert moe.scaling == 16.0
    dense = read_arch(lite | {"n_routed_experts": None})
    assert dense.moe is None


def test_qwen() -> None:
    two = read_arch(LLAMA | {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False,
                             "sliding_window": 128})  # fmt: skip
    assert isinstance(two.attn, GQA) and two.attn.qkv_bias and not two.attn.o_bias
    assert two.attn.windows == () and not two.attn.qk_norm
    window = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    windowed = read_arch(LLAMA | {"architectures": ["Qwen2ForCausalLM"]} | window)
    assert isinstance(windowed.attn, GQA) and windowed.attn.windows == (None, 20)
    typed = {"layer_types": ["sliding_attention", "full_attention"]}
    flipped = read_arch(LLAMA | {"architectures": ["Qwen2ForCausalLM"]} | window | typed)
    assert isinstance(flipped.attn, GQA) and flipped.attn.windows == (20, None)
    three = read_arch(LLAMA | {"architectures": ["Qwen3ForCausalLM"]})
    assert isinstance(three.attn, GQA) and three.attn.qk_norm and three.attn.head_dim == 128


def test_qwen3_moe_layers() -> None:
    config = LLAMA | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": 6,
        "num_experts": 10,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 28,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    }
    moe = read_arch(config).moe
    assert moe is not None and moe.renorm and moe.score == "softmax" and moe.select == "topk"
    assert [n for n in range(6) if moe.is_moe(n)] == [1, 5]


@pytest.mark.parametrize("name", ["num_hidden_layers", "n_routed_experts"])
def test_layers_and_experts_have_a_most(name: str) -> None:
    with pytest.raises(ValueError, match=r"at most 4096 .*, found 4097"):
        read_arch(V3 | {name: 4097, "n_group": 1, "topk_group": 1})


def test_mistral_windows() -> None:
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"]}
    for given, wanted in ({"sliding_window": 30}, (30, 30)), ({"sliding_window": None}, ()):
        attn = read_arch(mistral | given).attn
        assert isinstance(attn, GQA) and attn.windows == wanted


@pytest.mark.parametrize(
    ("scaling", "wanted"),
    [
        (None, Rope(4, 5e5)),
        ({"type": "linear", "factor": 4}, Rope(4, 5e5, "linear", factor=4.0)),
        ({"type": "dynamic", "factor": 4}, Rope(4, 5e5, "dynamic", factor=4.0, original_len=512)),
        (
            {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
             "original_max_position_embeddings": 128},
            Rope(4, 5e5, "llama3", factor=8.0, original_len=128),
        ),
        (
            {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 128,
             "truncate": False, "attention_factor": 1.5},
            Rope(4, 5e5, "yarn", factor=4.0, original_len=128, truncate=False,
                 attention_factor=1.5),
        ),
        (  # without a factor, the ratio of the lengths
            {"type": "yarn", "original_max_position_embeddings": 128},
            Rope(4, 5e5, "yarn", factor=4.0, original_len=128),
        ),
    ],
)  # fmt: skip
def test_rope_in_both_forms(scaling: dict[str, object] | None, wanted: Rope) -> None:
    assert read_arch(LLAMA | {"rope_scaling": scaling}).rope == wanted
    new = {k: v for k, v in LLAMA.items() if k not in ("rope_theta", "torch_dtype")}
    spelt = dict(scaling or {})
    spelt["rope_type"] = spelt.pop("type", spelt.get("rope_type", "default"))
    new |= {"rope_parameters": spelt | {"rope_theta": 5e5}, "dtype": "float32"}
    assert read_arch(new) == read_arch(LLAMA | {"rope_scaling": scaling})


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "DeepseekV3"])
def test_defaults_are_those_of_the_published_configuration(name: str) -> None:
    config = getattr(transformers, f"{name}Config")()
    full = json.loads(config.to_json_string()) | {"architectures": [f"{name}ForCausalLM"]}
    arch = read_arch(full)
    assert arch.hidden == config.hidden_size and arch.heads == config.num_attention_heads
    assert arch.eps == config.rms_norm_eps and arch.rope.theta == 10000.0
    optional = ("rms_norm_eps", "tie_word_embeddings", "attention_bias", "mlp_bias",
                "sliding_window", "use_sliding_window", "decoder_sparse_step", "norm_topk_prob",
                "rope_interleave", "hidden_act", "layer_types", "num_key_value_heads")  # fmt: skip
    keep = {k: v for k, v in full.items() if k not in optional}
    if name == "Mistral":
        keep["num_key_value_heads"] = 8
    if name == "Qwen3Moe":
        keep["num_key_value_heads"] = 4
    assert read_arch(keep) == arch


def test_unknown_architecture_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"\['GemmaForCausalLM'\].*known.*Deepseek.*LlamaForC"):
        read_arch(LLAMA | {"architectures": ["GemmaForCausalLM"]})
    with pytest.raises(ValueError, match="known"):
        read_arch({})


def test_absent_fields_are_listed_together() -> None:
    poor = {k: v for k, v in V3.items() if k not in ("hidden_size", "kv_lora_rank", "v_head_dim")}
    with pytest.raises(ValueError, match="absent: hidden_size, kv_lora_rank, v_head_dim"):
        read_arch(poor)


@pytest.mark.parametrize("value", ["x", [], True, -1, 0, 1.5, 1e39, math.nan, math.inf, 2**63, {}])
@pytest.mark.parametrize("name", ["hidden_size", "num_attention_heads", "num_key_value_heads"])
def test_wrong_sizes_are_named(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{name}: wanted an integer"):
        read_arch(LLAMA | {name: value})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps: wanted a number"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps: wanted a finite"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: wanted true or false"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"torch_dtype": "int8"}, "dtype 'int8'"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type 'longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8}}, "rope_scaling.low_freq_factor"),
        ({"rope_scaling": 8}, "rope_scaling: wanted an object"),
        ({"num_key_value_heads": 5}, "24 is not a multiple of num_key_value_heads 5"),
        ({"num_attention_heads": 20, "num_key_value_heads": 4}, "hidden_size 96 is not a multiple"),
        ({"head_dim": 3}, "even head dim, got 3"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ],
)
def test_bad_fields_are_named(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_arch(LLAMA | change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"topk_method": "best"}, "topk_method 'best'"),
        ({"scoring_func": "relu"}, "scoring_func 'relu'"),
        ({"num_experts_per_tok": 300}, "300 is more than the 256"),
        ({"n_group": 7}, "n_group 7"),
        ({"topk_group": 9}, "topk_group 9"),
    ],
)
def test_bad_routers_are_named(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_arch(V3 | change)


GPT_OSS: dict[str, Any] = LLAMA | {  # gpt-oss's released config.json, as far as it matters
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "head_dim": 64,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "rope_theta": 150000,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
}
V4: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "compress_ratios": [0, 0, 4],  # the third is of a prediction layer
    "num_hash_layers": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "max_position_embeddings": 65536,
    "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 16},  # of compressed layers only
}


def test_gpt_oss() -> None:
    arch = read_arch(GPT_OSS)
    assert isinstance(arch.attn, GQA) and arch.attn.sinks and arch.attn.o_bias
    assert arch.attn.windows == (128, None) and arch.windows == (128,)
    assert arch.moe is not None and arch.moe.bias and arch.moe.renorm
    assert arch.moe.gate == Gate(7.0, 1.702, 1.0)
    assert arch.rope.kind == "yarn" and not arch.rope.truncate
    typeless = {k: v for k, v in GPT_OSS.items() if k != "layer_types"}
    assert read_arch(typeless) == arch
    with pytest.raises(ValueError, match="layer_types: wanted 2"):
        read_arch(GPT_OSS | {"layer_types": ["full_attention"]})


def test_deepseek_v4_in_both_forms() -> None:
    arch = read_arch(V4)
    assert arch.attn == SharedKV(64, 512, 64, 1024, 8, 1024, 512**-0.5, (128, 128))
    assert arch.hyper == Hyper(4, 20, 1e-6) and arch.rope == Rope(64, interleaved=True)
    moe = arch.moe
    assert moe is not None and (moe.score, moe.hash_layers) == ("sqrtsoftplus", 1)
    assert moe.correction_bias and moe.renorm and moe.gate == Gate(10.0)
    new = {k: v for k, v in V4.items() if k not in ("compress_ratios", "num_hash_layers")}
    new = {k: v for k, v in new.items() if k not in ("rope_theta", "rope_scaling")}
    del new["qk_rope_head_dim"]
    main = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.125}
    new |= {
        "layer_types": ["sliding_attention"] * 2,
        "mlp_layer_types": ["hash_moe", "moe"],
        "rope_parameters": {"main": main, "compress": main | {"rope_theta": 160000.0}},
    }
    assert read_arch(new) == arch


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"compress_ratios": [0, 4]}, "compressed attention is not supported.*ratio 4"),
        ({"compress_ratios": [0]}, "for 2 layers"),
        ({"o_groups": 7}, "64 is not a multiple of o_groups 7"),
        ({"mlp_layer_types": ["moe", "hash_moe"]}, "wanted hash_moe, then moe"),
        ({"scoring_func": "relu"}, "scoring_func 'relu'"),
        ({"mlp_bias": True}, "mlp_bias is not supported by deepseek_v4"),
    ],
)
def test_bad_v4_fields_are_named(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_arch(V4 | change)
