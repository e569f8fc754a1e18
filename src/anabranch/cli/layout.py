"""`anabranch layout`: who holds which rows, heads, experts and KV stripes, what moves. No torch.

The machine at hand does not matter here: a layout of any size can be looked at anywhere.
"""

import json as jsonlib
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from anabranch.core.arch import Arch
from anabranch.core.arch_reader import read_arch
from anabranch.core.config import EngineConfig
from anabranch.core.describe import Describer, describe, places
from anabranch.core.plan import Phase
from anabranch.core.resolve import Machine, RunConfig, itemsize, resolve
from anabranch.layout.mesh import Mesh
from anabranch.models.registry import family
from anabranch.weights.config import read_config
from anabranch.weights.locate import is_hub_id, locate

ROOMY = 1 << 50
"""Bytes of a machine that refuses no layout for want of memory."""


def run(config: EngineConfig, draw_to: Path | None, json: bool) -> int:
    """Show a layout as tables or JSON, and draw it if asked."""
    found = resolved(config)
    if json:
        print(jsonlib.dumps(describe(found, weight_bytes(found))))
    else:
        show(found, Console())
    if draw_to is not None:
        picture(found, draw_to)
    return 0


def resolved(config: EngineConfig) -> RunConfig:
    """The run of a configuration on a machine with room for it. Refusal if it cannot run."""
    cuda = config.device == "cuda"
    machine = Machine("cuda" if cuda else "cpu", ROOMY, max(1, config.tp), True, max(0, config.tp))
    return resolve(config, arch_of(config.model), machine)


def arch_of(model: str | None) -> Arch:
    """Facts of a folder, .gguf file, catalogue name, hub id (config.json alone is fetched), or of
    the packaged model."""
    if model is not None and is_hub_id(model):
        # imported here: it costs a quarter of a second that local models need not pay
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        try:
            return read_arch(read_config(Path(hf_hub_download(str(model), "config.json")).parent))
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            raise ValueError(
                f"model {model!r}: config.json is neither cached nor could it be fetched: "
                f"{str(error).splitlines()[0]}"
            ) from error
    return read_arch(read_config(locate(model)))


def weight_bytes(run: RunConfig) -> list[int]:
    """Bytes of each rank's parameters, as its recipe says."""
    recipe = family(run.arch).recipe
    return [
        sum(p.elements * itemsize(p.dtype or run.dtype) for p in recipe(run.arch, place))
        for place in places(run)
    ]


def draw(config: EngineConfig, path: Path) -> None:
    """A picture of a configuration's layout: .svg, or .png where Pillow is installed."""
    picture(resolved(config), path)


def picture(run: RunConfig, path: Path) -> None:
    from anabranch.cli.picture import paint

    paint(run, path)


# text --------------------------------------------------------------------------------------------


def show(run: RunConfig, console: Console) -> None:
    """Tables of ranks and moves."""
    view, mesh = Describer.of(run), run.layout.mesh
    console.print(headline(run), highlight=False)
    console.print(_ranks(run))
    for phase in Phase:
        console.print(_moves(view, phase, mesh))
    for note in run.notes:
        console.print(f"note: {note}", highlight=False)


def headline(run: RunConfig) -> str:
    mesh, layout = run.layout.mesh, run.layout
    own = layout.ownership(run.arch.heads, run.arch.kv_heads)
    decode = "cut over cp too" if layout.split_decode and mesh.cp > 1 else "as in prefill"
    kv = f"{own.stripes.count} stripes" if own.striped else "whole"
    replicas = "1 replica" if mesh.dp == 1 else f"{mesh.dp} replicas"
    copies = "1 copy" if own.copies == 1 else f"{own.copies} copies"
    return (
        f"{run.arch.family}, {run.arch.layers} layers: {mesh.world} ranks = {replicas} x "
        f"{mesh.cp} context parallel x {mesh.attn_tp} attention TP; experts {layout.ep} x "
        f"{layout.etp}; decode heads {decode}; KV {kv}, {copies}, "
        f"{run.kv_bytes_per_token:.0f} bytes a token and rank; weights "
        f"{max(weight_bytes(run)) / 2**20:.1f} MiB a rank"
    )


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))


def _ranks(run: RunConfig) -> Table:
    table = _table("ranks")
    for name in ("rank", "dp", "cp", "tp", "stripe", "heads", "decode", "KV", "experts", "vocab"):
        table.add_column(name, justify="right", no_wrap=True)
    own = run.layout.ownership(run.arch.heads, run.arch.kv_heads)
    for place in places(run):
        here = run.layout.mesh.coord(place.rank)
        owned = place.owned if run.layout.split_decode else place.heads
        table.add_row(
            *(str(n) for n in (place.rank, here.dp, here.cp, here.tp, own.stripe(place.rank))),
            span(place.heads), span(owned), span(place.kv), experts(run, place.rank),
            span(range(*place.head(run.arch.vocab))),
        )  # fmt: skip
    return table


def span(values: range) -> str:
    if not len(values):
        return "-"
    last = values.stop - 1
    return str(values.start) if last == values.start else f"{values.start}-{last}"


def experts(run: RunConfig, rank: int) -> str:
    """Indices of a rank's experts, and its part of their width."""
    if run.arch.moe is None:
        return "-"
    held = span(range(*places(run)[rank].experts(run.arch.moe.experts)))
    etp = run.layout.etp
    return held if etp == 1 else f"{held} ({rank % etp + 1}/{etp})"


def _moves(view: Describer, phase: Phase, mesh: Mesh) -> Table:
    residual = view.residual(phase)
    rows = f"{view.rows[phase]} rows a replica, between blocks {residual}"
    table = _table(f"{phase.value}: a layer's moves, {rows}")
    for name in ("at", "verb", "over", "ranks", "bytes a rank"):
        table.add_column(name, justify="right" if name in ("ranks", "bytes a rank") else "left")
    for move in view.moves(phase):
        size = 1
        for axis in move.axes:
            size *= mesh.size(axis)
        table.add_row(move.at, move.verb, " ".join(move.axes), str(size), f"{move.bytes:,}")
    return table
