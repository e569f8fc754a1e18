"""Where the rows of an activation live, and which collectives lead from one layout to another."""

from dataclasses import dataclass
from enum import StrEnum

from anabranch.layout.mesh import NONE, Axes, Mesh


@dataclass(frozen=True)
class Rows:
    """shard: axes along which ranks hold different rows. partial: axes along which ranks hold
    unsummed parts of the same rows. On any other axis every rank holds the same rows."""

    shard: Axes = NONE
    partial: Axes = NONE

    def __post_init__(self) -> None:
        both = self.shard & self.partial
        if both:
            raise ValueError(f"rows cannot be both sharded and partial along {sorted(both)}")


class Verb(StrEnum):
    SLICE = "slice"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"


Move = tuple[tuple[Verb, Axes], ...]


def plan_move(src: Rows, dst: Rows, mesh: Mesh | None = None) -> Move:
    """The verbs that turn `src` into `dst`, in an order that shrinks rows before moving them.

    With a mesh, axes of size 1 produce no verb. ValueError if `dst` owes a sum that `src` does not.
    """
    created = dst.partial - src.partial
    if created:
        raise ValueError(f"a move cannot create a debt along {sorted(created)}")
    paid = src.partial - dst.partial
    steps = (
        (Verb.SLICE, dst.shard - src.shard - paid),
        (Verb.REDUCE_SCATTER, dst.shard & paid),
        (Verb.ALL_REDUCE, paid - dst.shard),
        (Verb.ALL_GATHER, src.shard - dst.shard),
    )
    live = ((verb, mesh.live(along) if mesh else along) for verb, along in steps)
    return tuple((verb, along) for verb, along in live if along)
