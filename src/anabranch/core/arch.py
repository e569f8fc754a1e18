"""Facts about a model, read from its config.json: sizes and rules, no tensors.

Owns the words in which every family is described; `models` builds from them, `core.resolve` checks
layouts against them. Knows nothing of ranks.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal


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

    def entry(self, kv_heads: int) -> int:
        """Elements of a cached row of one layer that holds `kv_heads` heads."""
        return 2 * kv_heads * self.head_dim

    def elements(self, hidden: int) -> int:
        """Elements of one layer's projections."""
        return 2 * hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def pair_products(self) -> int:
        """Multiplications of one row with one cached position in one layer."""
        return 2 * self.heads * self.head_dim


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
    kv_heads: ClassVar[int] = 1
    windows: ClassVar[tuple[int | None, ...]] = ()

    def entry(self, kv_heads: int) -> int:
        return self.kv_lora + self.rope

    def elements(self, hidden: int) -> int:
        head = self.nope + self.rope
        q = hidden * self.heads * head
        if self.q_lora is not None:
            q = self.q_lora * (hidden + self.heads * head)
        kv = self.entry(1) * hidden + self.kv_lora * self.heads * (self.nope + self.v)
        return q + kv + self.heads * self.v * hidden

    @property
    def pair_products(self) -> int:
        return self.heads * (self.nope + self.rope + self.v)

    def computed(self, heads: int) -> int:
        """Elements of the keys and values of some heads that one cached row is expanded to."""
        return heads * (self.nope + self.v)

    @property
    def expand_from(self) -> int | None:
        """Query rows from which keys and values computed from latents take fewer multiplications
        than queries and outputs in the latent space; None if no number of rows does.

        Of a head, a key costs L * (N + V) once, and a pair 2 * L + R in place of N + R + V.
        """
        saved = 2 * self.kv_lora - self.nope - self.v
        return -(-self.kv_lora * (self.nope + self.v) // saved) if saved > 0 else None


@dataclass(frozen=True)
class SharedKV:
    """One cached head that is key and value of all query heads, with sinks and a grouped output
    projection (DeepSeek-V4 without compressors).

    rope: trailing elements of a head that are rotated (and rotated back in the output). o_groups:
    groups of heads, each projected to o_lora on its own before the common projection.
    """

    heads: int
    head_dim: int
    rope: int
    q_lora: int
    o_groups: int
    o_lora: int
    scale: float
    windows: tuple[int | None, ...] = ()
    kv_heads: ClassVar[int] = 1

    @property
    def group(self) -> int:
        """Heads of one output group."""
        return self.heads // self.o_groups

    def entry(self, kv_heads: int) -> int:
        return self.head_dim

    def elements(self, hidden: int) -> int:
        q = self.q_lora * (hidden + self.heads * self.head_dim)
        o = self.o_lora * (self.heads * self.head_dim + self.o_groups * hidden)
        return q + self.head_dim * hidden + o

    @property
    def pair_products(self) -> int:
        return 2 * self.heads * self.head_dim


@dataclass(frozen=True)
class Gate:
    """act(gate) * (up + shift), act(g) = g * sigmoid(alpha * g); with a limit, gate is first cut
    above it and up on both sides (gpt-oss, DeepSeek-V4)."""

    limit: float | None = None
    alpha: float = 1.0
    shift: float = 0.0


@dataclass(frozen=True)
class Hyper:
    """Hyper-connections: n residual streams, mixed by a doubly stochastic matrix (Sinkhorn)."""

    streams: int
    iterations: int
    eps: float


@dataclass(frozen=True)
class MoE:
    """Mixture of experts in the layers `first_dense`, first_dense + freq, ... (others are dense).

    score: of the router logits; sqrtsoftplus is sqrt(log(1 + e^x)). select: plain top-k;
    group_max: groups ranked by their best score (DeepSeek-V2 group_limited_greedy); group_top2: by
    the sum of their two best corrected scores (noaux_tc). correction_bias: added for selection
    only. renorm: weights divided by their sum. scaling: multiplies the weights. shared_width:
    width of all shared experts together, 0 for none.
    """

    experts: int
    top_k: int
    width: int
    shared_width: int = 0
    score: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    select: Literal["topk", "group_max", "group_top2"] = "topk"
    groups: int = 1
    top_groups: int = 1
    correction_bias: bool = False
    renorm: bool = False
    scaling: float = 1.0
    first_dense: int = 0
    freq: int = 1
    dense_layers: tuple[int, ...] = ()
    gate: Gate = Gate()
    bias: bool = False
    hash_layers: int = 0

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
    attn: GQA | MLA | SharedKV
    moe: MoE | None = None
    hyper: Hyper | None = None
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
        """Key/value heads that are stored; a latent or a shared entry counts as one."""
        return self.attn.kv_heads

    @property
    def windows(self) -> tuple[int, ...]:
        """The distinct sliding windows of the layers."""
        return tuple(sorted({w for w in self.attn.windows if w is not None}))

    @property
    def entry_width(self) -> int:
        """Elements of a whole cached row of one layer (all KV heads)."""
        return self.attn.entry(self.attn.kv_heads)
