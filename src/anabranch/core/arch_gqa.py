"""config.json of families with grouped-query attention: Llama, Mistral, Qwen, gpt-oss."""

from dataclasses import replace

from anabranch.core.arch import Arch, Gate, MoE
from anabranch.core.arch_shared import (
    LAYER_SIZES,
    arch_of,
    gqa_of,
    rope_of,
    top_k_of,
    typed_windows,
    windows_of,
)
from anabranch.core.fields import Fields


def llama(f: Fields) -> Arch:
    f.require(*LAYER_SIZES, "intermediate_size", "max_position_embeddings")
    bias = f.flag("attention_bias", False)
    attn = gqa_of(f, qkv_bias=bias, o_bias=bias)
    return arch_of(f, "llama", rope_of(f, attn.head_dim), attn)


def mistral(f: Fields) -> Arch:
    f.require(*LAYER_SIZES, "intermediate_size", "max_position_embeddings")
    attn = gqa_of(f, windows=windows_of(f, f.integer("num_hidden_layers"), every_layer=True))
    return arch_of(f, "mistral", rope_of(f, attn.head_dim), attn)


def qwen2(f: Fields) -> Arch:
    f.require(*LAYER_SIZES, "intermediate_size", "max_position_embeddings")
    windows = windows_of(f, f.integer("num_hidden_layers"), every_layer=False)
    attn = gqa_of(f, qkv_bias=True, windows=windows)
    return arch_of(f, "qwen2", rope_of(f, attn.head_dim), attn)


def qwen3(f: Fields) -> Arch:
    f.require(*LAYER_SIZES, "intermediate_size", "max_position_embeddings")
    bias = f.flag("attention_bias", False)
    windows = windows_of(f, f.integer("num_hidden_layers"), every_layer=False)
    attn = gqa_of(f, bias, bias, qk_norm=True, head_dim=128, windows=windows)
    return arch_of(f, "qwen3", rope_of(f, attn.head_dim), attn)


def qwen3_moe(f: Fields) -> Arch:
    f.require(
        *LAYER_SIZES,
        "intermediate_size",
        "max_position_embeddings",
        "moe_intermediate_size",
        "num_experts_per_tok",
    )
    layers = f.integer("num_hidden_layers")
    bias = f.flag("attention_bias", False)
    window = f.optional_integer("sliding_window") if f.flag("use_sliding_window", False) else None
    windows = (window,) * layers if window else ()
    attn = gqa_of(f, bias, bias, qk_norm=True, windows=windows)
    step = f.integer("decoder_sparse_step", 1)
    dense = set(f.integers("mlp_only_layers")) | {n for n in range(layers) if (n + 1) % step}
    # transformers 5 writes the released num_experts as num_local_experts
    experts = f.integer("num_experts", f.integer("num_local_experts", 128))
    moe = MoE(
        experts=experts,
        top_k=top_k_of(f, experts),
        width=f.integer("moe_intermediate_size"),
        renorm=f.flag("norm_topk_prob", False),
        dense_layers=tuple(sorted(dense)),
    )
    return arch_of(f, "qwen3_moe", rope_of(f, attn.head_dim), attn, moe)


def gpt_oss(f: Fields) -> Arch:
    """Sinks, biases everywhere, alternating windows; experts with a clamped gate and biases."""
    f.require(
        *LAYER_SIZES,
        "intermediate_size",
        "max_position_embeddings",
        "num_experts_per_tok",
        "num_local_experts",
        "sliding_window",
    )
    if not f.has("rope_parameters"):
        f.require("rope_scaling")
    bias = f.flag("attention_bias", True)
    windows = typed_windows(f, f.integer("sliding_window"))
    attn = replace(gqa_of(f, bias, bias, head_dim=64, windows=windows), sinks=True)
    experts = f.integer("num_local_experts")
    moe = MoE(
        experts=experts,
        top_k=top_k_of(f, experts),
        width=f.integer("intermediate_size"),
        renorm=True,  # the softmax runs over the chosen experts, which is the same
        gate=Gate(f.number("swiglu_limit", 7.0), f.number("swiglu_alpha", 1.702), shift=1.0),
        bias=True,
    )
    return arch_of(f, "gpt_oss", rope_of(f, attn.head_dim, theta=150000.0), attn, moe)
