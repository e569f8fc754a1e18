"""Token ids to rows and rows to logits, whole or cut by vocabulary (odd sizes included)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.comm.group import Group
from anabranch.ops.reference.products import linear as plain
from anabranch.ops.signatures import Linear as Product


@dataclass(frozen=True)
class Embedding:
    """weight [stop - start, d] of ids [start, stop); rows of other ids are zero (a sum is owed)."""

    weight: Tensor
    start: int
    whole: bool

    def __call__(self, ids: Tensor) -> Tensor:
        """ids int64 [M] -> [M, d]."""
        if self.whole:
            return F.embedding(ids, self.weight)
        local = ids - self.start
        mine = (local >= 0) & (local < len(self.weight))
        rows = F.embedding(torch.where(mine, local, 0), self.weight)
        return torch.where(mine.unsqueeze(-1), rows, 0)


@dataclass(frozen=True)
class Head:
    """weight [own vocabulary, d]; `counts` is the vocabulary of each member of `group`."""

    weight: Tensor
    group: Group
    counts: tuple[int, ...]
    product: Product = plain

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, d], the same rows on every member -> logits fp32 [n, vocab], equal on every
        member.
        """
        local = self.product(x, self.weight)
        if self.group.size == 1:
            return local.float()
        return self.group.all_gather(local.t().contiguous(), self.counts).t().float()
