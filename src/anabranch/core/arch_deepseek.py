"""config.json of the DeepSeek families: V2, V3 (also R1 and Kimi-K2), V4 without compressors."""

import math
from typing import Literal, get_args

from anabranch.core.arch import MLA, Arch, Gate, Hyper, MoE, Rope, SharedKV
from anabranch.core.arch_shared import LAYER_SIZES, arch_of, rope_fields, rope_of, top_k_of
from anabranch.core.fields import Fields

Score = Literal["softmax", "sigmoid", "sqrtsoftplus"]
_SIZES = (
    *LAYER_SIZES,
    "intermediate_size",
    "max_position_embeddings",
    "q_lora_rank",
    "kv_lora_rank",
    "n_routed_experts",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)


def _mla(f: Fields) -> MLA:
    """Scale: (nope + rope)^-0.5, times yarn's mscale_all_dim factor squared (DeepSeek-V2)."""
    nope, rope = f.integer("qk_nope_head_dim"), f.integer("qk_rope_head_dim")
    r = rope_fields(f)
    scale = (nope + rope) ** -0.5
    all_dim = r.optional_number("mscale_all_dim")
    factor = r.number("factor", 1.0)
    if r.text("rope_type", r.text("type", "default")) != "default" and all_dim and factor > 1:
        scale *= (0.1 * all_dim * math.log(factor) + 1.0) ** 2
    return MLA(
        heads=f.integer("num_attention_heads"),
        q_lora=f.optional_integer("q_lora_rank"),
        kv_lora=f.integer("kv_lora_rank"),
        nope=nope,
        rope=rope,
        v=f.integer("v_head_dim"),
        scale=scale,
        bias=f.flag("attention_bias", False),
    )


def _deepseek_moe(f: Fields, method: str, score: str, renorm: bool) -> MoE | None:
    """Router and experts of DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437).

    moe_layer_freq counts from layer 0. V2's release scales weights only if it does not renormalise.
    """
    experts = f.optional_integer("n_routed_experts")
    if experts is None:
        return None
    method, score = f.text("topk_method", method), f.text("scoring_func", score)
    selects = {"greedy": "topk", "group_limited_greedy": "group_max", "noaux_tc": "group_top2"}
    if method not in selects:
        raise ValueError(f"topk_method {method!r} is not supported; known: {', '.join(selects)}")
    if score not in ("softmax", "sigmoid"):
        raise ValueError(f"scoring_func {score!r} is not supported; known: softmax, sigmoid")
    grouped = method != "greedy"
    groups = f.integer("n_group", 1) if grouped else 1
    top_groups = f.integer("topk_group", 1) if grouped else 1
    width = f.integer("moe_intermediate_size")
    top_k = top_k_of(f, experts)
    if experts % groups or not top_groups <= groups or top_k > experts // groups * top_groups:
        raise ValueError(
            f"n_routed_experts {experts} in n_group {groups} groups, topk_group {top_groups} and "
            f"num_experts_per_tok {top_k} do not fit together"
        )
    renorm = f.flag("norm_topk_prob", renorm)
    scaling = f.number("routed_scaling_factor", 2.5 if score == "sigmoid" else 1.0)
    freq = f.integer("moe_layer_freq", 1)
    return MoE(
        experts=experts,
        top_k=top_k,
        width=width,
        shared_width=width * (f.optional_integer("n_shared_experts", minimum=0) or 0),
        score="softmax" if score == "softmax" else "sigmoid",
        select="topk" if method == "greedy" else "group_max" if method[0] == "g" else "group_top2",
        groups=groups,
        top_groups=top_groups,
        correction_bias=method == "noaux_tc",
        renorm=renorm,
        scaling=1.0 if renorm and score == "softmax" else scaling,
        first_dense=f.integer("first_k_dense_replace", 0, minimum=0),
        dense_layers=tuple(n for n in range(f.integer("num_hidden_layers")) if n % freq),
    )


def _deepseek(f: Fields, family: str, method: str, score: str, renorm: bool) -> Arch:
    f.require(*_SIZES)
    if f.optional_integer("n_routed_experts"):
        f.require("moe_intermediate_size", "num_experts_per_tok")
    moe = _deepseek_moe(f, method, score, renorm)
    attn = _mla(f)
    interleaved = f.flag("rope_interleave", True)
    return arch_of(f, family, rope_of(f, attn.rope, interleaved=interleaved), attn, moe)


def deepseek_v2(f: Fields) -> Arch:
    return _deepseek(f, "deepseek_v2", "greedy", "softmax", renorm=False)


def deepseek_v3(f: Fields) -> Arch:
    return _deepseek(f, "deepseek_v3", "noaux_tc", "sigmoid", renorm=True)


_V4_SIZES = (
    *LAYER_SIZES,
    "max_position_embeddings",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
)


def deepseek_v4(f: Fields) -> Arch:
    """DeepSeek-V4 whose layers all attend a sliding window (compress_ratios all 0)."""
    f.require(*_V4_SIZES)
    layers = f.integer("num_hidden_layers")
    _no_compressors(f, layers)
    heads, head_dim, groups = (
        f.integer(name) for name in ("num_attention_heads", "head_dim", "o_groups")
    )
    if heads % groups:
        raise ValueError(f"num_attention_heads {heads} is not a multiple of o_groups {groups}")
    rotated = f.integer("qk_rope_head_dim", int(head_dim * _rotated_share(f)))
    attn = SharedKV(
        heads=heads,
        head_dim=head_dim,
        rope=rotated,
        q_lora=f.integer("q_lora_rank"),
        o_groups=groups,
        o_lora=f.integer("o_lora_rank"),
        scale=head_dim**-0.5,
        windows=(f.integer("sliding_window"),) * layers,
    )
    hyper = Hyper(
        f.integer("hc_mult", 4), f.integer("hc_sinkhorn_iters", 20), f.number("hc_eps", 1e-6)
    )
    main = (f.nested("rope_parameters") or f).nested("main") or f
    rope = Rope(rotated, main.number("rope_theta", 10000.0), interleaved=True)
    moe = _v4_moe(f, layers)
    return arch_of(f, "deepseek_v4", rope, attn, moe, hyper, width="moe_intermediate_size")


def _rotated_share(f: Fields) -> float:
    """Part of a head that is rotated: beside the other fields, or in rope_parameters.main."""
    main = (f.nested("rope_parameters") or f).nested("main") or f
    return main.number("partial_rotary_factor", f.number("partial_rotary_factor", 0.125))


def _no_compressors(f: Fields, layers: int) -> None:
    kinds = f.strings("layer_types")
    if kinds is None:  # the release lists ratios, also of layers that are not part of the model
        ratios = f.integers("compress_ratios")[:layers]
        kinds = tuple(f"ratio {ratio}" if ratio else "sliding_attention" for ratio in ratios)
    if len(kinds) != layers or set(kinds) != {"sliding_attention"}:
        raise ValueError(
            "DeepSeek-V4 with compressed attention is not supported: wanted compress_ratios all 0 "
            f"(layer_types all sliding_attention) for {layers} layers, found {list(kinds)}"
        )


def _v4_moe(f: Fields, layers: int) -> MoE:
    kinds = f.strings("mlp_layer_types")
    hashed = (
        f.integer("num_hash_layers", 3, minimum=0) if kinds is None else kinds.count("hash_moe")
    )
    if kinds is not None and kinds != ("hash_moe",) * hashed + ("moe",) * (layers - hashed):
        raise ValueError(
            f"mlp_layer_types: wanted hash_moe, then moe, for {layers} layers; found {list(kinds)}"
        )
    experts, width = f.integer("n_routed_experts"), f.integer("moe_intermediate_size")
    scores: dict[str, Score] = {n: n for n in get_args(Score)}
    score = f.text("scoring_func", "sqrtsoftplus")
    if score not in scores:
        raise ValueError(f"scoring_func {score!r} is not supported; known: {', '.join(scores)}")
    return MoE(
        experts=experts,
        top_k=top_k_of(f, experts),
        width=width,
        shared_width=width * (f.optional_integer("n_shared_experts", minimum=0) or 0),
        score=scores[score],
        correction_bias=True,
        renorm=f.flag("norm_topk_prob", True),
        scaling=f.number("routed_scaling_factor", 1.5),
        gate=Gate(f.number("swiglu_limit", 10.0)),
        hash_layers=min(hashed, layers),
    )
