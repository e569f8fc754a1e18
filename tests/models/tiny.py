"""Tiny checkpoints, in their released names, of families whose truth is transformers' own model.

Values show mistakes: attention logits of std near 3, sinks that take weight, biases everywhere,
activations that reach their clamps, windows shorter than the prompts.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

VOCAB = 1003

GPT_OSS = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_local_experts": 10,
    "num_experts_per_tok": 4,
    "sliding_window": 20,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
}
DEEPSEEK_V4 = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "moe_intermediate_size": 28,
    "num_hidden_layers": 3,
    "num_attention_heads": 24,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 40,
    "num_experts_per_tok": 3,
    "n_routed_experts": 10,
    "n_shared_experts": 1,
    "compress_ratios": [0, 0, 0],
    "num_hash_layers": 1,
    "o_groups": 4,
    "o_lora_rank": 20,
    "sliding_window": 20,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 6,
    "swiglu_limit": 3.0,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}


class Tiny:
    """A checkpoint in `folder` and transformers' model of the same weights, fp32, eager."""

    def __init__(self, folder: Path, model: nn.Module, config: dict[str, object]) -> None:
        self.folder, self.model, self.config = folder, model, config

    @torch.no_grad()
    def score(self, ids: tuple[int, ...]) -> Tensor:
        """fp32 [T, vocab] logits of one pass without a cache."""
        logits: Tensor = self.model(torch.tensor([ids]), use_cache=False).logits[0]
        return logits.float()

    def greedy(self, ids: tuple[int, ...], steps: int) -> list[int]:
        tokens = list(ids)
        for _ in range(steps):
            logits = self.score(tuple(tokens))[-1]
            best = logits.topk(2).values
            assert best[0] - best[1] > 1e-3, "a near tie: choose another prompt"
            tokens.append(int(logits.argmax()))
        return tokens[len(ids) :]


def make(name: str, folder: Path, seed: int = 0, **changes: object) -> Tiny:
    """name: GptOss or DeepseekV4. changes: of the configuration."""
    torch.manual_seed(seed)
    facts, rename = {"GptOss": (GPT_OSS, str), "DeepseekV4": (DEEPSEEK_V4, v4_name)}[name]
    config = getattr(transformers, f"{name}Config")(**(facts | changes))
    config._attn_implementation = config._experts_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            _fill(key, tensor)
    folder.mkdir(parents=True, exist_ok=True)
    written = json.loads(config.to_json_string(use_diff=False))
    written |= {"architectures": [f"{name}ForCausalLM"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(written))
    save_file(dict(_released(model, rename)), folder / "model.safetensors")
    return Tiny(folder, model, written)


def _fill(name: str, tensor: Tensor) -> None:
    if "inv_freq" in name:
        return
    if name.endswith("tid2eid"):
        picks = [torch.randperm(10)[: tensor.shape[1]] for _ in range(len(tensor))]
        tensor.copy_(torch.stack(picks))
        return
    fan_in = tensor.shape[-2] if "experts.gate_up_proj" in name else tensor.shape[-1]
    if name.endswith("norm.weight"):
        tensor.normal_(1, 0.1)
    elif tensor.dim() == 1 or name.endswith("_bias"):
        tensor.normal_(0, 1.5 if "sink" in name else 0.3)
    else:
        tensor.normal_(0, fan_in**-0.5)
    scales = {"q_proj.weight": 3, "q_a_norm": 2, "lm_head": 3, "embed": 3, "gate_up_proj": 3}
    tensor.mul_(next((s for part, s in scales.items() if part in name), 1))
    if "shared_experts.down" in name:
        tensor.mul_(4)


def _released(model: nn.Module, rename: Callable[[str], str]):
    for key, tensor in model.state_dict().items():
        if ".experts.gate_up_proj" in key and rename is v4_name:
            for e, both in enumerate(tensor):
                for part, half in zip(("w1", "w3"), both.chunk(2), strict=True):
                    yield f"{_expert(key)}.{e}.{part}.weight", half.clone()
        elif ".experts.down_proj" in key and rename is v4_name:
            for e, down in enumerate(tensor):
                yield f"{_expert(key)}.{e}.w2.weight", down.clone()
        else:
            yield rename(key), tensor.clone()


def _expert(key: str) -> str:
    return v4_name(key).rsplit(".", 1)[0]


_V4_NAMES = (
    (r"^model\.", ""),
    (r"^embed_tokens", "embed"),
    (r"^lm_head", "head"),
    (r"^hc_head\.hc_", "hc_head_"),
    (r"(attn|ffn)_hc\.", r"hc_\1_"),
    (r"input_layernorm", "attn_norm"),
    (r"post_attention_layernorm", "ffn_norm"),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"sinks$", "attn_sink"),
    (r"q_a_proj", "wq_a"),
    (r"q_b_proj", "wq_b"),
    (r"q_a_norm", "q_norm"),
    (r"attn\.kv_proj", "attn.wkv"),
    (r"o_a_proj", "wo_a"),
    (r"o_b_proj", "wo_b"),
    (r"gate\.e_score_correction_bias", "gate.bias"),
    (r"gate_proj", "w1"),
    (r"up_proj", "w3"),
    (r"down_proj", "w2"),
)


def v4_name(key: str) -> str:
    """transformers' name -> the release's."""
    for pattern, name in _V4_NAMES:
        key = re.sub(pattern, name, key)
    return key
