"""Facts about a model, read from its config.json: sizes and rules, no tensors.

Owns the words in which every family is described; `models` builds from them, `core.resolve` checks
layouts against them. Knows nothing of ranks.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Rope:
    """Rotary embedding. `dim` rotated elements per head; `theta` base.

    kind plain; linear and dynamic (factor); llama3 (factor, low, high, original length: Llama 3.1);
    yarn (factor, beta_fast, beta_slow, original length, mscale, mscale_all_dim: arXiv 2309.00071).
    interleaved: pairs are (2i, 2i+1) as in DeepSeek's released weights; otherwise (i, i + dim/2).
    attention_factor: None computes yarn's own.
    """

    dim: int
    theta: float = 10000.0
    kind: Literal["plain", "linear", "dynamic", "llama3", "yarn"] = "plain"
    interleaved: bool = False
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_len: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class GQA:
    """Grouped-query attention. scale multiplies q.k; windows: per layer, visible positions or
    None.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    windows: tuple[int | None, ...] = ()


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). The cached row is kv_lora +
    rope wide.
    """

    heads: int
    q_lora: int | None
    kv_lora: int
    nope: int
    rope: int
    v: int
    scale: float
    bias: bool = False


@dataclass(frozen=True)
class MoE:
    """Mixture of experts in the layers `first_dense`, first_dense + freq, ... (others are dense).

    score: softmax or sigmoid of the router logits. select: plain top-k; group_max: groups ranked
    by their best score (DeepSeek-V2 group_limited_greedy); group_top2: by the sum of their two best
    corrected scores (noaux_tc). correction_bias: added for selection only. renorm: weights divided
    by their sum. scaling: multiplies the weights. shared_width: width of all shared experts
    together, 0 for none.
    """

    experts: int
    top_k: int
    width: int
    shared_width: int = 0
    score: Literal["softmax", "sigmoid"] = "softmax"
    select: Literal["topk", "group_max", "group_top2"] = "topk"
    groups: int = 1
    top_groups: int = 1
    correction_bias: bool = False
    renorm: bool = False
    scaling: float = 1.0
    first_dense: int = 0
    freq: int = 1
    dense_layers: tuple[int, ...] = ()

    def is_moe(self, layer: int) -> bool:
        return (
            layer >= self.first_dense
            and (layer - self.first_dense) % self.freq == 0
            and layer not in self.dense_layers
        )


@dataclass(frozen=True)
class Arch:
    """One model. Widths are elements; max_len tokens; ffn_width is the dense MLP's."""

    family: str
    hidden: int
    layers: int
    vocab: int
    ffn_width: int
    eps: float
    rope: Rope
    attn: GQA | MLA
    moe: MoE | None = None
    tied: bool = False
    mlp_bias: bool = False
    max_len: int = 4096
    dtype: str = "bfloat16"
    eos_ids: tuple[int, ...] = ()

    @property
    def heads(self) -> int:
        return self.attn.heads

    @property
    def kv_heads(self) -> int:
        """Key/value heads that are stored; the MLA latent counts as one."""
        return self.attn.kv_heads if isinstance(self.attn, GQA) else 1

    @property
    def entry_width(self) -> int:
        """Elements of a whole cached row of one layer (all KV heads)."""
        if isinstance(self.attn, MLA):
            return self.attn.kv_lora + self.attn.rope
        return 2 * self.attn.kv_heads * self.attn.head_dim
