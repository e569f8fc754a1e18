"""The picture of a layout: one line per rank with what it holds in each phase, then the moves.

Positions, heads, rows and experts are strips of cells: filled where the rank holds them. Ranks of a
replica share a colour.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from anabranch.cli.canvas import Box, Canvas, Line, Text, mix
from anabranch.core.describe import Describer, Move, places
from anabranch.core.plan import Phase
from anabranch.core.resolve import RunConfig
from anabranch.layout.choice import Place
from anabranch.layout.mesh import part
from anabranch.layout.phases import Exchange
from anabranch.layout.split import interleaved, zigzag

COLOURS = ("#2f6db5", "#d97a1e", "#3a9a5b", "#8757b8", "#c24747", "#1f9297", "#b08d1f", "#5f6b7a")
INK, SOFT, RULE, EMPTY = "#1f2937", "#6b7280", "#d7dce3", "#eef1f5"
WIDTH, MARGIN, LINE_H, STRIP_H = 1240.0, 28.0, 26.0, 14.0
DECODE_ROWS = 8
TINT = 0.3
MOST_CELLS = 32


@dataclass(frozen=True)
class Column:
    """A strip per rank: where it stands, how many cells it has, what is above it."""

    title: str
    under: str
    x: float
    width: float
    cells: int


def paint(run: RunConfig, path: Path) -> None:
    """Draw the run's layout into a .svg or .png file."""
    canvas = Canvas(WIDTH)
    y = _title(canvas, run)
    y = _ranks(canvas, run, y + 18)
    view = Describer.of(run, DECODE_ROWS)
    for phase in Phase:
        y = _flow(canvas, view, phase, y + 22)
    canvas.height = y + MARGIN - 6
    canvas.save(path)


def _title(canvas: Canvas, run: RunConfig) -> float:
    mesh, layout = run.layout.mesh, run.layout
    own = layout.ownership(run.arch.heads, run.arch.kv_heads)
    axes = (
        (mesh.dp, "attention replica"), (mesh.cp, "context-parallel rank"),
        (mesh.attn_tp, "attention-TP rank"),
    )  # fmt: skip
    words = " x ".join(f"{n} {name}{'s' if n > 1 else ''}" for n, name in axes)
    ranks = f"{mesh.world} ranks" if mesh.world > 1 else "1 rank"
    canvas.add(Text(MARGIN, 44, f"{ranks} = {words}", 20, INK, bold=True))
    kv = f"KV in {own.stripes.count} stripes" if own.striped else "KV whole"
    copies = "each position once" if own.copies == 1 else f"each position {own.copies} times"
    experts = f", experts {layout.ep} x {layout.etp}" if run.arch.moe is not None else ""
    canvas.add(
        Text(MARGIN, 66, f"{run.arch.family}: {run.arch.layers} layers, {run.arch.heads} heads"
             f"{experts}.  {kv}, {copies} in a replica: {run.kv_bytes_per_token:,.0f} bytes per "
             "token and rank.", 13, SOFT)
    )  # fmt: skip
    return 66.0


# ranks -------------------------------------------------------------------------------------------


def _example(run: RunConfig) -> int:
    """Positions of the example request: enough for every cp block and stripe to show."""
    cycle = run.layout.stripes.count * run.layout.stripes.interleave
    return min(MOST_CELLS, max(16, 4 * run.layout.mesh.cp, 2 * cycle))


def _columns(run: RunConfig) -> dict[str, Column]:
    moe, heads = run.arch.moe, min(run.arch.heads, MOST_CELLS)
    length = _example(run)
    kinds = [
        ("rows", "prefill: rows", f"positions of one prompt of {length}", 1.0, length),
        ("heads", "prefill: heads", f"{run.arch.heads} query heads", 0.9, heads),
        ("kv", "cached positions", "the same prompt", 1.0, length),
        ("batch", "decode: rows", f"{DECODE_ROWS} requests", 0.55, DECODE_ROWS),
        ("owned", "decode: heads", "owned, and met by queries", 0.9, heads),
        ("ffn", "feed-forward", "part of the width", 0.7, 1),
        ("vocab", "vocabulary", "of the head", 0.45, 1),
    ]
    if moe is not None:
        cells = min(moe.experts, MOST_CELLS)
        kinds[5] = ("ffn", "experts", f"{moe.experts} experts", 0.8, cells)
    left, gap = 182.0, 15.0
    unit = (WIDTH - MARGIN - left - gap * (len(kinds) - 1)) / sum(k[3] for k in kinds)
    columns, x = {}, left
    for key, title, under, share, cells in kinds:
        columns[key] = Column(title, under, x, unit * share, cells)
        x += unit * share + gap
    return columns


def _ranks(canvas: Canvas, run: RunConfig, y: float) -> float:
    columns, mesh = _columns(run), run.layout.mesh
    for column in columns.values():
        canvas.add(
            Text(column.x, y + 12, column.title, 12, INK, bold=True),
            Text(column.x, y + 26, column.under, 10, SOFT),
        )
    y += 36
    for place in places(run):
        here = mesh.coord(place.rank)
        colour = COLOURS[here.dp % len(COLOURS)]
        if place.rank % mesh.replica_size == 0:
            height = mesh.replica_size * LINE_H
            canvas.add(Box(MARGIN, y, WIDTH - 2 * MARGIN + 8, height, mix(colour, 0.05), 5))
            canvas.add(Box(MARGIN, y, 4, height, colour, 2))
        elif place.rank % mesh.attn_tp == 0:
            canvas.add(Line(MARGIN + 8, y, WIDTH - MARGIN, y, RULE))
        names = [f"dp {here.dp}"] * (mesh.dp > 1) + [f"cp {here.cp}"] * (mesh.cp > 1)
        names += [f"tp {here.tp}"] * (mesh.attn_tp > 1)
        canvas.add(
            Text(MARGIN + 14, y + 17, f"rank {place.rank}", 12, INK, bold=True),
            Text(MARGIN + 60, y + 17, "  ".join(names), 10, SOFT),
        )
        for key, column in columns.items():
            _strip(canvas, column, y + (LINE_H - STRIP_H) / 2, *_cells(run, place, key), colour)
        y += LINE_H
        if (place.rank + 1) % mesh.replica_size == 0:
            y += 6
    return _legend(canvas, y + 8)


def _legend(canvas: Canvas, y: float) -> float:
    colour, x = COLOURS[0], MARGIN + 14
    for shade, words in (
        (colour, "held or worked on by the rank"),
        (mix(colour, TINT), "heads whose queries meet its cached positions; the part of an expert "
         "or of a cached position that others hold"),
        (EMPTY, "elsewhere"),
    ):  # fmt: skip
        canvas.add(Box(x, y - 9, 10, 10, shade, 1.5), Text(x + 16, y, words, 10, SOFT))
        x += 40 + 4.9 * len(words)
    return y


Fill = tuple[float, float]
WHOLE: Fill = (0.0, 1.0)


def _cells(run: RunConfig, place: Place, key: str) -> tuple[set[int], set[int], Fill]:
    """Of a strip's cells: those held, those only met, and which part of a cell's height is held."""
    here, cp, length = run.layout.mesh.coord(place.rank), run.layout.mesh.cp, _example(run)
    if key == "rows":
        if run.layout.cp_split == "zigzag":
            rows = zigzag(length, cp, here.cp)
        else:
            rows = interleaved(0, length, cp, here.cp, run.layout.stripes.interleave)
        return set(rows.tolist()), set(), WHOLE
    if key == "heads":
        return _scaled(place.heads, run.arch.heads), set(), WHOLE
    if key == "kv":
        kept = place.own.stripes.positions(0, length, place.own.stripe(place.rank))
        heads = place.kv
        share = (heads.start / run.arch.kv_heads, heads.stop / run.arch.kv_heads)
        return set(kept.tolist()), set(), share
    if key == "batch":
        sharded = "cp" in run.layout.decode.rows_in.shard
        held = range(*part(DECODE_ROWS, cp, here.cp)) if sharded else range(DECODE_ROWS)
        return set(held), set(), WHOLE
    if key == "owned":
        owned = place.owned if run.layout.split_decode else place.heads
        met: Sequence[int] = ()
        if run.layout.decode.exchange is Exchange.Q_TO_KV:
            met = place.own.group_heads(place.rank)
        return _scaled(owned, run.arch.heads), _scaled(met, run.arch.heads), WHOLE
    if key == "vocab":
        start, stop = place.head(run.arch.vocab)
        return {0}, set(), (start / run.arch.vocab, stop / run.arch.vocab)
    if run.arch.moe is None:
        start, stop = place.width(run.arch.ffn_width)
        return {0}, set(), (start / run.arch.ffn_width, stop / run.arch.ffn_width)
    held = range(*place.experts(run.arch.moe.experts))
    start, stop = place.expert_width(run.arch.moe.width)
    width = run.arch.moe.width
    return _scaled(held, run.arch.moe.experts), set(), (start / width, stop / width)


def _scaled(held: Sequence[int], total: int) -> set[int]:
    """Cells that stand for the held ones when a strip has fewer cells than there are."""
    cells = min(total, MOST_CELLS)
    return {i * cells // total for i in held}


def _strip(
    canvas: Canvas,
    column: Column,
    y: float,
    held: set[int],
    met: set[int],
    share: Fill,
    colour: str,
) -> None:
    step = column.width / column.cells
    gap = 1.0 if step < 10 else 1.5
    low, high = share
    for i in range(column.cells):
        x, w = column.x + i * step, step - gap
        partly = i in held and share != WHOLE and column.cells > 1
        ground = mix(colour, TINT) if i in met or partly else EMPTY
        canvas.add(Box(x, y, w, STRIP_H, ground, 1.5))
        if i not in held:
            continue
        if column.cells == 1:  # a part of one wide cell lies along it
            canvas.add(Box(x + low * w, y, max((high - low) * w, 2), STRIP_H, colour, 1.5))
        else:
            height = max((high - low) * STRIP_H, 3)
            canvas.add(Box(x, y + low * (STRIP_H - 1), w, height, colour, 1.0))


# moves -------------------------------------------------------------------------------------------


def _flow(canvas: Canvas, view: Describer, phase: Phase, y: float) -> float:
    """The verbs of one layer as a chain of chips."""
    residual = {"sharded": "sharded over all ranks", "replica": "whole in a replica",
                "replicated": "on every rank"}[view.residual(phase)]  # fmt: skip
    canvas.add(
        Text(MARGIN, y + 10, f"{phase.value}: one layer", 13, INK, bold=True),
        Text(MARGIN + 130, y + 10, f"{view.rows[phase]:,} rows a replica; between blocks rows are "
             f"{residual}", 11, SOFT),
    )  # fmt: skip
    y += 22
    moves = view.moves(phase)
    if not moves:
        canvas.add(Text(MARGIN, y + 14, "nothing moves", 11, SOFT))
        return y + 20
    x, width, height = MARGIN, 158.0, 52.0
    for i, move in enumerate(moves):
        if x + width > WIDTH - MARGIN + 1:
            x, y = MARGIN, y + height + 12
        if i and x > MARGIN:
            mid = y + height / 2
            canvas.add(
                Line(x - 16, mid, x - 3, mid, SOFT, 1.4),
                Line(x - 7, mid - 4, x - 3, mid, SOFT, 1.4),
                Line(x - 7, mid + 4, x - 3, mid, SOFT, 1.4),
            )
        _chip(canvas, x, y, width, height, move)
        x += width + 18
    return y + height


def _chip(canvas: Canvas, x: float, y: float, width: float, height: float, move: Move) -> None:
    attention = "attn" in move.at or "attend" in move.at
    colour = "#2f6db5" if attention else "#3a9a5b"
    canvas.add(
        Box(x, y, width, height, mix(colour, 0.08), 6, mix(colour, 0.45)),
        Text(x + 10, y + 15, move.at.replace("_", " "), 10, SOFT),
        Text(x + 10, y + 30, move.verb.replace("_", " "), 12, colour, bold=True),
        Text(x + 10, y + 45, f"over {' '.join(move.axes)}", 10, INK),
        Text(x + width - 10, y + 45, _size(move.bytes), 10, INK, anchor="end"),
    )


def _size(nbytes: int) -> str:
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" or value >= 10 else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("units end with GiB")
