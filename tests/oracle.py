"""Small random checkpoints of every family with transformers' logits as the truth.

Sizes are odd on purpose, attention logits have a spread near 3, the shared expert is scaled x4, and
prompts are chosen so that no router and no greedy choice is near a tie: what a small model would
hide shows here. Checkpoints are saved in fp32 with released tensor names, in many shards.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

VOCAB = 1003
MARGIN = 1e-4  # between the last expert chosen and the first one left out, as router scores
GAP = 2e-3  # between the best logit and the second best
BLOCK = 128
EXPERTS = 10


@dataclass(frozen=True)
class Family:
    """config: transformers' class and its arguments. form: how config.json is written.

    extra: fields that only the released config.json has. fp8: linear weights in 128x128 blocks.
    mtp: the checkpoint carries tensors of one more layer, which must be ignored.
    """

    model: str
    config: Mapping[str, object]
    form: str = "transformers5"
    extra: Mapping[str, object] = field(default_factory=dict)
    model_type: str | None = None
    fp8: bool = False
    mtp: bool = False


_BASE: dict[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 24,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}
_GQA = _BASE | {"num_key_value_heads": 8, "head_dim": 8}
_MLA = _BASE | {
    "num_hidden_layers": 3,
    "num_key_value_heads": 24,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 10,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 28,
    "routed_scaling_factor": 1.5,
}
_V3 = _MLA | {"n_group": 2, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
_V3_EXTRA = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
_MOE = _GQA | {
    "num_key_value_heads": 4,
    "num_experts": 10,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 28,
}

FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", _GQA | {"rope_scaling": _LLAMA3}, "released"),
    "llama_tied": Family(
        "Llama",
        _GQA
        | {"num_key_value_heads": 4, "tie_word_embeddings": True, "head_dim": 4, "mlp_bias": True}
        | {"attention_bias": True},
    ),
    "llama_linear": Family(
        "Llama",
        _GQA | {"num_key_value_heads": 12, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        "released",
    ),
    "mistral": Family("Mistral", _GQA | {"sliding_window": 24}, "released"),
    "qwen2": Family(
        "Qwen2",
        _GQA | {"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_scaling": _YARN},
        "released",
    ),
    "qwen2_window": Family(
        "Qwen2",
        _GQA | {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3": Family("Qwen3", _GQA | {"head_dim": 16, "num_key_value_heads": 12}),
    "qwen3_moe": Family("Qwen3Moe", _MOE | {"norm_topk_prob": True}, "released"),
    "qwen3_moe_sparse": Family(
        "Qwen3Moe",
        _MOE
        | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
        | {"norm_topk_prob": False},
    ),
    "deepseek_v2_lite": Family(
        "DeepseekV2",
        _MLA
        | {"q_lora_rank": None, "n_shared_experts": 2, "topk_method": "greedy"}
        | {"rope_scaling": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
        "released",
        {"moe_layer_freq": 1, "scoring_func": "softmax", "seq_aux": True},
    ),
    "deepseek_v2": Family(
        "DeepseekV2",
        _MLA | {"topk_method": "group_limited_greedy", "n_group": 5, "topk_group": 3},
    ),
    "deepseek_v3": Family(
        "DeepseekV3",
        _V3 | {"rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        "released",
        _V3_EXTRA,
        mtp=True,
    ),
    "deepseek_v3_fp8": Family(
        "DeepseekV3", _V3 | {"hidden_size": 144}, "released", _V3_EXTRA, fp8=True, mtp=True
    ),
    "gpt_oss": Family(
        "GptOss",
        _GQA
        | {"num_local_experts": 10, "num_experts_per_tok": 3, "intermediate_size": 28}
        | {"sliding_window": 20, "num_hidden_layers": 3}
        | {"rope_scaling": _YARN | {"truncate": False}},
        "released",
    ),
    "deepseek_v4": Family(
        "DeepseekV4",
        {k: v for k, v in _BASE.items() if k != "intermediate_size"}
        | {"num_hidden_layers": 3, "head_dim": 16, "qk_rope_head_dim": 8, "q_lora_rank": 40}
        | {"num_key_value_heads": 1, "o_groups": 4, "o_lora_rank": 20, "sliding_window": 20}
        | {"compress_ratios": [0, 0, 0], "num_hash_layers": 1, "hc_mult": 4}
        | {"n_routed_experts": 10, "num_experts_per_tok": 3, "moe_intermediate_size": 28},
    ),
    "kimi_k2": Family(
        "DeepseekV3",
        _V3
        | {"n_group": 1, "topk_group": 1, "n_routed_experts": 12, "routed_scaling_factor": 2.827}
        | {"rope_scaling": _YARN | {"factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
        "released",
        _V3_EXTRA,
        model_type="kimi_k2",
    ),
}


class Oracle:
    """A checkpoint in `folder` and transformers' model of the same weights (fp32, eager)."""

    def __init__(self, folder: Path, model: nn.Module) -> None:
        self.folder = folder
        self.model = model

    @torch.no_grad()
    def score(self, ids: list[int]) -> Tensor:
        """fp32 [T, vocab] logits of one forward pass."""
        logits: Tensor = self.model(torch.tensor([ids])).logits[0]
        return logits.float()

    def greedy(self, ids: list[int], steps: int) -> list[int]:
        """The next `steps` tokens; every step runs the whole prefix, so no cache can err."""
        tokens = list(ids)
        for _ in range(steps):
            tokens.append(int(self.score(tokens)[-1].argmax()))
        return tokens[len(ids) :]

    def prompt(self, length: int, steps: int, salt: int = 0) -> tuple[list[int], list[int]]:
        """A prompt and its greedy continuation along which nothing is near a tie.

        salt: other values give other prompts. AssertionError if none of 200 tries will do.
        """
        for attempt in range(200):
            g = torch.Generator().manual_seed(100_000 * salt + 1000 * length + attempt)
            ids = torch.randint(3, VOCAB, (length,), generator=g).tolist()
            tokens = self.greedy(ids, steps)
            with _RouterMargins(self.model) as margins:
                logits = self.score(ids + tokens)[length - 1 :]
            best = logits.topk(2, dim=-1).values
            if margins.least > MARGIN and float((best[:, 0] - best[:, 1]).min()) > GAP:
                return ids, tokens
        raise AssertionError(f"no prompt of {length} tokens without near ties")

    @cached_property
    def config(self) -> dict[str, object]:
        found: dict[str, object] = json.loads((self.folder / "config.json").read_text())
        return found


class _RouterMargins:
    """While entered: the least distance between chosen and left-out scores over all routers."""

    def __init__(self, model: nn.Module) -> None:
        self._routers = [m for m in model.modules() if type(m).__name__.endswith("TopkRouter")]
        self._routers += [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
        self.least = float("inf")

    def __enter__(self) -> "_RouterMargins":
        self._hooks = [m.register_forward_hook(self._see) for m in self._routers]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _see(self, router: nn.Module, _: object, out: tuple[Tensor, ...]) -> None:
        logits, _, chosen = out
        sigmoid = "V3" in type(router).__name__
        scores = logits.float().softmax(-1)
        if sigmoid:
            scores = logits.float().sigmoid() + router.e_score_correction_bias
        elif "V4" in type(router).__name__:
            scores = router.score_fn(logits.float()) + router.e_score_correction_bias
        picked = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True)
        groups = int(getattr(router, "num_group", None) or 1)
        self._note_groups(scores, picked, groups, 2 if sigmoid else 1)
        # inside the chosen groups (a group without a chosen expert may have been left out)
        inside = picked.unflatten(-1, (groups, -1)).any(-1, keepdim=True)
        inside = inside.expand(*inside.shape[:-1], scores.shape[-1] // groups).flatten(-2)
        low = scores.masked_fill(~picked, torch.inf).amin(-1)
        high = scores.masked_fill(picked | ~inside, -torch.inf).amax(-1)
        self.least = min(self.least, float((low - high).min()))

    def _note_groups(self, scores: Tensor, picked: Tensor, groups: int, best: int) -> None:
        if groups == 1:
            return
        rank = scores.unflatten(-1, (groups, -1)).topk(best, dim=-1).values.sum(-1)
        ordered = rank.sort(-1).values
        self.least = min(self.least, float((ordered[..., 1:] - ordered[..., :-1]).min()))


def make(name: str, folder: Path, seed: int = 0) -> Oracle:
    """Writes the checkpoint of `FAMILIES[name]` into `folder` and returns its oracle."""
    family = FAMILIES[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family.model}Config")(**family.config)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family.model}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            _fill(parameter_name, tensor, 3.0 / _softmax_gain(config), family.model == "GptOss")
    quantised = _round_to_fp8(model) if family.fp8 else {}
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, max_shard_size="150KB")
    if quantised:
        _rewrite(folder, quantised)
    if family.mtp:
        _add_layer(folder, int(str(family.config["num_hidden_layers"])))
    _write_config(folder, family)
    return Oracle(folder, model)


def _softmax_gain(config: transformers.PreTrainedConfig) -> float:
    """What yarn's mscale_all_dim multiplies attention logits by (MLA only)."""
    rope = config.rope_parameters
    all_dim = rope.get("mscale_all_dim") or 0.0
    return (1.0 + 0.1 * all_dim * math.log(rope.get("factor") or 1.0)) ** 2


def _fill(name: str, tensor: Tensor, sharp: float, inputs_first: bool) -> None:
    """Values that keep activations near 1 and make mistakes visible; rope tables stay.

    sharp: spread of the attention logits. inputs_first: experts lie as [E, in, out].
    """
    if "inv_freq" in name:
        return
    if "tid2eid" in name:  # experts of a token id: any, all different
        tensor.copy_(torch.rand(len(tensor), EXPERTS).argsort(-1)[:, : tensor.shape[1]])
        return
    if "sinks" in name:
        tensor.normal_(0, 2)
        return
    if tensor.dim() == 1:
        norm = "norm" in name
        tensor.normal_(0, 0.1).add_(1.0 if norm else 0.0)
        if name.endswith("q_norm.weight"):
            tensor.mul_(sharp)
        return
    inputs = tensor.shape[-2 if inputs_first and tensor.dim() == 3 else -1]
    tensor.normal_(0, inputs**-0.5)
    if name.endswith(("q_proj.weight", "q_b_proj.weight")):
        tensor.mul_(sharp)
    if "shared_expert" in name and "down_proj" in name:
        tensor.mul_(4)
    if "embed_tokens" in name or "lm_head" in name:
        tensor.mul_(3)


def _dequantised(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(fp8 weight, scale per block, what they stand for) of a matrix."""
    rows, cols = weight.shape
    padded = nn.functional.pad(weight, (0, -cols % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-12) / 448.0
    wide = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]
    packed = (weight / wide).to(torch.float8_e4m3fn)
    return packed, scale, packed.float() * wide


def _round_to_fp8(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Rounds every weight that DeepSeek-V3 ships in fp8; returns its parts by released name."""
    parts: dict[str, tuple[Tensor, Tensor]] = {}
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.dim() == 1 or "layers." not in name or "gate.weight" in name:
                continue
            if tensor.dim() == 2:
                *packed, value = _dequantised(tensor)
                tensor.copy_(value)
                parts[name] = (packed[0], packed[1])
                continue
            prefix = name.rsplit(".", 1)[0]
            fused = "gate_up" in name
            for expert, matrix in enumerate(tensor):
                pieces = matrix.chunk(2) if fused else (matrix,)
                for part, piece in zip(("gate", "up") if fused else ("down",), pieces, strict=True):
                    *packed, value = _dequantised(piece)
                    piece.copy_(value)
                    parts[f"{prefix}.{expert}.{part}_proj.weight"] = (packed[0], packed[1])
    return parts


def _rewrite(folder: Path, parts: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Puts fp8 weights with their scales where the fp32 ones were."""
    index = folder / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    left = set(parts)
    for file in sorted(set(table["weight_map"].values())):
        tensors = load_file(folder / file)
        for name in [n for n in tensors if n in parts]:
            left.discard(name)
            tensors[name], scale = parts[name]
            tensors[f"{name}_scale_inv"] = scale
            table["weight_map"][f"{name}_scale_inv"] = file
        save_file(tensors, folder / file)
    assert not left, f"saved under other names: {sorted(left)[:3]}"
    index.write_text(json.dumps(table))


def _add_layer(folder: Path, layer: int) -> None:
    """Tensors of a multi-token-prediction layer, as DeepSeek-V3 ships beside the model."""
    index = folder / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    file = "model-mtp.safetensors"
    names = [f"model.layers.{layer}.{n}.weight" for n in ("eh_proj", "enorm", "shared_head.norm")]
    save_file({name: torch.full((4,), torch.nan) for name in names}, folder / file)
    table["weight_map"] |= dict.fromkeys(names, file)
    index.write_text(json.dumps(table))


def _write_config(folder: Path, family: Family) -> None:
    config = json.loads((folder / "config.json").read_text())
    if family.form == "released":
        config = released(config)
    config |= family.extra
    if family.model_type is not None:
        config["model_type"] = family.model_type
    if family.fp8:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def released(config: Mapping[str, object]) -> dict[str, object]:
    """transformers 5's config.json as the releases wrote it."""
    out = dict(config)
    rope = out.pop("rope_parameters", None)
    assert isinstance(rope, dict)
    out["rope_theta"] = rope["rope_theta"]
    kind = rope["rope_type"]
    rest = {k: v for k, v in rope.items() if k not in ("rope_theta", "rope_type")}
    # yarn and linear were spelt "type" before Llama 3.1 brought "rope_type"
    key = "rope_type" if kind == "llama3" else "type"
    out["rope_scaling"] = None if kind == "default" else {key: kind, **rest}
    out["torch_dtype"] = out.pop("dtype", "float32")
    if out["model_type"] == "qwen3_moe":
        out["num_experts"] = out.pop("num_local_experts")
    for absent in ("head_dim", "qk_head_dim", "rope_interleave"):
        if "kv_lora_rank" in out:
            out.pop(absent, None)
    return out
