"""The automatic choices, as pure functions of row counts, sizes and a table of costs.

Every rank decides alike because all see the same plan and the same table. Knows no models: sizes
come as integers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from anabranch.layout.costs import Costs
from anabranch.layout.mesh import EVERY, Axes, Mesh
from anabranch.layout.phases import FFN_TENSOR, RESIDUAL, Form
from anabranch.layout.rows import Rows, Verb, plan_move

ROW_FORMS = ("v", "max", "sum")


def row_form(verb: Verb, counts: Sequence[int], row_bytes: int, costs: Costs) -> str:
    """How rows of unequal counts travel: as they are, padded to the longest, or placed and summed.

    counts: rows of each member. The cheapest by the table; ties go to the earlier of ROW_FORMS.
    """
    total, padded = sum(counts) * row_bytes, max(counts) * len(counts) * row_bytes
    ragged = costs.ragged if min(counts) != max(counts) else 0.0
    summed = costs.all_reduce.at(total) + costs.copy.at(total)
    if verb is Verb.ALL_GATHER:
        native = costs.all_gather.at(total / len(counts)) + ragged
        longest = costs.all_gather.at(padded / len(counts)) + costs.copy.at(total)
    else:
        native = costs.reduce_scatter.at(total) + ragged
        longest = costs.reduce_scatter.at(padded) + costs.copy.at(total)
    times = (native, longest, summed)
    return ROW_FORMS[times.index(min(times))]


def move_time(
    src: Rows, dst: Rows, mesh: Mesh, rows: Sequence[int], row_bytes: int, costs: Costs
) -> float:
    """Microseconds of a move; rows[r] rows of replica r are evenly spread over its ranks."""
    time, shard = 0.0, src.shard
    for verb, along in plan_move(src, dst, mesh):
        if verb is Verb.SLICE:
            shard = shard | along
        elif verb is Verb.ALL_GATHER:
            time += costs.all_gather.at(_most(mesh, rows, shard) * row_bytes)
        elif verb is Verb.REDUCE_SCATTER:
            time += costs.reduce_scatter.at(_most(mesh, rows, shard) * row_bytes)
            shard = shard | along
        else:
            time += costs.all_reduce.at(_most(mesh, rows, shard) * row_bytes)
    return time


def _most(mesh: Mesh, rows: Sequence[int], shard: Axes) -> float:
    """Rows on the fullest rank when sharded along `shard`."""
    within = 1
    for axis in mesh.live(shard & (EVERY - {"dp"})):
        within *= mesh.size(axis)
    return (max(rows) if "dp" in shard else sum(rows)) / within


@dataclass(frozen=True)
class StepShape:
    """What the residual layout is chosen from: rows per replica of each segment, bytes of a row.

    gathers: the FFN is cut over every rank, so all rows visit it (not where rows are dispatched).
    """

    segments: tuple[tuple[Form, tuple[int, ...]], ...]
    row_bytes: int
    gathers: bool


@lru_cache(4096)
def residual_layout(mesh: Mesh, shape: StepShape, costs: Costs) -> str:
    """Where rows live between blocks in a step: the layout whose moves of a layer cost least."""
    if mesh.world == 1 or not shape.segments:
        return "sharded"

    def layer(name: str) -> float:
        home, time = RESIDUAL[name], 0.0
        for form, rows in shape.segments:
            for src, dst in ((home, form.rows_in), (form.rows_out, home)):
                time += move_time(src, dst, mesh, rows, shape.row_bytes, costs)
        every = [sum(n) for n in zip(*(rows for _, rows in shape.segments), strict=True)]
        block = FFN_TENSOR if shape.gathers else (Rows(EVERY), Rows(EVERY))
        for src, dst in ((home, block[0]), (block[1], home)):
            time += move_time(src, dst, mesh, every, shape.row_bytes, costs)
        return time

    return min(RESIDUAL, key=layer)


@dataclass(frozen=True)
class Computed:
    """Keys and values of all heads of a rank, computed from one cached entry: their bytes and the
    floating-point operations."""

    nbytes: int
    flops: int


def kv_to_q(cp: int, chunk: int, workspace: int, entry: Computed | None, costs: Costs) -> str:
    """Gather, gather computed keys and values too (expand), or ring.

    A ring moves as many bytes in more messages and merges per block, so it only pays where a
    chunk's entries, gathered at once, would exceed the workspace. What is computed of an entry
    travels where that takes less time than computing it on every rank.
    """
    if cp == 1:
        return "gather"
    if cp * chunk > workspace:
        return "ring"
    if entry is not None and entry.nbytes / costs.all_gather.rate < entry.flops / costs.products:
        return "expand"
    return "gather"


def queries(rows: int, gathered_bytes: int, weight_bytes: int, costs: Costs) -> str:
    """Queries of a stripe group: gathered, or computed from whole weights on every member.

    gathered_bytes: own queries of a row. weight_bytes: what computing the peers' queries reads.
    """
    gather = costs.all_gather.at(rows * gathered_bytes)
    return "replicate" if weight_bytes / costs.memory < gather else "gather"


def exchange_route(rows: int, head_bytes: int, heads: int, costs: Costs) -> str:
    """How partials of `heads` group heads meet: fused where memory is shared, else the cheaper of
    pack + all_to_all and the gathered lse with a reduce-scatter of fp32 outputs.

    head_bytes: one head's output of a row, in the dtype of the partials.
    """
    packed = rows * heads * (head_bytes + 16)
    times = {
        "a2a": costs.all_to_all.at(packed) + 2 * (costs.copy.at(packed) + costs.call),
        "ag_rs": costs.all_gather.at(rows * heads * 4)
        + costs.reduce_scatter.at(rows * heads * head_bytes * 2)
        + 6 * costs.call,
    }
    if costs.shared:
        times["fused"] = costs.fused.at(packed)
    return min(times, key=lambda name: times[name])
