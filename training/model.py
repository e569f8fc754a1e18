"""The demo model as it is trained: DeepSeek-V3's architecture at 7.5 million parameters.

Owns the arithmetic, the released form (config.json fields and tensor names) and greedy decoding for
evaluation. Knows nothing of problems, data files or the engine.

All routed experts are computed for every row and weighted by zero or their gate: at this size one
GEMM over all experts is faster than any sorting, and it is the same sum.

Shapes: B rows, T positions, d hidden, H heads, E experts, m expert width.
Source: DeepSeek-V3 technical report (arXiv 2412.19437), sections 2.1 and 2.1.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """The fields of the released config.json that the arithmetic needs, by their released names."""

    vocab_size: int = 1960
    hidden_size: int = 256
    intermediate_size: int = 768
    moe_intermediate_size: int = 128
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    n_shared_experts: int = 1
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    n_group: int = 2
    topk_group: int = 1
    routed_scaling_factor: float = 2.0
    first_k_dense_replace: int = 1
    q_lora_rank: int = 128
    kv_lora_rank: int = 128
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096

    def released(self) -> dict[str, object]:
        """config.json in the form DeepSeek-V3 was released with."""
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "torch_dtype": "bfloat16",
            **asdict(self),
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
            "ep_size": 1,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "moe_layer_freq": 1,
            "norm_topk_prob": True,
            "num_key_value_heads": self.num_attention_heads,
            "num_nextn_predict_layers": 0,
            "rope_interleave": True,
            "rope_scaling": None,
            "scoring_func": "sigmoid",
            "tie_word_embeddings": False,
            "topk_method": "noaux_tc",
            "use_cache": True,
        }


def weight(*shape: int, std: float = 0.02) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * std)


def linear(x: Tensor, w: Tensor) -> Tensor:
    """x @ w.T in x's dtype; weights are kept in fp32."""
    return F.linear(x, w.to(x.dtype))


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * y.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates interleaved pairs (x0, x1), (x2, x3) of x [..., T, R]; cos, sin [T, R/2] fp32."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Multi-head latent attention in its expanded form."""

    def __init__(self, c: Config, out_std: float) -> None:
        super().__init__()
        heads, nope, rope, v = (
            c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim,
        )  # fmt: skip
        self.c = c
        self.q_a_proj = weight(c.q_lora_rank, c.hidden_size)
        self.q_a_layernorm = Norm(c.q_lora_rank, c.rms_norm_eps)
        self.q_b_proj = weight(heads * (nope + rope), c.q_lora_rank, std=0.04)
        self.kv_a_proj_with_mqa = weight(c.kv_lora_rank + rope, c.hidden_size)
        self.kv_a_layernorm = Norm(c.kv_lora_rank, c.rms_norm_eps)
        self.kv_b_proj = weight(heads * (nope + v), c.kv_lora_rank, std=0.04)
        self.o_proj = weight(c.hidden_size, heads * v, std=out_std)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c = self.c
        heads, nope, rope = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim
        q = linear(self.q_a_layernorm(linear(x, self.q_a_proj)), self.q_b_proj)
        q = q.unflatten(-1, (heads, nope + rope)).transpose(1, 2)
        latent, k_rope = linear(x, self.kv_a_proj_with_mqa).split((c.kv_lora_rank, rope), -1)
        kv = linear(self.kv_a_layernorm(latent), self.kv_b_proj)
        kv = kv.unflatten(-1, (heads, nope + c.v_head_dim)).transpose(1, 2)
        k_nope, v = kv.split((nope, c.v_head_dim), -1)
        k_rope = rotate(k_rope.unsqueeze(1), cos, sin).expand(-1, heads, -1, -1)
        q = torch.cat((q[..., :nope], rotate(q[..., nope:], cos, sin)), -1)
        k = torch.cat((k_nope, k_rope), -1)
        # The flash kernel wants one head size for q, k and v.
        v = F.pad(v, (0, nope + rope - c.v_head_dim))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)[..., : c.v_head_dim]
        return linear(out.transpose(1, 2).flatten(2), self.o_proj)


class Mlp(nn.Module):
    def __init__(self, hidden: int, width: int, out_std: float) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = weight(width, hidden), weight(width, hidden)
        self.down_proj = weight(hidden, width, std=out_std)

    def forward(self, x: Tensor) -> Tensor:
        return linear(F.silu(linear(x, self.gate_proj)) * linear(x, self.up_proj), self.down_proj)


def top_mask(scores: Tensor, k: int) -> Tensor:
    """Mask of the k largest along the last dim, the lower index first among equals.

    Counts the rivals of each entry: for a handful of experts this fuses, unlike topk.
    """
    a, b = scores.unsqueeze(-1), scores.unsqueeze(-2)
    index = torch.arange(scores.shape[-1], device=scores.device)
    beats = (b > a) | ((b == a) & (index < index.unsqueeze(-1)))
    return beats.sum(-1) < k


class Moe(nn.Module):
    """Sigmoid router with group limit and selection bias (noaux_tc), and one shared expert."""

    e_score_correction_bias: Tensor

    def __init__(self, c: Config, out_std: float) -> None:
        super().__init__()
        self.c = c
        experts, width, hidden = c.n_routed_experts, c.moe_intermediate_size, c.hidden_size
        self.gate = weight(experts, hidden)
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))
        self.experts_in = weight(2, experts, width, hidden)
        self.experts_out = weight(experts, width, hidden, std=out_std)
        self.shared_experts = Mlp(hidden, width * c.n_shared_experts, out_std)

    def route(self, x: Tensor) -> Tensor:
        """Weight of every expert for every row, zero where not chosen: [..., E] fp32."""
        c = self.c
        scores = F.linear(x.float(), self.gate.float()).sigmoid()
        with torch.no_grad():
            choice = scores + self.e_score_correction_bias
            grouped = choice.unflatten(-1, (c.n_group, -1))
            group_scores = (grouped * top_mask(grouped, 2)).sum(-1)
            allowed = top_mask(group_scores, c.topk_group).unsqueeze(-1).expand_as(grouped)
            barred = choice.masked_fill(~allowed.flatten(-2), float("-inf"))
            chosen = top_mask(barred, c.num_experts_per_tok)
        kept = scores * chosen
        return kept / (kept.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The block's output and how many rows each expert got."""
        weights = self.route(x)
        experts = (self.c.n_routed_experts, self.c.moe_intermediate_size)
        gate, up = linear(x, self.experts_in.flatten(0, 2)).chunk(2, -1)
        hidden = (F.silu(gate) * up).unflatten(-1, experts) * weights.unsqueeze(-1).to(x.dtype)
        out = hidden.flatten(-2) @ self.experts_out.flatten(0, 1).to(x.dtype)
        counts = (weights.detach() > 0).flatten(0, -2).sum(0)
        return out + self.shared_experts(x), counts


class Layer(nn.Module):
    def __init__(self, c: Config, index: int) -> None:
        super().__init__()
        out_std = 0.02 / (2 * c.num_hidden_layers) ** 0.5
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c, out_std)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        dense = index < c.first_k_dense_replace
        self.mlp = Mlp(c.hidden_size, c.intermediate_size, out_std) if dense else Moe(c, out_std)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        y = self.post_attention_layernorm(x)
        if isinstance(self.mlp, Mlp):
            return x + self.mlp(y), None
        out, counts = self.mlp(y)
        return x + out, counts


class DemoModel(nn.Module):
    """Token ids [B, T] -> hidden rows [B, T, d] in `dtype`, and expert counts [layers, E]."""

    cos: Tensor
    sin: Tensor

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.embed_tokens = weight(c.vocab_size, c.hidden_size, std=0.05)
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c.num_hidden_layers))
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = weight(c.vocab_size, c.hidden_size)
        rope = c.qk_rope_head_dim
        inverse = c.rope_theta ** (-torch.arange(0, rope, 2, dtype=torch.float64) / rope)
        angles = torch.arange(c.max_position_embeddings).double()[:, None] * inverse
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x = F.embedding(ids, self.embed_tokens).to(dtype)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        counts: list[Tensor] = []
        for layer in self.layers:
            x, count = layer(x, cos, sin)
            if count is not None:
                counts.append(count)
        return self.norm(x), torch.stack(counts)

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.lm_head)

    def balance(self, counts: Tensor, rate: float) -> None:
        """Aux-loss-free balancing: moves each selection bias by `rate` against its excess."""
        moes = [layer.mlp for layer in self.layers if isinstance(layer.mlp, Moe)]
        for moe, count in zip(moes, counts.float(), strict=True):
            moe.e_score_correction_bias += rate * torch.sign(count.mean() - count)


def released_tensors(model: DemoModel) -> dict[str, Tensor]:
    """The weights by DeepSeek-V3's released names: bf16, the selection bias fp32."""
    found: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        value = value.detach().cpu()
        if name == "lm_head":
            found["lm_head.weight"] = value
        elif name.endswith("experts_in"):
            for part, tensor in zip(("gate_proj", "up_proj"), value, strict=True):
                for e, w in enumerate(tensor):
                    found[f"model.{name[: -len('_in')]}.{e}.{part}.weight"] = w
        elif name.endswith("experts_out"):
            for e, w in enumerate(value):
                found[f"model.{name[: -len('_out')]}.{e}.down_proj.weight"] = w.T
        elif name.endswith("e_score_correction_bias"):
            found[f"model.{name.replace('mlp.', 'mlp.gate.')}"] = value
        else:
            found[f"model.{name}" if name.endswith(".weight") else f"model.{name}.weight"] = value
    return {
        name: (value if name.endswith("bias") else value.to(torch.bfloat16)).contiguous()
        for name, value in found.items()
    }


@torch.no_grad()
def round_to_bf16(model: DemoModel) -> None:
    """Rounds every weight as the export does, so that evaluation sees what is shipped."""
    for parameter in model.parameters():
        parameter.copy_(parameter.to(torch.bfloat16).float())


@torch.no_grad()
def greedy(
    model: DemoModel, prompts: Sequence[Sequence[int]], new: int, end: int, dtype: torch.dtype
) -> list[list[int]]:
    """Greedy continuations of up to `new` ids, without `end`.

    No cache: every step runs whole rows, which at this size is quick enough and surely right. Rows
    stand at the left and are padded at the right, which a causal model never sees; ended rows are
    dropped every few steps.
    """
    device = model.embed_tokens.device
    told: list[list[int]] = [[] for _ in prompts]
    row = torch.arange(len(prompts), device=device)
    begin = torch.tensor([len(p) for p in prompts], device=device)
    lengths, done = begin.clone(), torch.zeros_like(begin, dtype=torch.bool)
    ids = torch.full((len(prompts), max(map(len, prompts)) + new), end, device=device)
    for i, prompt in enumerate(prompts):
        ids[i, : len(prompt)] = torch.tensor(prompt, device=device)
    for step in range(1, new + 1):
        if step % 8 == 1:
            width = min(ids.shape[1], int(lengths.max()) + 8)
        hidden, _ = model(ids[:, :width], dtype)
        index = torch.arange(len(ids), device=device)
        token = model.logits(hidden[index, lengths - 1]).argmax(-1)
        done |= token == end
        ids[index, lengths] = torch.where(done, end, token)
        lengths += ~done
        if step % 8 == 0 or step == new:
            over = done if step < new else torch.ones_like(done)
            for i in over.nonzero().flatten().tolist():
                told[int(row[i])] = ids[i, int(begin[i]) : int(lengths[i])].tolist()
            ids, row, begin, lengths, done = (t[~over] for t in (ids, row, begin, lengths, done))
            if not len(row):
                break
    return told
