"""From the tensors of a rank to its `Decoder`: views per phase are made here, once, and never
change.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from anabranch.comm.group import Group
from anabranch.core.arch import GQA, MLA, Arch, Gate
from anabranch.core.plan import Phase
from anabranch.layout.choice import Place
from anabranch.layout.mesh import CP, EVERY, Axes
from anabranch.layout.ownership import within
from anabranch.layout.phases import Exchange as Kind
from anabranch.layout.phases import Form, Heads
from anabranch.models.decoder import Attention, Decoder, Ends, Ffn, Layer, OneStream
from anabranch.nn.attention.exchange import (
    Exchange,
    FusedRoute,
    GatherScatterRoute,
    InPlace,
    KvToQ,
    LseOnly,
    PackRoute,
    QToKv,
    Route,
)
from anabranch.nn.attention.gqa import GqaAttention, GqaPhase
from anabranch.nn.attention.kernel import ExpandedKernel, GqaKernel, LatentKernel
from anabranch.nn.attention.mla import MlaAttention, MlaPhase
from anabranch.nn.boundary import Add, Combine
from anabranch.nn.ffn import DenseFfn, GatedMlp, MoeFfn
from anabranch.nn.linear import ColumnBlocks, Dense
from anabranch.nn.moe.dispatch import AllToAllDispatch, Dispatcher, GatherDispatch
from anabranch.nn.moe.experts import Experts
from anabranch.nn.moe.router import Router, TopKRouter
from anabranch.nn.norm import RMSNorm
from anabranch.nn.rotary import Rotary
from anabranch.nn.vocab import Embedding, Head
from anabranch.ops import Ops

SILU = Gate()


@dataclass(frozen=True)
class Builder:
    """Makes the modules of one rank. `weights` are finished: by recipe name.

    A family with blocks of its own derives from it and replaces `attention`, `router`, `join` or
    `ends`.
    """

    arch: Arch
    place: Place
    ops: Ops
    weights: Mapping[str, Tensor]
    group_of: Callable[[Axes], Group]
    device: torch.device
    max_len: int

    def decoder(self) -> Decoder:
        start, _ = self.place.embedding(self.arch.vocab)
        group = self.place.head_group()
        counts = []
        for rank in group:
            low, high = self.place.head(self.arch.vocab, rank)
            counts.append(high - low)
        axes = EVERY if self.place.layout.lm_head == "all" else EVERY - {"dp"}
        whole = self.place.layout.embedding == "whole"
        return Decoder(
            Embedding(self.weights["embed"], start, whole),
            tuple(self._layer(i) for i in range(self.arch.layers)),
            self.norm("norm"),
            Head(self.weights["head"], self.group_of(axes), tuple(counts), self.ops.linear),
            Rotary(self.arch.rope, self.max_len, self.device),
            self.ends(),
        )

    def ends(self) -> Ends:
        return OneStream()

    def join(self, layer: int, block: str) -> Combine:
        """How the output of a layer's `block`, "attn" or "ffn", joins the residual rows."""
        return Add()

    def attention(self, layer: int) -> Attention:
        name = f"layers.{layer}.attn"
        if isinstance(self.arch.attn, GQA):
            return self._gqa(self.arch.attn, layer, name)
        assert isinstance(self.arch.attn, MLA), self.arch.family
        return self._mla(self.arch.attn, name)

    def router(self, layer: int) -> Router:
        name = f"layers.{layer}.moe.router"
        assert self.arch.moe is not None
        return TopKRouter(
            self.arch.moe,
            self.weights[name],
            self.weights.get(f"{name}_bias"),
            self.weights.get(f"{name}_correction"),
        )

    def norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.weights[name], self.arch.eps, self.ops.rms_norm)

    def linear(self, name: str) -> Dense:
        return Dense(self.weights[name], self.weights.get(f"{name}_bias"), self.ops.linear)

    def _layer(self, index: int) -> Layer:
        name = f"layers.{index}"
        moe = self.arch.moe is not None and self.arch.moe.is_moe(index)
        ffn: Ffn = self._moe(index) if moe else DenseFfn(self._gated(f"{name}.mlp"))
        return Layer(
            self.norm(f"{name}.attn_norm"),
            self.attention(index),
            self.norm(f"{name}.ffn_norm"),
            ffn,
            self.weights.get(f"{name}.attn.o_bias"),
            self.join(index, "attn"),
            self.join(index, "ffn"),
        )

    # attention ---------------------------------------------------------------------------------

    def slices(self, form: Form) -> tuple[range, range]:
        """Heads whose queries are computed here, and heads whose outputs are projected here."""
        outputs = self.place.heads if form.heads is Heads.RESIDENT else self.place.owned
        group = form.exchange is Kind.Q_TO_KV and self.place.layout.dcp_q == "replicate"
        return (self.place.query_heads if group else outputs), outputs

    def _kernel_heads(self, form: Form) -> tuple[int, ...] | range:
        """Heads of the queries that meet entries on this rank, in order."""
        if form.exchange is Kind.Q_TO_KV:
            return self.place.own.group_heads(self.place.rank)
        return self.slices(form)[1]

    def exchange(self, form: Form) -> Exchange:
        stripes = self.group_of(self.place.own.stripe_axes)
        if form.exchange is Kind.NONE:
            return InPlace()
        if form.exchange is Kind.FRESH:
            return InPlace(self.group_of(CP))
        if form.exchange is Kind.KV_TO_Q:
            way = self.place.layout.kv_to_q
            return KvToQ(self.group_of(CP), stripes, ring=way == "ring", expand=way == "expand")
        if form.exchange is Kind.LSE:
            return LseOnly(stripes)
        if self.place.layout.dcp_q == "replicate":
            mesh = self.place.layout.mesh
            return QToKv(stripes, self._route(stripes), (mesh.ts, mesh.cp))
        return QToKv(stripes, self._route(stripes))

    def _route(self, stripes: Group) -> Route:
        name = self.place.layout.dcp_exchange
        if name == "ag_rs":
            return GatherScatterRoute(stripes)
        if name == "fused":
            assert stripes.accepts("merge_partials"), "resolve lets only such transports through"
            return FusedRoute(stripes)
        return PackRoute(stripes, self.ops, flashinfer=name == "flashinfer")

    def forms(self) -> dict[Phase, Form]:
        layout = self.place.layout
        return {Phase.PREFILL: layout.prefill, Phase.DECODE: layout.decode}

    def _gqa(self, attn: GQA, index: int, name: str) -> GqaAttention:
        width = attn.head_dim
        q, o = self.linear(f"{name}.q"), ColumnBlocks(self.weights[f"{name}.o"], self.ops.linear)
        window = attn.windows[index] if attn.windows else None
        sinks = self.weights.get(f"{name}.sinks")
        phases = {}
        for phase, form in self.forms().items():
            queries, outputs = self.slices(form)
            heads = torch.tensor(
                self.place.own.kv_map(self.place.rank, self._kernel_heads(form)),
                dtype=torch.int32,
                device=self.device,
            )
            low, high = within(outputs, self.place.heads)
            first, last = within(queries, self.place.query_heads)
            phases[phase] = GqaPhase(
                q.rows(first * width, last * width),
                o.columns(low * width, high * width),
                GqaKernel(self.ops, heads, width, attn.scale, window),
                self.exchange(form),
                None if sinks is None else sinks[low:high],
            )
        return GqaAttention(
            self.linear(f"{name}.k"),
            self.linear(f"{name}.v"),
            phases,
            width,
            self.norm(f"{name}.q_norm") if attn.qk_norm else None,
            self.norm(f"{name}.k_norm") if attn.qk_norm else None,
        )

    def _mla(self, attn: MLA, name: str) -> MlaAttention:
        head = attn.nope + attn.rope
        q, o = self.linear(f"{name}.q"), ColumnBlocks(self.weights[f"{name}.o"], self.ops.linear)
        kv_b = self.weights[f"{name}.kv_b"]
        zeros = torch.zeros(attn.heads, dtype=torch.int32, device=self.device)
        phases = {}
        for phase, form in self.forms().items():
            queries, outputs = self.slices(form)
            first, last = within(queries, self.place.query_heads)
            low, high = within(outputs, self.place.query_heads)
            at, to = within(outputs, self.place.heads)
            own = kv_b[low:high]
            each = torch.arange(high - low, dtype=torch.int32, device=self.device)
            phases[phase] = MlaPhase(
                q.rows(first * head, last * head),
                kv_b[first:last, : attn.nope],
                own[:, attn.nope :],
                o.columns(at * attn.v, to * attn.v),
                LatentKernel(self.ops, zeros, attn.kv_lora, attn.scale),
                ExpandedKernel(self.ops, own, each, attn.nope, attn.scale),
                self.exchange(form),
                attn.expand_from if form.exchange is Kind.KV_TO_Q else None,
            )
        return MlaAttention(
            None if attn.q_lora is None else self.linear(f"{name}.q_a"),
            None if attn.q_lora is None else self.norm(f"{name}.q_a_norm"),
            self.linear(f"{name}.kv_a"),
            self.norm(f"{name}.kv_a_norm"),
            phases,
            attn.nope,
            attn.kv_lora,
        )

    # feed-forward ------------------------------------------------------------------------------

    def _gated(self, name: str, gate: Gate = SILU) -> GatedMlp:
        down = Dense(self.weights[f"{name}.down"], product=self.ops.linear)
        act = partial(self.ops.gated, limit=gate.limit, alpha=gate.alpha, shift=gate.shift)
        return GatedMlp(
            self.linear(f"{name}.gate_up"), down, act, self.weights.get(f"{name}.down_bias")
        )

    def _moe(self, layer: int) -> MoeFfn:
        spec, name = self.arch.moe, f"layers.{layer}.moe"
        assert spec is not None
        first, _ = self.place.experts(spec.experts)
        dispatch: Dispatcher = GatherDispatch()
        if self.place.layout.moe_dispatch == "a2a":
            holders = torch.tensor(self.place.holders(spec.experts), device=self.device)
            dispatch = AllToAllDispatch(self.group_of(EVERY), holders)
        experts = Experts(
            self.ops.run_experts,
            first,
            self.weights[f"{name}.gate_up"],
            self.weights[f"{name}.down"],
            spec.gate,
            self.weights.get(f"{name}.gate_up_bias"),
            self.weights.get(f"{name}.down_bias"),
        )
        return MoeFfn(
            self.router(layer),
            experts,
            dispatch,
            self._gated(f"{name}.shared", spec.gate) if spec.shared_width else None,
            self.place.layout.shared_experts == "sharded",
        )
