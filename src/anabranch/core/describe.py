"""What a resolved run looks like: who holds what, which moves a layer makes, and their bytes.

Integers for people and programs (`anabranch layout`, /server_info); nothing here runs.
Bytes are those each rank puts into a verb, for a nominal number of rows per replica.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from anabranch.core.abilities import partial_width, query_width
from anabranch.core.arch import MLA
from anabranch.core.plan import Phase
from anabranch.core.resolve import NOMINAL_ROWS, RunConfig, itemsize
from anabranch.layout.choice import Place
from anabranch.layout.decide import StepShape, residual_layout
from anabranch.layout.mesh import AXES, EVERY, Axes, Mesh
from anabranch.layout.phases import FFN_TENSOR, RESIDUAL, Exchange, Form
from anabranch.layout.rows import Rows, Verb, plan_move

LSE_BYTES = 4
WIRE_TAIL = 16


@dataclass(frozen=True)
class Move:
    """One verb of a layer. axes: those whose ranks differ within the group. bytes: per rank."""

    phase: str
    at: str
    verb: str
    axes: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class Describer:
    """A run seen from outside. rows: of a replica in each phase."""

    run: RunConfig
    rows: dict[Phase, int]

    @staticmethod
    def of(run: RunConfig, decode_rows: int = NOMINAL_ROWS) -> "Describer":
        prefill = run.config.prefill_chunk * run.layout.mesh.cp
        return Describer(run, {Phase.PREFILL: prefill, Phase.DECODE: decode_rows})

    @property
    def mesh(self) -> Mesh:
        return self.run.layout.mesh

    def form(self, phase: Phase) -> Form:
        return self.run.layout.prefill if phase is Phase.PREFILL else self.run.layout.decode

    def residual(self, phase: Phase) -> str:
        """The layout of rows between blocks in a step of this phase alone."""
        layout = self.run.layout
        if layout.residual != "auto":
            return layout.residual
        counts = (self.rows[phase],) * self.mesh.dp
        shape = StepShape(((self.form(phase), counts),), self.row_bytes, self.gathers)
        return residual_layout(self.mesh, shape, layout.costs)

    @property
    def row_bytes(self) -> int:
        return self.run.arch.hidden * itemsize(self.run.dtype)

    @property
    def gathers(self) -> bool:
        return self.run.layout.moe_dispatch == "gather"

    def moves(self, phase: Phase) -> tuple[Move, ...]:
        """The verbs of one layer, in order."""
        form, home = self.form(phase), RESIDUAL[self.residual(phase)]
        return (
            *self._moves(phase, "enter_attn", home, form.rows_in, self.row_bytes),
            *self._attend(phase, form),
            *self._moves(phase, "leave_attn", form.rows_out, home, self.row_bytes),
            *self._ffn(phase, home),
        )

    def _ffn(self, phase: Phase, home: Rows) -> Iterator[Move]:
        moe = self.run.arch.moe
        routed = self.row_bytes + (0 if moe is None else moe.top_k * 8)
        if self.gathers or moe is None:
            yield from self._moves(phase, "enter_ffn", home, FFN_TENSOR[0], routed)
            yield from self._moves(phase, "leave_ffn", FFN_TENSOR[1], home, self.row_bytes)
            return
        if moe.shared_width and self.run.layout.shared_experts == "sharded":
            yield from self._moves(phase, "enter_shared", home, FFN_TENSOR[0], self.row_bytes)
            yield from self._moves(phase, "leave_shared", FFN_TENSOR[1], home, self.row_bytes)
        yield from self._moves(phase, "enter_ffn", home, Rows(EVERY), routed)
        share = self._held(phase, EVERY) * min(moe.top_k, self.run.layout.ep)
        yield from self._verb(phase, "dispatch", "all_to_all", EVERY, share * routed)
        yield from self._verb(phase, "combine", "all_to_all", EVERY, share * self.row_bytes)
        yield from self._moves(phase, "leave_ffn", Rows(EVERY), home, self.row_bytes)

    def _attend(self, phase: Phase, form: Form) -> Iterator[Move]:
        run, own = self.run, self.run.layout.ownership(self.run.arch.heads, self.run.arch.kv_heads)
        entry = run.kv_width * itemsize(run.kv_dtype)
        rows, stripes = self._held(phase, form.rows_in.shard), own.stripe_axes
        cp = frozenset({"cp"})
        if form.exchange in (Exchange.KV_TO_Q, Exchange.FRESH):
            ring = form.exchange is Exchange.KV_TO_Q and run.layout.kv_to_q == "ring"
            verb = "exchange" if ring else "all_gather"
            yield from self._verb(phase, "attend", verb, cp, rows * entry)
        if form.exchange is Exchange.KV_TO_Q:
            share = -(-min(run.round_tokens, run.max_model_len) // own.stripes.count)
            yield from self._verb(phase, "attend_prefix", "all_gather", stripes, share * entry)
            if run.layout.kv_to_q == "expand":
                assert isinstance(run.arch.attn, MLA), "as core.checks has it"
                made = run.arch.attn.computed(len(own.prefill_heads(0))) * itemsize(run.dtype)
                yield from self._verb(phase, "attend", "all_gather", cp, rows * made)
                if stripes == cp:
                    yield from self._verb(phase, "attend_prefix", "all_gather", cp, share * made)
        size, width = itemsize(run.dtype), partial_width(run.arch)
        if form.exchange is Exchange.Q_TO_KV:
            owned, group = len(own.decode_heads(0)), len(own.group_heads(0))
            if run.layout.dcp_q == "gather":
                queries = rows * owned * query_width(run.arch) * size
                yield from self._verb(phase, "attend_queries", "all_gather", stripes, queries)
            yield from self._partials(phase, stripes, rows * group, width * size)
        if form.exchange is Exchange.LSE:
            lse = rows * len(own.prefill_heads(0)) * LSE_BYTES
            yield from self._verb(phase, "attend", "all_gather", stripes, lse)

    def _partials(self, phase: Phase, stripes: Axes, heads: float, head: int) -> Iterator[Move]:
        """heads: partial outputs (rows x group heads), of `head` bytes each."""
        route = self.run.layout.dcp_exchange
        if route == "ag_rs":
            yield from self._verb(phase, "attend", "all_gather", stripes, heads * LSE_BYTES)
            wide = head * 4 // itemsize(self.run.dtype)
            yield from self._verb(phase, "attend", "reduce_scatter", stripes, heads * wide)
            return
        if route == "fused":
            whole = heads * (head + LSE_BYTES)
            yield from self._verb(phase, "attend", "merge_partials", stripes, whole)
            return
        yield from self._verb(phase, "attend", "all_to_all", stripes, heads * (head + WIRE_TAIL))

    def _moves(self, phase: Phase, at: str, src: Rows, dst: Rows, width: int) -> Iterator[Move]:
        shard = src.shard
        for verb, along in plan_move(src, dst, self.mesh):
            if verb is Verb.SLICE:
                shard = shard | along
                continue
            yield from self._verb(phase, at, verb.value, along, self._held(phase, shard) * width)
            if verb is Verb.REDUCE_SCATTER:
                shard = shard | along

    def _verb(self, phase: Phase, at: str, verb: str, along: Axes, size: float) -> Iterator[Move]:
        live = self.mesh.live(along)
        if live:
            axes = tuple(a for a in AXES if a in live)
            yield Move(phase.value, at, verb, axes, round(size))

    def _held(self, phase: Phase, shard: Axes) -> float:
        """Rows of a rank when they are sharded along `shard`."""
        total = float(self.rows[phase] * self.mesh.dp)
        for axis in shard:
            total /= self.mesh.size(axis)
        return total


def places(run: RunConfig) -> tuple[Place, ...]:
    """Every rank's place."""
    own = run.layout.ownership(run.arch.heads, run.arch.kv_heads)
    return tuple(Place(run.layout, own, rank) for rank in range(run.layout.mesh.world))


def describe(run: RunConfig, weight_bytes: Sequence[int]) -> dict[str, object]:
    """The JSON of `anabranch layout`. weight_bytes: of each rank's parameters, shared or not."""
    view, mesh = Describer.of(run), run.layout.mesh
    own = run.layout.ownership(run.arch.heads, run.arch.kv_heads)
    ranks = []
    for rank in range(mesh.world):
        here = mesh.coord(rank)
        ranks.append(
            {"rank": rank, "dp": here.dp, "cp": here.cp, "tp": here.tp,
             "stripe": own.stripe(rank), "ep": rank // run.layout.etp}
        )  # fmt: skip
    phases: dict[str, object] = {}
    every = []
    for phase in Phase:
        moves = [asdict(move) for move in view.moves(phase)]
        every += moves
        phases[phase.value] = {
            "rows": view.rows[phase], "residual": view.residual(phase), "moves": moves,
        }  # fmt: skip
    phases["moves"] = every
    return {
        "world": mesh.world,
        "axes": {**mesh.sizes, "tp": mesh.attn_tp, "ep": run.layout.ep, "etp": run.layout.etp},
        "ranks": ranks,
        "phases": phases,
        "kv_bytes_per_token_per_rank": run.kv_bytes_per_token,
        "kv_copies": own.copies,
        "kv_stripes": own.stripes.count,
        "weight_bytes_per_rank": max(weight_bytes),
        "notes": list(run.notes),
    }
