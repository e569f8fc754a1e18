"""The modules of DeepSeek-V4 (without compressors) on one rank: attention, joins and routers."""

from dataclasses import dataclass

import torch

from anabranch.core.arch import SharedKV
from anabranch.layout.ownership import within
from anabranch.models.build import Builder
from anabranch.models.decoder import Attention, Ends
from anabranch.nn.attention.kernel import LatentKernel
from anabranch.nn.attention.shared import GroupedOutput, SharedAttention, SharedPhase
from anabranch.nn.boundary import Combine
from anabranch.nn.hyper import HyperConnection, HyperEnds
from anabranch.nn.moe.router import HashRouter, Router


@dataclass(frozen=True)
class V4Builder(Builder):
    """Made from the parameters of `deepseek_v4.recipe`."""

    def attention(self, layer: int) -> Attention:
        attn, name, place = self.arch.attn, f"layers.{layer}.attn", self.place
        assert isinstance(attn, SharedKV)
        width = attn.head_dim
        zeros = torch.zeros(attn.heads, dtype=torch.int32, device=self.device)
        kernel = LatentKernel(self.ops, zeros, width, attn.scale, attn.windows[layer])
        whole_o = GroupedOutput(self.weights[f"{name}.o_a"], self.linear(f"{name}.o_b"))
        phases = {}
        for phase, form in self.forms().items():
            queries, outputs = self.slices(form)
            first, last = within(queries, place.query_heads)
            low, high = within(outputs, place.heads)
            phases[phase] = SharedPhase(
                self.linear(f"{name}.q").rows(first * width, last * width),
                whole_o.heads(low, high, width),
                self.weights[f"{name}.sinks"][low:high],
                kernel,
                self.exchange(form),
            )
        return SharedAttention(
            self.linear(f"{name}.q_a"),
            self.norm(f"{name}.q_a_norm"),
            self.linear(f"{name}.kv"),
            self.norm(f"{name}.kv_norm"),
            phases,
            width,
            self.arch.eps,
        )

    def router(self, layer: int) -> Router:
        spec, name = self.arch.moe, f"layers.{layer}.moe.router"
        assert spec is not None
        if layer >= spec.hash_layers:
            return super().router(layer)
        return HashRouter(spec, self.weights[name], self.weights[f"{name}_table"])

    def join(self, layer: int, block: str) -> Combine:
        assert self.arch.hyper is not None
        return HyperConnection(
            self.arch.hyper, *self._mixed(f"layers.{layer}.{block}_join"), self.arch.eps
        )

    def ends(self) -> Ends:
        assert self.arch.hyper is not None
        return HyperEnds(self.arch.hyper, *self._mixed("ends"), self.arch.eps)

    def _mixed(self, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        fn, base, scale = (self.weights[f"{name}.{part}"] for part in ("fn", "base", "scale"))
        return fn, base, scale
