"""A layout as resolved: every choice made, every default filled in; and a rank's place in it."""

from dataclasses import dataclass
from functools import cached_property

from anabranch.layout.costs import SHIPPED, Costs
from anabranch.layout.mesh import EVERY, Mesh, part
from anabranch.layout.ownership import Ownership, Stripes
from anabranch.layout.phases import Form, decode_form, prefill_form


@dataclass(frozen=True)
class Layout:
    """All choices of one model copy. Strings are the values of the flags of the same name.

    residual and row_moves may be "auto": they are then chosen in each step, from its row counts and
    the table of costs. Every other choice is made.
    """

    mesh: Mesh = Mesh()
    stripes: Stripes = Stripes(1)
    split_decode: bool = True
    ep: int = 1
    residual: str = "sharded"
    embedding: str = "whole"
    lm_head: str = "replica"
    shared_experts: str = "sharded"
    row_moves: str = "v"
    moe_dispatch: str = "gather"
    cp_split: str = "zigzag"
    kv_to_q: str = "gather"
    dcp_exchange: str = "a2a"
    dcp_q: str = "gather"
    costs: Costs = SHIPPED["threads"]

    @property
    def etp(self) -> int:
        """Ranks over which the width of each expert is cut."""
        return self.mesh.world // self.ep

    @cached_property
    def prefill(self) -> Form:
        return prefill_form()

    @cached_property
    def decode(self) -> Form:
        return decode_form(self.mesh, self.stripes.count, self.split_decode)

    def ownership(self, heads: int, kv_heads: int) -> Ownership:
        return Ownership(self.mesh, heads, kv_heads, self.stripes, self.split_decode)


@dataclass(frozen=True)
class Place:
    """One rank in a layout: which slice of everything it holds. Ranges of (start, stop)."""

    layout: Layout
    own: Ownership
    rank: int

    @property
    def heads(self) -> range:
        """Query heads whose output projection is resident."""
        return self.own.prefill_heads(self.rank)

    @property
    def query_heads(self) -> range:
        """Query heads whose queries are computed here: more than `heads` if --dcp-q replicate."""
        if self.layout.dcp_q != "replicate":
            return self.heads
        mesh = self.layout.mesh
        width = self.own.heads // mesh.th
        start = mesh.coord(self.rank).th * width
        return range(start, start + width)

    @property
    def owned(self) -> range:
        """Query heads owned in decode."""
        return self.own.decode_heads(self.rank)

    @property
    def kv(self) -> range:
        return self.own.kv_range(self.rank)

    def width(self, total: int, unit: int = 1) -> tuple[int, int]:
        """This rank's cut of a dense block's width (over every rank)."""
        return part(total, self.layout.mesh.world, self.rank, unit)

    def experts(self, total: int) -> tuple[int, int]:
        return part(total, self.layout.ep, self.rank // self.layout.etp)

    def expert_width(self, total: int, unit: int = 1) -> tuple[int, int]:
        return part(total, self.layout.etp, self.rank % self.layout.etp, unit)

    def holders(self, experts: int) -> tuple[tuple[int, ...], ...]:
        """For each expert, the ranks that hold a slice of it."""
        etp = self.layout.etp
        found: list[tuple[int, ...]] = []
        for e in range(self.layout.ep):
            start, stop = part(experts, self.layout.ep, e)
            found += [tuple(range(e * etp, (e + 1) * etp))] * (stop - start)
        return tuple(found)

    def embedding(self, vocab: int) -> tuple[int, int]:
        if self.layout.embedding == "whole":
            return 0, vocab
        mesh = self.layout.mesh
        return part(vocab, mesh.replica_size, self.rank % mesh.replica_size)

    def head(self, vocab: int, rank: int | None = None) -> tuple[int, int]:
        """Vocabulary of this rank's slice of the head (or of another rank of its group)."""
        who = self.rank if rank is None else rank
        mesh = self.layout.mesh
        if self.layout.lm_head == "all":
            return part(vocab, mesh.world, who)
        return part(vocab, mesh.replica_size, who % mesh.replica_size)

    def head_group(self) -> tuple[int, ...]:
        mesh = self.layout.mesh
        if self.layout.lm_head == "all":
            return mesh.group(self.rank, EVERY)
        return mesh.replica(mesh.coord(self.rank).dp)
