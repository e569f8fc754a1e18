"""The gated activation of feed-forward blocks (SwiGLU, arXiv 2002.05202, and its clamped forms)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.core.arch import Gate


def gated(gate: Gate, both: Tensor) -> Tensor:
    """both [M, 2 * w], gate columns then up columns -> [M, w]. See `core.arch.Gate`."""
    g, up = both.chunk(2, dim=-1)
    if gate.limit is not None:
        g, up = g.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
    act = F.silu(g) if gate.alpha == 1.0 else g * torch.sigmoid(g * gate.alpha)
    return act * (up + gate.shift if gate.shift else up)
