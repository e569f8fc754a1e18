"""References of the ops around attention: rms_norm, gated, linear, run_experts.

Owns what they mean; knows nothing of ranks, routers or checkpoints.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``signatures.RmsNorm``."""
    if x.dtype is torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def gated(
    both: Tensor, *, limit: float | None = None, alpha: float = 1.0, shift: float = 0.0
) -> Tensor:
    """See ``signatures.Gated``."""
    g, up = both.chunk(2, dim=-1)
    if limit is not None:
        g, up = g.clamp(max=limit), up.clamp(-limit, limit)
    act = F.silu(g) if alpha == 1.0 else g * torch.sigmoid(g * alpha)
    return act * (up + shift if shift else up)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See ``signatures.Linear``."""
    return F.linear(x, weight, bias)


def run_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    *,
    first: int,
    gate_up: Tensor,
    down: Tensor,
    limit: float | None = None,
    alpha: float = 1.0,
    shift: float = 0.0,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """See ``signatures.RunExperts``. Rows are taken expert by expert."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    local = ids.flatten() - first
    elsewhere = (local < 0) | (local >= len(down))
    local = local.masked_fill(elsewhere, len(down))  # behind those that are here
    order = local.argsort(stable=True)
    counts = torch.bincount(local, minlength=len(down) + 1).tolist()
    at = 0
    for expert, n in enumerate(counts[:-1]):
        if n:
            pairs = order[at : at + n]
            rows = pairs // ids.shape[1]
            both = F.linear(x.index_select(0, rows), gate_up[expert], _row(gate_up_bias, expert))
            hidden = gated(both, limit=limit, alpha=alpha, shift=shift)
            out = F.linear(hidden, down[expert], _row(down_bias, expert))
            total.index_add_(0, rows, out.float() * weights.view(-1, 1).index_select(0, pairs))
        at += n
    return total.to(x.dtype)


def _row(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]
