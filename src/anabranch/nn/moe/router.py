"""Which experts a row goes to, and with what weight. Runs in fp32 on residual rows.

Rules: softmax top-k with and without renormalisation (Qwen, DeepSeek-V2), groups ranked by their
best score (DeepSeek-V2, arXiv 2405.04434), groups ranked by their two best bias-corrected sigmoid
scores (DeepSeek-V3 noaux_tc, arXiv 2412.19437).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.core.arch import MoE


@dataclass(frozen=True)
class Router:
    """weight [experts, d]; bias [experts] fp32 corrects scores for selection only."""

    moe: MoE
    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [M, d] -> (ids int64 [M, k], weights fp32 [M, k])."""
        logits = torch.nn.functional.linear(x.float(), self.weight.float())
        scores = logits.softmax(-1) if self.moe.score == "softmax" else logits.sigmoid()
        chosen = scores if self.bias is None else scores + self.bias
        if self.moe.select != "topk":
            chosen = self._keep_groups(chosen)
        ids = chosen.topk(self.moe.top_k, dim=-1, sorted=False).indices
        weights = scores.gather(-1, ids)
        if self.moe.renorm:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids, weights * self.moe.scaling

    def _keep_groups(self, scores: Tensor) -> Tensor:
        """Scores outside the best groups are dropped."""
        grouped = scores.unflatten(-1, (self.moe.groups, -1))
        if self.moe.select == "group_max":
            rank = grouped.amax(-1)
        else:
            rank = grouped.topk(2, dim=-1).values.sum(-1)
        best = rank.topk(self.moe.top_groups, dim=-1, sorted=False).indices
        keep = torch.zeros_like(rank, dtype=torch.bool).scatter_(1, best, True)
        return grouped.masked_fill(~keep.unsqueeze(-1), -torch.inf).flatten(1)
