"""What families share in reading config.json: rope, windows, GQA and the facts of every `Arch`."""

from anabranch.core.arch import GQA, MLA, Arch, Hyper, MoE, Rope, SharedKV
from anabranch.core.fields import Fields

LAYER_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_DTYPES = ("bfloat16", "float16", "float32")
_ROPE_KINDS = {
    "default": "plain",
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
    "yarn": "yarn",
    "deepseek_yarn": "yarn",
}


def rope_fields(f: Fields) -> Fields:
    """rope_parameters (transformers 5) or rope_scaling (released); empty when the rope is plain."""
    return f.nested("rope_parameters") or f.nested("rope_scaling") or Fields({}, "rope_scaling")


def rope_of(f: Fields, dim: int, theta: float = 10000.0, interleaved: bool = False) -> Rope:
    """Rotary facts. Defaults as arXiv 2309.00071 and the Llama 3.1 release give them."""
    r = rope_fields(f)
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


def windows_of(f: Fields, layers: int, every_layer: bool) -> tuple[int | None, ...]:
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
    if not f.has("layer_types"):
        first = f.integer("max_window_layers", 28, minimum=0)
        return tuple(window if layer >= first else None for layer in range(layers))
    return typed_windows(f, window)


def typed_windows(f: Fields, window: int) -> tuple[int | None, ...]:
    """Windows as layer_types says; without it, every second layer from the first (gpt-oss)."""
    layers = f.integer("num_hidden_layers")
    kinds = f.strings("layer_types")
    if kinds is None:
        return tuple(None if layer % 2 else window for layer in range(layers))
    if len(kinds) != layers or set(kinds) - {"sliding_attention", "full_attention"}:
        raise ValueError(
            f"layer_types: wanted {layers} of sliding_attention or full_attention, "
            f"found {len(kinds)}: {sorted(set(kinds))}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def gqa_of(
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


def arch_of(
    f: Fields,
    family: str,
    rope: Rope,
    attn: GQA | MLA | SharedKV,
    moe: MoE | None = None,
    hyper: Hyper | None = None,
    width: str = "intermediate_size",
) -> Arch:
    """What every family shares. width: the field that has the dense MLP's width."""
    act = f.text("hidden_act", "silu")
    if act != "silu":
        raise ValueError(f"hidden_act {act!r} is not supported by {family}; wanted 'silu'")
    dtype = f.text("dtype", f.text("torch_dtype", "bfloat16"))
    if dtype not in _DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; known: {', '.join(_DTYPES)}")
    mlp_bias = f.flag("mlp_bias", False)
    if mlp_bias and family != "llama":
        raise ValueError(f"mlp_bias is not supported by {family}; wanted false")
    vocab = f.integer("vocab_size")
    return Arch(
        family=family,
        hidden=f.integer("hidden_size"),
        layers=f.integer("num_hidden_layers"),
        vocab=vocab,
        ffn_width=f.integer(width),
        eps=f.number("rms_norm_eps", 1e-6),
        rope=rope,
        attn=attn,
        moe=moe,
        hyper=hyper,
        tied=f.flag("tie_word_embeddings", False),
        mlp_bias=mlp_bias,
        max_len=f.integer("max_position_embeddings"),
        dtype=dtype,
        # some releases list ends of a padded vocabulary, or -1: no row of the head draws them
        eos_ids=tuple(end for end in f.integers("eos_token_id", -(2**31)) if 0 <= end < vocab),
    )


MOST_EXPERTS = 4096


def top_k_of(f: Fields, experts: int) -> int:
    if experts > MOST_EXPERTS:
        raise ValueError(f"at most {MOST_EXPERTS} routed experts are supported, found {experts}")
    top_k = f.integer("num_experts_per_tok")
    if top_k > experts:
        raise ValueError(f"num_experts_per_tok {top_k} is more than the {experts} experts")
    return top_k
