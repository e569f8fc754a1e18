"""Which experts a row goes to, and with what weight. Runs in fp32 on residual rows.

Rules: softmax top-k with and without renormalisation (Qwen, DeepSeek-V2; renormalised it is
gpt-oss's softmax over the chosen logits), groups ranked by their best score (DeepSeek-V2, arXiv
2405.04434), groups ranked by their two best bias-corrected sigmoid scores (DeepSeek-V3 noaux_tc,
arXiv 2412.19437), experts by token id (the first layers of DeepSeek-V4).
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.core.arch import MoE
from anabranch.nn.step import StepInputs


class Router(Protocol):
    def __call__(self, x: Tensor, step: StepInputs) -> tuple[Tensor, Tensor]:
        """x [M, d], this rank's residual rows -> (ids int64 [M, k], weights fp32 [M, k])."""
        ...


def _scores(moe: MoE, logits: Tensor) -> Tensor:
    if moe.score == "softmax":
        return logits.softmax(-1)
    return logits.sigmoid() if moe.score == "sigmoid" else F.softplus(logits).sqrt()


def _weights(moe: MoE, scores: Tensor, ids: Tensor) -> Tensor:
    weights = scores.gather(-1, ids)
    if moe.renorm:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * moe.scaling


@dataclass(frozen=True)
class HashRouter:
    """weight [experts, d]; table int64 [vocab, k]: the experts of each token id."""

    moe: MoE
    weight: Tensor
    table: Tensor

    def __call__(self, x: Tensor, step: StepInputs) -> tuple[Tensor, Tensor]:
        assert step.row_ids is not None
        ids = self.table.index_select(0, step.row_ids)
        scores = _scores(self.moe, F.linear(x.float(), self.weight.float()))
        return ids, _weights(self.moe, scores, ids)


@dataclass(frozen=True)
class TopKRouter:
    """weight [experts, d], bias [experts]; correction [experts] fp32 is for selection only."""

    moe: MoE
    weight: Tensor
    bias: Tensor | None = None
    correction: Tensor | None = None

    def __call__(self, x: Tensor, step: StepInputs) -> tuple[Tensor, Tensor]:
        scores = _scores(self.moe, F.linear(x.float(), self.weight.float(), self.bias))
        chosen = scores if self.correction is None else scores + self.correction
        if self.moe.select != "topk":
            chosen = self._keep_groups(chosen)
        ids = chosen.topk(self.moe.top_k, dim=-1, sorted=False).indices
        return ids, _weights(self.moe, scores, ids)

    def _keep_groups(self, scores: Tensor) -> Tensor:
        """Scores outside the best groups are dropped."""
        grouped = torch.unflatten(scores, -1, (self.moe.groups, -1))
        if self.moe.select == "group_max":
            rank = grouped.amax(-1)
        else:
            rank = grouped.topk(2, dim=-1).values.sum(-1)
        best = rank.topk(self.moe.top_groups, dim=-1, sorted=False).indices
        keep = torch.zeros_like(rank, dtype=torch.bool).scatter_(1, best, True)
        return grouped.masked_fill(~keep.unsqueeze(-1), -torch.inf).flatten(1)
