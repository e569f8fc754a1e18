"""The experts a rank holds: rows in, the weighed sum of its experts' (slices') outputs out."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Experts:
    """Experts [first, first + E) of the model, or a width slice of them.

    gate_up [E, 2 * w, d] (gate rows, then up rows), down [E, d, w].
    """

    first: int
    gate_up: Tensor
    down: Tensor

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
                out = expert(x.index_select(0, rows), self.gate_up[local], self.down[local])
                total.index_add_(0, rows, out.float() * weights.view(-1, 1).index_select(0, pairs))
            at += n
        return total.to(x.dtype)


def expert(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """silu(x G^T) * (x U^T), projected down (SwiGLU)."""
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)
