"""The experts a rank holds: rows in, the weighed sum of its experts' (slices') outputs out."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.core.arch import Gate
from anabranch.nn.gate import gated


@dataclass(frozen=True)
class Experts:
    """Experts [first, first + E) of the model, or a width slice of them.

    gate_up [E, 2 * w, d] (gate rows, then up rows), down [E, d, w]. gate_up_bias [E, 2 * w];
    down_bias [E, d] on one holder of each expert only, so that it enters the sum once.
    """

    first: int
    gate_up: Tensor
    down: Tensor
    gate: Gate = Gate()
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [M, d], ids int64 [M, k] of the whole model, weights fp32 [M, k] -> [M, d] partial.

        Rows are taken expert by expert; each row's sum runs in expert order, in fp32.
        """
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.first + len(self.down)).tolist()
        at = sum(counts[: self.first])
        for local in range(len(self.down)):
            n = counts[self.first + local]
            if n:
                pairs = order[at : at + n]
                rows = pairs // ids.shape[1]
                out = self._expert(x.index_select(0, rows), local)
                total.index_add_(0, rows, out.float() * weights.view(-1, 1).index_select(0, pairs))
            at += n
        return total.to(x.dtype)

    def _expert(self, x: Tensor, local: int) -> Tensor:
        both = F.linear(x, self.gate_up[local], _row(self.gate_up_bias, local))
        return F.linear(gated(self.gate, both), self.down[local], _row(self.down_bias, local))


def _row(bias: Tensor | None, local: int) -> Tensor | None:
    return None if bias is None else bias[local]
