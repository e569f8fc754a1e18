"""What a rank's decode reads of its weights, from the recipe alone: integers, no tensors.

Under context parallelism the attention weights are whole on every cp rank; with decode attention
TP each rank reads only its own heads' slice of what a recipe marks as cut by heads.
"""

from dataclasses import dataclass

from anabranch.core.arch import Arch
from anabranch.core.resolve import Refusal, RunConfig
from anabranch.layout.choice import Place
from anabranch.models.registry import family
from anabranch.weights.recipe import Param, Recipe

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8}


@dataclass(frozen=True)
class Reads:
    """Bytes of one rank per decoded row. sliced: what is cut by heads, without layer numbers.

    held: bytes of these on the rank; read: of them, by its own heads. other: everything else that
    is read, experts by the share of them that a row meets.
    """

    sliced: tuple[str, ...]
    held: int
    read: int
    other: int

    @property
    def saving(self) -> float:
        """Share of the rank's decode bytes that slicing spares."""
        return (self.held - self.read) / (self.held + self.other)


def nbytes(param: Param, dtype: str) -> int:
    return param.elements * _BYTES[param.dtype or dtype]


def decode_reads(arch: Arch, place: Place, recipe: Recipe, dtype: str) -> Reads:
    """Of one rank, for one row; the embedding's one row is left out."""
    held = read = 0
    other = 0.0
    for param in recipe:
        size = nbytes(param, dtype)
        if param.heads:
            held += size
            read += round(size * _share(place, param))
        elif param.name != "embed":
            other += size * (_met(arch, param) or 1)
    names = dict.fromkeys(_part(p) for p in recipe if p.heads)
    return Reads(tuple(names), held, read, round(other))


def _share(place: Place, param: Param) -> float:
    """Of the heads a parameter holds, those that decode uses."""
    if not place.layout.split_decode:
        return 1.0
    if param.heads == "outputs":
        return len(place.owned) / len(place.heads)
    replicated = place.layout.dcp_q == "replicate"
    return 1.0 if replicated else len(place.owned) / len(place.query_heads)


def _met(arch: Arch, param: Param) -> float | None:
    """Share of the routed experts that a row meets, for their parameters."""
    if arch.moe is None or not _part(param).startswith(("moe.gate_up", "moe.down")):
        return None
    return arch.moe.top_k / arch.moe.experts


def _part(param: Param) -> str:
    """layers.3.attn.q -> attn.q."""
    return param.name.split(".", 2)[-1] if param.name.startswith("layers.") else param.name


def weight_bytes(run: RunConfig) -> tuple[int, ...]:
    """Bytes of the weights of every rank, in rank order."""
    return tuple(sum(nbytes(param, run.dtype) for param in recipe) for _, recipe in _of_ranks(run))


def _of_ranks(run: RunConfig) -> list[tuple[Place, Recipe]]:
    own = run.layout.ownership(run.arch.heads, run.arch.kv_heads)
    places = [Place(run.layout, own, rank) for rank in range(run.layout.mesh.world)]
    return [(place, family(run.arch).recipe(run.arch, place)) for place in places]


def decode_notes(run: RunConfig) -> tuple[str, ...]:
    """What decode attention TP slices, and bytes read per token before and after; empty without it.

    Refusal if the layout cuts decode heads over cp but the family's recipe marks nothing by heads.
    """
    cp = run.layout.mesh.cp
    if cp == 1 or not run.layout.split_decode:
        return ()
    place, recipe = _of_ranks(run)[0]
    reads = decode_reads(run.arch, place, recipe, run.dtype)
    if not reads.sliced:
        attention = sorted({_part(p) for p in recipe if ".attn." in p.name})
        raise Refusal(
            "no_head_parallel_weights",
            f"--decode-attn tp cuts what a recipe marks by heads, and that of {run.arch.family} "
            f"marks nothing; its attention parameters are {', '.join(attention)}. Use "
            "--decode-attn replicated.",
            {"family": run.arch.family, "attn_cp": cp},
        )
    before, after = reads.held + reads.other, reads.read + reads.other
    return (
        f"decode attention TP over {cp} context-parallel ranks slices {', '.join(reads.sliced)}: "
        f"{reads.held} -> {reads.read} bytes read per token and rank "
        f"({before} -> {after} with everything else)",
    )
