"""A GGUF file's architecture, metadata and tensor names in the released (Hugging Face) form.

Llama (also Mistral and SmolLM2, which GGUF calls llama), Qwen2 and Qwen3. No torch.
"""

import math
import re
import struct

from anabranch.weights.gguf_file import TYPES, GGUFFile, Value

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONFIG = {  # released field: GGUF key after the architecture's name
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
}
_ROPE_FREQS = "rope_freqs.weight"


def released_name(name: str) -> str | None:
    """The released name of a GGUF tensor, or None for one that no model here uses."""
    if name in _TOP:
        return _TOP[name]
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if found is None or found[2] not in _LAYER:
        return None
    return f"model.layers.{found[1]}.{_LAYER[found[2]]}.{found[3]}"


def architecture(file: GGUFFile) -> str:
    """GGUF's name of the architecture; ValueError if it is not one of ARCHITECTURES."""
    name = file.metadata.get("general.architecture")
    experts = file.metadata.get(f"{name}.expert_count", 0)
    if name not in ARCHITECTURES or experts:
        raise ValueError(
            f"{file.path}: GGUF architecture {name!r} with {experts} experts is not supported; "
            f"known, without experts: {', '.join(ARCHITECTURES)}"
        )
    return str(name)


def released_config(file: GGUFFile) -> dict[str, object]:
    """config.json's facts, in the released form, from the metadata."""
    arch = architecture(file)
    meta = file.metadata
    config: dict[str, object] = {"architectures": [ARCHITECTURES[arch]], "model_type": arch}
    for field, key in _CONFIG.items():
        if f"{arch}.{key}" in meta:
            config[field] = meta[f"{arch}.{key}"]
    if "token_embd.weight" in file.tensors:
        config["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    config["torch_dtype"] = _dtype(file)
    ends = [meta.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    config["eos_token_id"] = sorted({end for end in ends if isinstance(end, int)})
    scaling = _rope_scaling(file, arch)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config


def _dtype(file: GGUFFile) -> str:
    """What to compute in: the file's own float type, bfloat16 for quantised files."""
    kinds = {
        TYPES[t.kind][0] if t.kind in TYPES else "" for t in file.tensors.values() if t.rows > 1
    }
    if kinds == {"F32"}:
        return "float32"
    return "float16" if "F16" in kinds and kinds <= {"F16", "F32"} else "bfloat16"


def _rope_scaling(file: GGUFFile, arch: str) -> dict[str, Value] | None:
    meta = file.metadata
    if _ROPE_FREQS in file.tensors:
        return _llama3(file, arch)
    kind = meta.get(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ValueError(
            f"{file.path}: rope scaling {kind!r} is not supported; known: linear, yarn"
        )
    scaling: dict[str, Value] = {"rope_type": kind}
    for field, key in (
        ("factor", "factor"),
        ("original_max_position_embeddings", "original_context_length"),
        ("beta_fast", "yarn_beta_fast"),
        ("beta_slow", "yarn_beta_slow"),
    ):
        if f"{arch}.rope.scaling.{key}" in meta:
            scaling[field] = meta[f"{arch}.rope.scaling.{key}"]
    return scaling


def _llama3(file: GGUFFile, arch: str) -> dict[str, Value]:
    """Llama 3.1's rope parameters, which GGUF keeps only as the divisor of each frequency.

    The release has one set but for the factor (8, or 32 for the small 3.2 models), so the factor is
    the largest divisor; ValueError unless the others follow from it.
    """
    tensor = file.tensors[_ROPE_FREQS]
    count = tensor.shape[-1]
    found = struct.unpack_from(f"<{count}f", file.map, tensor.start)
    theta = file.metadata.get(f"{arch}.rope.freq_base", 10000.0)
    assert isinstance(theta, float)
    low, high, original, factor = 1.0, 4.0, 8192, max(found)
    for i, divisor in enumerate(found):
        wavelength = 2 * math.pi * theta ** (i / count)
        smooth = min(1.0, max(0.0, (original / wavelength - low) / (high - low)))
        wanted = 1 / ((1 - smooth) / factor + smooth)
        if not math.isclose(divisor, wanted, rel_tol=1e-3):
            raise ValueError(
                f"{file.path}: {_ROPE_FREQS} divides frequency {i} by {divisor}; Llama 3.1's rope "
                f"with factor {factor} divides by {wanted}: other scalings are not supported"
            )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
