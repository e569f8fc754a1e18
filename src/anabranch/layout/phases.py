"""The layout of each phase, as data: rows in and out of attention, whose heads, which exchange."""

from dataclasses import dataclass
from enum import StrEnum

from anabranch.layout.mesh import DP, DP_CP, EVERY, NONE, REPLICA, TP, Mesh
from anabranch.layout.rows import Rows


class Exchange(StrEnum):
    """What moves so that queries meet all cached positions.

    none: every position is here. fresh: so it is once the cp peers' new entries are gathered (their
    rows are others). kv_to_q: new entries from the cp peers, cached ones from the stripes. q_to_kv:
    queries to the stripes, partial outputs back. lse: only the partials' lse.
    """

    NONE = "none"
    FRESH = "fresh"
    KV_TO_Q = "kv_to_q"
    Q_TO_KV = "q_to_kv"
    LSE = "lse"


class Heads(StrEnum):
    """Whose query heads a rank works on: all resident ones, or those it owns in decode."""

    RESIDENT = "resident"
    OWNED = "owned"


@dataclass(frozen=True)
class Form:
    """How attention of one segment is laid out. rows_out is after the output projection."""

    rows_in: Rows
    rows_out: Rows
    heads: Heads
    exchange: Exchange


RESIDUAL = {"sharded": Rows(EVERY), "replica": Rows(DP), "replicated": Rows(NONE)}
"""Where rows live between blocks, by the name of the setting."""

FFN_TENSOR = (Rows(), Rows(partial=EVERY))
"""FFN cut by width or by expert over every rank: each sees all rows and owes a sum."""

FFN_DISPATCH = (Rows(EVERY), Rows(EVERY))
"""Rows stay where they are; the dispatcher moves them to the experts and back."""


def prefill_form() -> Form:
    """Query rows split over cp; KV comes to them, from cp peers and from the prefix's stripes."""
    return Form(Rows(DP_CP), Rows(DP_CP, TP), Heads.RESIDENT, Exchange.KV_TO_Q)


def decode_form(mesh: Mesh, stripes: int, split: bool) -> Form:
    """Decode rows by `split` (heads cut over cp too, or replicated) and by the stripe count."""
    if split or mesh.cp == 1:
        exchange = Exchange.Q_TO_KV if stripes > 1 else Exchange.NONE
        return Form(Rows(DP), Rows(DP, REPLICA), Heads.OWNED, exchange)
    if stripes > 1:
        return Form(Rows(DP), Rows(DP, REPLICA), Heads.RESIDENT, Exchange.LSE)
    return Form(Rows(DP_CP), Rows(DP_CP, TP), Heads.RESIDENT, Exchange.FRESH)
