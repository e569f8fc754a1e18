"""What a rank remembers between steps: who sits where, page tables, and the last sampled tokens.

Plans are numbered deltas against this state; a gap in the numbers is fatal. Page tables are numpy:
they are read on the host when a step's inputs are made.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from anabranch.core.plan import Join, ReplicaPlan


@dataclass
class Seats:
    """The seats of this rank's replica. pages: int32 [seats, most pages of a sequence].

    pad: the seat of padded rows, whose page holds nothing live; None if steps are not padded.
    """

    pages: NDArray[np.int32]
    filled: NDArray[np.int32]
    tokens: torch.Tensor
    joined: dict[int, Join]
    pad: int | None = None
    next_number: int = 0

    @staticmethod
    def make(seats: int, pages: int, device: torch.device, pad_page: int | None = None) -> "Seats":
        """pad_page: a page that no seat is given; one more seat has it in place of every page."""
        pad = None if pad_page is None else seats
        rows = seats if pad_page is None else seats + 1
        table = np.full((rows, pages), pad_page or 0, np.int32)
        tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        return Seats(table, np.zeros(rows, np.int32), tokens, {}, pad)

    def apply(self, number: int, plan: ReplicaPlan) -> None:
        """Leave, join and append pages, in this order."""
        if number != self.next_number:
            raise RuntimeError(f"step {number} arrived where step {self.next_number} was due")
        self.next_number += 1
        for seat in plan.leave:
            del self.joined[seat]
            self.filled[seat] = 0
        for join in plan.join:
            assert join.seat not in self.joined, join
            self.joined[join.seat] = join
        for seat, pages in plan.pages:
            at = int(self.filled[seat])
            self.pages[seat, at : at + len(pages)] = pages
            self.filled[seat] = at + len(pages)

    def entered(self, plan: ReplicaPlan, page: int) -> list[int]:
        """Pages whose first position is written in this step: nothing in them is to be read."""
        found: list[int] = []
        for chunks in (plan.prefill, plan.decode):
            first = -(-chunks.start // page)
            stop = -(-(chunks.start + chunks.count) // page)
            for seat, low, high in zip(chunks.seat, first, stop, strict=True):
                found += self.pages[seat, low:high].tolist()
        return found
