"""The call signature of every op, as protocols.

Owns the words of the contract between an op's callers and its providers: shapes, units and what
is refused. Knows no provider. Shape letters: N members, B rows, h heads of one member, Hg = N*h
heads of the group, D width of one head, T query rows, S keys, W elements of a pool entry.

A user's mistake is a ``ValueError`` with the numbers, and is the same for every provider.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

from torch import Tensor

Base = Literal["e", "2"]
Direction = Literal["scatter", "gather"]


class CopyRows(Protocol):
    """Copy up to ``count`` rows between a buffer and a window of another.

    ``scatter``: ``dst[i] = src[offset + i]``; ``gather``: ``dst[offset + i] = src[i]``; for each i
    in [0, count) for which both rows exist, and for no other. Only dim 0 may be strided: the rest
    of each tensor is one dense run, and trailing shape and dtype are those of the other.
    ``offset`` and ``count`` are ints or 0-dim int tensors on the op's device.
    """

    def __call__(
        self,
        dst: Tensor,
        src: Tensor,
        offset: int | Tensor,
        count: int | Tensor,
        direction: Direction,
    ) -> None: ...


class PackPartials(Protocol):
    """Lay partials out for the members that own their heads, byte for byte.

    ``dst_out[n, b, j] = out[b, n*h + j]`` and ``dst_lse[n, b, j] = lse[b, n*h + j]`` with out
    [B, Hg, D], lse [B, Hg] fp32, dst_out [N, Bcap, h, D] and dst_lse [N, Bcap, h] fp32 views in any
    stride order (last dim of out and dst_out dense). Rows past B are untouched. fp8 travels as
    uint8. The wire's layout is in the strides alone.
    """

    def __call__(self, out: Tensor, lse: Tensor, dst_out: Tensor, dst_lse: Tensor) -> None: ...


class MergePartials(Protocol):
    """One softmax from N partial ones over disjoint keys: (out [B, h, D], lse [B, h] fp32).

    ``partials`` [N, B, h, D] and ``lse`` [N, B, h] fp32 in any strides; ``base`` is the base of the
    given lse, the returned one is a natural log. Weights are exp(lse - max), summed in fp32 in
    member order. NaN and +inf lse count as -inf, a shard of weight 0 is never multiplied, all
    empty gives (0, -inf). ``sink`` [h] fp32 joins as one more shard: out 0, that natural lse.
    ``out`` and ``lse_out`` may be given, in any strides; out is of the partials' dtype or fp32.
    """

    def __call__(
        self,
        partials: Tensor,
        lse: Tensor,
        *,
        base: Base = "e",
        sink: Tensor | None = None,
        out: Tensor | None = None,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...


class SumMembers(Protocol):
    """Sum of the members' equal-shaped parts, in member order, in fp32, rounded once.

    ``parts`` is a tensor [N, rows, ...] or N tensors [rows, ...]; fp32, bf16 or fp16, dense past
    dim 0 of each part. ``out`` [rows, ...] of the same dtype is written and returned.
    """

    def __call__(self, parts: Tensor | Sequence[Tensor], out: Tensor | None = None) -> Tensor: ...


class AttendPaged(Protocol):
    """Decode attention of T query rows over one rank's paged entries: (out, lse).

    q [T, H, Dq]; pool [slots, W], last dim dense; ``page_table`` int32 [T, max_pages]: entry i of
    row t lies in slot ``page_table[t, i // page_slots] * page_slots + i % page_slots``. Row t sees
    entries [start[t], lens[t]), both int32 [T], start 0 when None. ``kv_map`` int32 [H] gives the
    KV head of each query head; ``sink`` [H] fp32 joins the softmax (and the lse) as one more
    score. Scores are multiplied by ``scale``.

    Returns out [T, H, Dv] of q's dtype and lse [T, H] fp32, natural log; no entries: (0, -inf),
    really written. fp32, bf16 and fp16; pool and q of one dtype. Slots not visible may hold NaN.

    GQA: an entry is [2, kv_heads, D], K heads then V heads; Dq = Dv = D.
    MLA: an entry is [latent + rope]; Dq = W, the value is the entry's first ``value_width``
    elements, one KV head.
    """

    def __call__(
        self,
        q: Tensor,
        pool: Tensor,
        page_table: Tensor,
        lens: Tensor,
        *,
        page_slots: int,
        kv_map: Tensor,
        scale: float,
        start: Tensor | None = None,
        sink: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...


class AttendPagedMla(Protocol):
    """``AttendPaged`` over latent entries: one KV head, so no map, but the value's width."""

    def __call__(
        self,
        q: Tensor,
        pool: Tensor,
        page_table: Tensor,
        lens: Tensor,
        *,
        page_slots: int,
        value_width: int,
        scale: float,
        start: Tensor | None = None,
        sink: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...


class AttendRows(Protocol):
    """Dense attention, causal by position (the prefill form): (out [T, H, Dv], lse [T, H] fp32).

    q [T, H, Dq], k [S, kv_heads, Dq], v [S, kv_heads, Dv], strided views with a dense last dim;
    positions q_pos [T] and k_pos [S], int32 or int64, in any order. Row t sees key s when
    ``k_pos[s] <= q_pos[t]`` and, with a window, ``k_pos[s] > q_pos[t] - window``. A key that no
    row sees may hold NaN. The rest as ``AttendPaged``.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_pos: Tensor,
        k_pos: Tensor,
        *,
        kv_map: Tensor,
        scale: float,
        window: int | None = None,
        sink: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...


class RmsNorm(Protocol):
    """x / rms(x) * weight over the last dim (arXiv 1910.07467).

    x [..., d] of rows that are each dense, weight [d] of its dtype. The quotient is an fp32 one,
    rounded to x's dtype before the weight is applied, as the released models' code does it.
    """

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...


class Gated(Protocol):
    """The gated activation of feed-forward blocks (SwiGLU, arXiv 2002.05202, and clamped forms).

    both [M, 2 * w], gate columns then up columns -> [M, w] = act(gate) * (up + shift), where
    act(g) = g * sigmoid(alpha * g); with a limit, gate is first cut above it and up on both sides.
    """

    def __call__(
        self, both: Tensor, *, limit: float | None = None, alpha: float = 1.0, shift: float = 0.0
    ) -> Tensor: ...


class Linear(Protocol):
    """y = x W^T + bias. x [..., in], weight [out, in] of its dtype, any slice of a wider one;
    bias [out] or None -> [..., out]."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...


class RunExperts(Protocol):
    """Rows through the experts they are routed to: the weighed sum of each row's outputs [M, d].

    x [M, d]; ids int64 [M, k] and weights fp32 [M, k]: a row's experts; those outside
    [first, first + E) are somebody else's and add nothing. gate_up [E, 2 * w, d] (gate rows, then
    up rows), down [E, d, w], of x's dtype, last dims dense; biases [E, 2 * w] and [E, d]. The
    activation is `Gated`'s. A row's sum runs in expert order, in fp32.
    """

    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        *,
        first: int,
        gate_up: Tensor,
        down: Tensor,
        limit: float | None = None,
        alpha: float = 1.0,
        shift: float = 0.0,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> Tensor: ...
