"""From a checkpoint's config.json to `Arch`: architectures by name.

Reads the released form (rope_scaling, rope_theta, torch_dtype) and transformers 5's
(rope_parameters, dtype). Knows nothing of tensors, files or ranks. A field that is absent takes the
default of the family's published configuration class; a size without a sensible one is required.
"""

from collections.abc import Callable, Mapping

from anabranch.core.arch import Arch
from anabranch.core.arch_deepseek import deepseek_v2, deepseek_v3, deepseek_v4
from anabranch.core.arch_gqa import gpt_oss, llama, mistral, qwen2, qwen3, qwen3_moe
from anabranch.core.fields import Fields

_READERS: dict[str, Callable[[Fields], Arch]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "GptOssForCausalLM": gpt_oss,
    "DeepseekV2ForCausalLM": deepseek_v2,
    "DeepseekV3ForCausalLM": deepseek_v3,
    "DeepseekV4ForCausalLM": deepseek_v4,
    "KimiK2ForCausalLM": deepseek_v3,
}
_MODEL_TYPES = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "gpt_oss": gpt_oss,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "deepseek_v4": deepseek_v4,
    "kimi_k2": deepseek_v3,
}

MOST_LAYERS = 4096


def read_arch(config: Mapping[str, object]) -> Arch:
    """The facts of a model from its parsed config.json.

    ValueError names every absent required field, a field of the wrong type or out of range, or, for
    an unknown architecture, the known ones.
    """
    layers = Fields(config).optional_integer("num_hidden_layers") or 0
    if layers > MOST_LAYERS:
        raise ValueError(f"num_hidden_layers: at most {MOST_LAYERS} are supported, found {layers}")
    names = config.get("architectures") or ()
    listed = [str(n) for n in names] if isinstance(names, list | tuple) else [str(names)]
    model_type = str(config.get("model_type", ""))
    for name in listed:
        if name in _READERS:
            return _READERS[name](Fields(config))
    if not listed and model_type in _MODEL_TYPES:
        return _MODEL_TYPES[model_type](Fields(config))
    raise ValueError(
        f"unknown architecture {listed or None} (model_type {model_type!r}); known architectures: "
        + ", ".join(sorted(_READERS))
    )
