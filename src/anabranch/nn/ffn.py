"""Feed-forward blocks on residual rows: dense, and mixture of experts."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from anabranch.nn.boundary import enter_ffn, leave_ffn
from anabranch.nn.linear import Linear
from anabranch.nn.moe.dispatch import Dispatcher
from anabranch.nn.moe.experts import Experts
from anabranch.nn.moe.router import Router
from anabranch.nn.step import StepInputs


@dataclass(frozen=True)
class GatedMlp:
    """down(act(gate(x)) * up(x)), or a slice of its width. gate_up: gate rows, then up rows.

    gated: both halves [M, 2 * w] -> [M, w], see `ops.signatures.Gated`.
    """

    gate_up: Linear
    down: Linear
    gated: Callable[[Tensor], Tensor]
    bias: Tensor | None = None

    def slice(self, x: Tensor) -> Tensor:
        return self.down(self.gated(self.gate_up(x)))


@dataclass(frozen=True)
class DenseFfn:
    """Cut by width over every rank. `mlp.bias` of the row-parallel half is added once, after the
    sum.
    """

    mlp: GatedMlp

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        y = leave_ffn(step, self.mlp.slice(enter_ffn(step, x)))
        return y if self.mlp.bias is None else y + self.mlp.bias


@dataclass(frozen=True)
class MoeFfn:
    """Routed experts, and shared ones that every row passes.

    shared_cut: the shared experts are cut by width over every rank (their sum is owed), otherwise
    every rank holds them whole and runs them on its residual rows.
    """

    router: Router
    experts: Experts
    dispatch: Dispatcher
    shared: GatedMlp | None = None
    shared_cut: bool = False

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        ids, weights = self.router(x, step)
        cut = self.shared.slice if self.shared is not None and self.shared_cut else None
        y = self.dispatch(x, ids, weights, self.experts, step, cut)
        return y if self.shared is None or self.shared_cut else y + self.shared.slice(x)
