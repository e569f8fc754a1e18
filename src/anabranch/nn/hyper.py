"""Hyper-connections (DeepSeek-V4): the residual rows are n streams, [M, n, d].

A block reads a weighed sum of the streams; its output is added to each of them with a weight, and
the streams are mixed by a doubly stochastic matrix. All weights are computed from the streams, in
fp32. This is the boundary's combine: moves and blocks see rows [M, d] as in every other model.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.core.arch import Hyper
from anabranch.nn.norm import unit_rms


@dataclass(frozen=True)
class HyperConnection:
    """A `boundary.Combine`. fn [(2 + n) * n, n * d], base [(2 + n) * n], scale [3], all fp32.

    norm_eps: of the norm over all streams of a row. Its carry is [M, n, n + 1]: how much of the
    block's output each stream takes, and how much of each old stream (arXiv 2512.24880).
    """

    hyper: Hyper
    fn: Tensor
    base: Tensor
    scale: Tensor
    norm_eps: float

    def read(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        n, eps = self.hyper.streams, self.hyper.eps
        sizes = [n, n, n * n]
        raw = F.linear(unit_rms(x.flatten(1).float(), self.norm_eps), self.fn)
        parts = zip(
            torch.split(raw, sizes, dim=-1), self.scale, torch.split(self.base, sizes), strict=True
        )
        take, give, mix = (part * scale + base for part, scale, base in parts)
        post = 2 * torch.sigmoid(give)
        mixed = self._balanced(torch.unflatten(mix, -1, (n, n)))
        return _weighed(torch.sigmoid(take) + eps, x), torch.cat((post.unsqueeze(-1), mixed.mT), -1)

    def write(self, x: Tensor, y: Tensor, carry: Tensor | None) -> Tensor:
        assert carry is not None
        post, mix = carry[..., :1].to(x.dtype), carry[..., 1:].to(x.dtype)
        return post * y.unsqueeze(1) + mix @ x

    def _balanced(self, logits: Tensor) -> Tensor:
        """[M, n, n] -> rows and columns that sum to 1 (Sinkhorn-Knopp), last over columns."""
        eps = self.hyper.eps
        comb = torch.softmax(logits, dim=-1) + eps
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
        for _ in range(self.hyper.iterations - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + eps)
            comb = comb / (comb.sum(-2, keepdim=True) + eps)
        return comb


@dataclass(frozen=True)
class HyperEnds:
    """How a model opens and closes its streams. fn [n, n * d], base [n], scale [1], all fp32."""

    hyper: Hyper
    fn: Tensor
    base: Tensor
    scale: Tensor
    norm_eps: float

    def open(self, rows: Tensor) -> Tensor:
        """Embedded rows [M, d] -> streams [M, n, d], all alike."""
        return rows.unsqueeze(1).repeat(1, self.hyper.streams, 1)

    def close(self, x: Tensor) -> Tensor:
        """Streams [M, n, d] -> what the last norm sees, [M, d]."""
        mixes = F.linear(unit_rms(x.flatten(1).float(), self.norm_eps), self.fn)
        return _weighed(torch.sigmoid(mixes * self.scale + self.base) + self.hyper.eps, x)


def _weighed(weights: Tensor, x: Tensor) -> Tensor:
    """weights [M, n] fp32, streams [M, n, d] -> [M, d] of the streams' dtype."""
    return (weights.unsqueeze(-1) * x).sum(1).to(x.dtype)
