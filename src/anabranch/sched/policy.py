"""The choices a scheduler makes, as pure functions of numbers: where, how much, in which form.

Everything here may be changed without touching the bookkeeping in replica.py, and nothing here
changes state.
"""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from anabranch.core.plan import Phase

EXTEND_RATIO = 8  # an extend runs as decode rows when its prefix is this many times as long
RUNNING_COST = 16  # a running request weighs as much as this many queued prefill tokens
LOOKAHEAD = 4  # budgets of prefill a replica may have queued before new requests wait unplaced


def prefill_share(budget: int, decode_rows: int) -> int:
    """Rows of known tokens a replica may run beside `decode_rows`.

    Decode rows come first, but never take more than three quarters: prefill always moves on.
    """
    return max(budget - decode_rows, budget // 4, 1)


def rows_at(room: int, start: int, reach: int | None) -> int:
    """Rows from position `start` on that cost as much as `room` rows from the beginning.

    A row over n cached positions costs 1 + n / reach. What a step takes is so the same all along a
    long prompt; at least one row.
    """
    if reach is None or start == 0:
        return room
    # rows * (1 + start / reach) + rows^2 / (2 * reach) = room + room^2 / (2 * reach)
    slope = reach + start
    rows = math.sqrt(slope * slope + room * (2 * reach + room)) - slope
    return max(1, min(room, int(rows)))


@dataclass(frozen=True)
class Candidate:
    """A replica that has a seat and pages for a request.

    queued, uncached: tokens to compute, for others and for it. running: requests. available: pages,
    need of which it would take.
    """

    index: int
    queued: int
    uncached: int
    running: int
    available: int
    need: int = 0

    @property
    def cost(self) -> tuple[int, int, int]:
        work = self.queued + self.uncached + RUNNING_COST * self.running
        return work, -self.available, self.index


def place(candidates: Seq[Candidate], budget: int) -> Candidate | None:
    """The replica that is done with the request's prefill first; ties go to the most free pages.

    A prefix hit counts as the tokens it saves. None: wait, the best one is busy for several steps
    and a later choice will be a better informed one.
    """
    if not candidates:
        return None
    best = min(candidates, key=lambda c: c.cost)
    return best if best.queued < LOOKAHEAD * budget else None


def growth_reserve(running: int, page_size: int) -> int:
    """Pages left free when a request is admitted, so that eight more steps need no preemption."""
    return -(-8 * running // page_size)


def phase_of_chunk(start: int, count: int, last: bool, all_logits: bool, extend_rows: int) -> Phase:
    """A short end of a prompt over a long prefix reads like decode: many keys, few rows."""
    short = last and not all_logits and 0 < count <= extend_rows
    return Phase.DECODE if short and start >= EXTEND_RATIO * count else Phase.PREFILL
