"""From a checkpoint's config.json to `Arch`: the one place that knows how families spell facts.

Reads the released form (rope_scaling, rope_theta, torch_dtype) and transformers 5's
(rope_parameters, dtype). Knows nothing of tensors, files or ranks. A field that is absent takes the
default of the family's published configuration class; a size without a sensible one is required.
"""

import math
from collections.abc import Callable, Mapping

from anabranch.core.arch import GQA, MLA, Arch, MoE, Rope
from anabranch.core.fields import Fields

_LAYER_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_DTYPES = ("bfloat16", "float16", "float32")
_ROPE_KINDS = {
    "default": "plain",
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
    "yarn": "yarn",
    "deepseek_yarn": "yarn",
}


def read_arch(config: Mapping[str, object]) -> Arch:
    """The facts of a model from its parsed config.json.

    ValueError names every absent required field, a field of the wrong type or out of range, or, for
    an unknown architecture, the known ones.
    """
    names = config.get("architectures") or ()
    listed = [str(n) for n in names] if isinstance(names, list | tuple) else [str(names)]
    model_type = str(config.get("model_type", ""))
    for name in listed:
        if name in _READERS:
            return _READERS[name](Fields(config))
    if not listed and model_type in _MODEL_TYPES:
        return _READERS[_MODEL_TYPES[model_type]](Fields(config))
    raise ValueError(
        f"unknown architecture {listed or None} (model_type {model_type!r}); known architectures: "
        + ", ".join(sorted(_READERS))
    )


def _rope_fields(f: Fields) -> Fields:
    """rope_parameters (transformers 5) or rope_scaling (released); empty when the rope is plain."""
    return f.nested("rope_parameters") or f.nested("rope_scaling") or Fields({}, "rope_scaling")


def _rope(f: Fields, dim: int, theta: float = 10000.0, interleaved: bool = False) -> Rope:
    """Rotary facts. Defaults as arXiv 2309.00071 and the Llama 3.1 release give them."""
    r = _rope_fields(f)
    theta = r.number("rope_theta", f.number("rope_theta", theta))
    kind = r.text("rope_type", r.text("type", "default"))
    if kind not in _ROPE_KINDS:
        raise ValueError(f"rope_type {kind!r} is not supported; known: {', '.join(_ROPE_KINDS)}")
    if dim % 2:
        raise ValueError(f"rotary embedding needs an even head dim, got {dim}")
    partial = r.number("partial_rotary_factor", f.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ValueError(f"partial_rotary_factor {partial} is not supported here; wanted 1.0")
    plain = Rope(dim=dim, theta=theta, interleaved=interleaved)
    if kind == "default":
        return plain
    max_len = f.integer("max_position_embeddings")
    original = f.integer(
        "original_max_position_embeddings", r.integer("original_max_position_embeddings", max_len)
    )
    factor = r.number("factor", max_len / original) if kind == "yarn" else r.number("factor")
    if kind == "linear":
        return Rope(dim, theta, "linear", interleaved, factor)
    if kind == "dynamic":
        return Rope(dim, theta, "dynamic", interleaved, factor, original_len=max_len)
    if kind == "llama3":
        return Rope(
            dim,
            theta,
            "llama3",
            interleaved,
            factor,
            low_freq_factor=r.number("low_freq_factor"),
            high_freq_factor=r.number("high_freq_factor"),
            original_len=original,
        )
    return Rope(
        dim,
        theta,
        "yarn",
        interleaved,
        factor,
        original_len=original,
        beta_fast=r.number("beta_fast", 32.0),
        beta_slow=r.number("beta_slow", 1.0),
        mscale=r.optional_number("mscale"),
        mscale_all_dim=r.optional_number("mscale_all_dim"),
        attention_factor=r.optional_number("attention_factor"),
        truncate=r.flag("truncate", True),
    )


def _windows(f: Fields, layers: int, every_layer: bool) -> tuple[int | None, ...]:
    """Visible positions per layer, () when no layer has a window.

    every_layer: the window, if set, holds everywhere (Mistral); otherwise use_sliding_window
    switches it on for the layers from max_window_layers on, or as layer_types says (Qwen).
    """
    if every_layer:
        window = f.optional_integer("sliding_window") if f.has("sliding_window") else 4096
        return (window,) * layers if window else ()
    window = f.optional_integer("sliding_window") if f.flag("use_sliding_window", False) else None
    if window is None:
        return ()
    kinds = f.strings("layer_types")
    if kinds is None:
        first = f.integer("max_window_layers", 28, minimum=0)
        return tuple(window if layer >= first else None for layer in range(layers))
    if len(kinds) != layers or set(kinds) - {"sliding_attention", "full_attention"}:
        raise ValueError(
            f"layer_types: wanted {layers} of sliding_attention or full_attention, "
            f"found {len(kinds)}: {sorted(set(kinds))}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _gqa(
    f: Fields,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: bool = False,
    head_dim: int | None = None,
    windows: tuple[int | None, ...] = (),
) -> GQA:
    heads = f.integer("num_attention_heads")
    kv_heads = f.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    hidden = f.integer("hidden_size")
    dim = f.optional_integer("head_dim") or head_dim
    if dim is None and hidden % heads:
        raise ValueError(
            f"head_dim is absent and hidden_size {hidden} is not a multiple of the {heads} heads"
        )
    dim = dim or hidden // heads
    return GQA(heads, kv_heads, dim, dim**-0.5, qkv_bias, o_bias, qk_norm, windows=windows)


def _arch(f: Fields, family: str, rope: Rope, attn: GQA | MLA, moe: MoE | None = None) -> Arch:
    """What every family shares."""
    act = f.text("hidden_act", "silu")
    if act != "silu":
        raise ValueError(f"hidden_act {act!r} is not supported by {family}; wanted 'silu'")
    dtype = f.text("dtype", f.text("torch_dtype", "bfloat16"))
    if dtype not in _DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; known: {', '.join(_DTYPES)}")
    return Arch(
        family=family,
        hidden=f.integer("hidden_size"),
        layers=f.integer("num_hidden_layers"),
        vocab=f.integer("vocab_size"),
        ffn_width=f.integer("intermediate_size"),
        eps=f.number("rms_norm_eps", 1e-6),
        rope=rope,
        attn=attn,
        moe=moe,
        tied=f.flag("tie_word_embeddings", False),
        mlp_bias=f.flag("mlp_bias", False) if family in ("llama", "deepseek_v2") else False,
        max_len=f.integer("max_position_embeddings"),
        dtype=dtype,
        eos_ids=f.integers("eos_token_id"),
    )


def _llama(f: Fields) -> Arch:
    f.require(*_LAYER_SIZES, "intermediate_size", "max_position_embeddings")
    bias = f.flag("attention_bias", False)
    attn = _gqa(f, qkv_bias=bias, o_bias=bias)
    return _arch(f, "llama", _rope(f, attn.head_dim), attn)


def _mistral(f: Fields) -> Arch:
    f.require(*_LAYER_SIZES, "intermediate_size", "max_position_embeddings")
    attn = _gqa(f, windows=_windows(f, f.integer("num_hidden_layers"), every_layer=True))
    return _arch(f, "mistral", _rope(f, attn.head_dim), attn)


def _qwen2(f: Fields) -> Arch:
    f.require(*_LAYER_SIZES, "intermediate_size", "max_position_embeddings")
    windows = _windows(f, f.integer("num_hidden_layers"), every_layer=False)
    attn = _gqa(f, qkv_bias=True, windows=windows)
    return _arch(f, "qwen2", _rope(f, attn.head_dim), attn)


def _qwen3(f: Fields) -> Arch:
    f.require(*_LAYER_SIZES, "intermediate_size", "max_position_embeddings")
    bias = f.flag("attention_bias", False)
    windows = _windows(f, f.integer("num_hidden_layers"), every_layer=False)
    attn = _gqa(f, bias, bias, qk_norm=True, head_dim=128, windows=windows)
    return _arch(f, "qwen3", _rope(f, attn.head_dim), attn)


def _qwen3_moe(f: Fields) -> Arch:
    f.require(
        *_LAYER_SIZES,
        "intermediate_size",
        "max_position_embeddings",
        "moe_intermediate_size",
        "num_experts_per_tok",
    )
    layers = f.integer("num_hidden_layers")
    bias = f.flag("attention_bias", False)
    window = f.optional_integer("sliding_window") if f.flag("use_sliding_window", False) else None
    windows = (window,) * layers if window else ()
    attn = _gqa(f, bias, bias, qk_norm=True, windows=windows)
    step = f.integer("decoder_sparse_step", 1)
    dense = set(f.integers("mlp_only_layers")) | {n for n in range(layers) if (n + 1) % step}
    # transformers 5 writes the released num_experts as num_local_experts
    experts = f.integer("num_experts", f.integer("num_local_experts", 128))
    moe = MoE(
        experts=experts,
        top_k=_top_k(f, experts),
        width=f.integer("moe_intermediate_size"),
        renorm=f.flag("norm_topk_prob", False),
        dense_layers=tuple(sorted(dense)),
    )
    return _arch(f, "qwen3_moe", _rope(f, attn.head_dim), attn, moe)


def _top_k(f: Fields, experts: int) -> int:
    top_k = f.integer("num_experts_per_tok")
    if top_k > experts:
        raise ValueError(f"num_experts_per_tok {top_k} is more than the {experts} experts")
    return top_k


def _mla(f: Fields) -> MLA:
    """Scale: (nope + rope)^-0.5, times yarn's mscale_all_dim factor squared (DeepSeek-V2)."""
    nope, rope = f.integer("qk_nope_head_dim"), f.integer("qk_rope_head_dim")
    r = _rope_fields(f)
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
    top_k = _top_k(f, experts)
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


_DEEPSEEK_SIZES = (
    *_LAYER_SIZES,
    "intermediate_size",
    "max_position_embeddings",
    "q_lora_rank",
    "kv_lora_rank",
    "n_routed_experts",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)


def _deepseek(f: Fields, family: str, method: str, score: str, renorm: bool) -> Arch:
    f.require(*_DEEPSEEK_SIZES)
    if f.optional_integer("n_routed_experts"):
        f.require("moe_intermediate_size", "num_experts_per_tok")
    moe = _deepseek_moe(f, method, score, renorm)
    attn = _mla(f)
    interleaved = f.flag("rope_interleave", True)
    return _arch(f, family, _rope(f, attn.rope, interleaved=interleaved), attn, moe)


def _deepseek_v2(f: Fields) -> Arch:
    return _deepseek(f, "deepseek_v2", "greedy", "softmax", renorm=False)


def _deepseek_v3(f: Fields) -> Arch:
    return _deepseek(f, "deepseek_v3", "noaux_tc", "sigmoid", renorm=True)


_READERS: dict[str, Callable[[Fields], Arch]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "DeepseekV2ForCausalLM": _deepseek_v2,
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "KimiK2ForCausalLM": _deepseek_v3,
}
_MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
}
