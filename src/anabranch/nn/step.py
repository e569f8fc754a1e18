"""What one step looks like to a model on one rank: `StepInputs`, made once by `worker/inputs.py`.

Device tensors and bound moves; nothing here is filled in later. Row counts: T rows of a segment in
attention's layout, M rows of this rank between blocks (the residual layout).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from anabranch.comm.moves import BoundMove
from anabranch.core.plan import Phase


@dataclass(frozen=True)
class Span:
    """Query rows [q0, q1) of the segment meet entries [k0, k1) of a block."""

    q0: int
    q1: int
    k0: int
    k1: int


@dataclass(frozen=True)
class Block:
    """Entries brought to the queries at once: what a peer or all peers computed, or cached ones.

    counts: rows of each member of the group that gathers (for a ring step: rows that arrive).
    read: slots of this rank's pool to contribute (cached blocks), or None for fresh entries.
    order: gathered rows -> request by request, positions ascending; None if they already are, or
    if all are of one request and none is hidden from any query.
    k_pos: int64 [sum(counts)] positions after `order`; visibility is by position.
    write_rows, write_slots: of the ordered rows, those this rank owns, and where they go.
    """

    counts: tuple[int, ...]
    spans: tuple[Span, ...]
    k_pos: Tensor
    read: Tensor | None = None
    order: Tensor | None = None
    write_rows: Tensor | None = None
    write_slots: Tensor | None = None


@dataclass(frozen=True)
class Paged:
    """Queries read this rank's pool in place: local entries per query row.

    page_table int32 [T, pages]. lens: per `pad_len` of a kernel, visible entries int32 [T]; these
    differ in padded rows alone. starts: per sliding window, first visible int32 [T].
    write_rows, write_slots: the fresh entries this rank stores (rows None: all) and where.
    counts: fresh entries of each cp rank, where these differ.
    """

    page_table: Tensor
    lens: Mapping[int, Tensor]
    local_page: int
    starts: Mapping[int, Tensor]
    write_rows: Tensor | None
    write_slots: Tensor
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Brought:
    """KV is brought to the queries: blocks of fresh entries, then blocks of cached ones."""

    fresh: tuple[Block, ...]
    cached: tuple[Block, ...]


@dataclass(frozen=True)
class SegmentInputs:
    """One segment on this rank.

    low, high: its rows among this rank's residual rows. enter, leave: moves to attention's rows and
    back. positions: int64 [T]. longest: T of the cp rank that has most rows. reach: how its queries
    meet keys, as its form's exchange expects.
    """

    phase: Phase
    low: int
    high: int
    enter: BoundMove
    leave: BoundMove
    positions: Tensor
    longest: int
    reach: Paged | Brought


@dataclass(frozen=True)
class Picked:
    """Rows whose logits are needed: residual `rows` [m], the move that gathers them over the head's
    group, `order` from gathered to plan order (None if equal), their `total` after gathering, and
    which of these (start, stop) are the own replica's."""

    rows: Tensor
    gather: BoundMove
    order: Tensor | None
    total: int
    own: tuple[int, int]


@dataclass(frozen=True)
class StepInputs:
    """One step on this rank.

    ids: token ids of the rows this rank embeds. embed: move of the embedded rows to the residual
    layout, per segment (low, high of the ids and the move).
    enter_ffn, leave_ffn: to all rows and back (sums paid); enter_rows, leave_rows: to rows sharded
    along every axis and back, for a dispatcher.
    picked: the rows whose logits are needed. row_ids: int64 [M] token ids of the residual rows,
    where a router asks for them.
    """

    number: int
    ids: tuple[Tensor, ...]
    embed: tuple[BoundMove, ...]
    segments: tuple[SegmentInputs, ...]
    enter_ffn: BoundMove
    leave_ffn: BoundMove
    enter_rows: BoundMove
    leave_rows: BoundMove
    picked: Picked
    row_ids: Tensor | None = None
