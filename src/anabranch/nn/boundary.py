"""Between blocks: the only caller of moves, and how a block's output joins the residual rows.

The residual rows themselves never move; what a block reads is moved in, what it wrote is moved out.
A transport that fuses move, combine and norm replaces functions of this file and nothing else.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from anabranch.nn.step import SegmentInputs, StepInputs


class Combine(Protocol):
    """How blocks read and write the residual rows: plain addition, or several streams."""

    def read(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Residual rows -> what the block's norm sees [M, d], and what `write` needs again."""
        ...

    def write(self, x: Tensor, y: Tensor, carry: Tensor | None) -> Tensor:
        """Residual rows and the block's output [M, d] -> residual rows."""
        ...


class Add:
    """The residual stream of most models: x + y."""

    def read(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return x, None

    def write(self, x: Tensor, y: Tensor, carry: Tensor | None) -> Tensor:
        return x + y


def enter_attn(seg: SegmentInputs, x: Tensor) -> Tensor:
    """Residual rows [M, d] -> the segment's rows in attention's layout [T, d]."""
    return seg.enter(x[seg.low : seg.high])


def leave_attn(step: StepInputs, parts: Sequence[Tensor]) -> Tensor:
    """Attention's output per segment [T, d] -> residual rows [M, d], sums paid."""
    moved = [seg.leave(part) for seg, part in zip(step.segments, parts, strict=True)]
    return moved[0] if len(moved) == 1 else torch.cat(moved)


def enter_ffn(step: StepInputs, x: Tensor) -> Tensor:
    """Residual rows -> all rows of the step, for a block that is cut over every rank."""
    return step.enter_ffn(x)


def leave_ffn(step: StepInputs, x: Tensor) -> Tensor:
    return step.leave_ffn(x)


def enter_rows(step: StepInputs, x: Tensor) -> Tensor:
    """Residual rows -> this rank's share of all rows, each on exactly one rank."""
    return step.enter_rows(x)


def leave_rows(step: StepInputs, x: Tensor) -> Tensor:
    return step.leave_rows(x)
