"""The experts a rank holds: rows in, the weighed sum of its experts' (slices') outputs out."""

from dataclasses import dataclass

from torch import Tensor

from anabranch.core.arch import Gate
from anabranch.ops.signatures import RunExperts


@dataclass(frozen=True)
class Experts:
    """Experts [first, first + E) of the model, or a width slice of them.

    gate_up [E, 2 * w, d] (gate rows, then up rows), down [E, d, w]. gate_up_bias [E, 2 * w];
    down_bias [E, d] on one holder of each expert only, so that it enters the sum once.
    """

    run: RunExperts
    first: int
    gate_up: Tensor
    down: Tensor
    gate: Gate = Gate()
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [M, d], ids int64 [M, k] of the whole model, weights fp32 [M, k] -> [M, d] partial."""
        return self.run(
            x, ids, weights, first=self.first, gate_up=self.gate_up, down=self.down,
            limit=self.gate.limit, alpha=self.gate.alpha, shift=self.gate.shift,
            gate_up_bias=self.gate_up_bias, down_bias=self.down_bias,
        )  # fmt: skip
