"""How rows meet their experts on other ranks: all rows everywhere, or only where they are routed.

Both take residual rows with their ids and weights (the router has run) and give residual rows back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from anabranch.comm.group import Group
from anabranch.nn.boundary import enter_ffn, enter_rows, leave_ffn, leave_rows
from anabranch.nn.moe.experts import Experts
from anabranch.nn.step import StepInputs

Beside = Callable[[Tensor], Tensor]
"""Rows [M, d] -> partial output [M, d] of a block that is cut by width over every rank."""


class Dispatcher(Protocol):
    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        experts: Experts,
        step: StepInputs,
        beside: Beside | None,
    ) -> Tensor:
        """x [M, d], ids int64 [M, k], weights fp32 [M, k] -> routed output [M, d], with that of
        `beside` added."""
        ...


@dataclass(frozen=True)
class GatherDispatch:
    """Rows of all ranks are gathered with their ids and weights; the partial sums are scattered
    back.
    """

    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        experts: Experts,
        step: StepInputs,
        beside: Beside | None,
    ) -> Tensor:
        routes = torch.cat((ids.to(torch.int32), weights.view(torch.int32)), dim=1)
        x, routes = enter_ffn(step, x), enter_ffn(step, routes)
        ids, weights = routes.chunk(2, dim=1)
        part = experts(x, ids.long(), weights.contiguous().view(torch.float32))
        return leave_ffn(step, part if beside is None else part + beside(x))


@dataclass(frozen=True)
class AllToAllDispatch:
    """Each row goes once to every rank that holds (a slice of) one of its experts, and its partial
    results come back and are summed in member order, in fp32.

    holder: int64 [experts, etp]: the ranks that hold each expert. Counts are data: they travel
    first.
    """

    group: Group
    holder: Tensor

    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        experts: Experts,
        step: StepInputs,
        beside: Beside | None,
    ) -> Tensor:
        y = None if beside is None else leave_ffn(step, beside(enter_ffn(step, x)))
        x, ids, weights = enter_rows(step, x), enter_rows(step, ids), enter_rows(step, weights)
        wanted = torch.zeros(len(x), self.group.size, dtype=torch.bool)
        wanted.scatter_(1, self.holder[ids].flatten(1), True)
        row = wanted.t().nonzero()[:, 1]
        send = wanted.sum(0)
        ones = [1] * self.group.size
        recv = self.group.all_to_all(send, ones, ones)
        there, back = send.tolist(), recv.tolist()
        sent = (
            self.group.all_to_all(t.index_select(0, row), there, back) for t in (x, ids, weights)
        )
        out = self.group.all_to_all(experts(*sent), back, there)
        total = torch.zeros(x.shape, dtype=torch.float32)
        at = 0
        for n in there:
            total.index_add_(0, row[at : at + n], out[at : at + n].float())
            at += n
        routed = leave_rows(step, total.to(x.dtype))
        return routed if y is None else routed + y
