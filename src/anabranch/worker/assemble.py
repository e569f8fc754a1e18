"""The one place where choices become objects: from a `RunConfig` and a rank to a `Worker`."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from anabranch import ops
from anabranch.comm.debug import Checked, CollectiveTrace
from anabranch.comm.group import Group, Trace, Transport
from anabranch.comm.moves import row_moves
from anabranch.core.resolve import RunConfig
from anabranch.kv.pool import KvSpec, Pool
from anabranch.layout.choice import Place
from anabranch.layout.mesh import Axes
from anabranch.models.registry import family
from anabranch.weights.load import load, update
from anabranch.weights.readers.base import Reader
from anabranch.weights.readers.open import open_reader
from anabranch.weights.share import Alone, Share
from anabranch.worker.blocks import BlockMaker
from anabranch.worker.inputs import InputMaker
from anabranch.worker.runner import Worker
from anabranch.worker.sampler import Sampler
from anabranch.worker.seats import Seats


class World(Protocol):
    """How the ranks of a model copy reach each other."""

    def transport(self, members: tuple[int, ...], me: int) -> Transport:
        """The transport of one group; every member asks for its groups in the same order."""
        ...


@dataclass
class Groups:
    """Groups of one rank, made once for exactly the axes in use."""

    run: RunConfig
    rank: int
    world: World | None
    trace: Trace | None = None

    def __post_init__(self) -> None:
        self._made: dict[tuple[int, ...], Group] = {}

    def along(self, axes: Axes) -> Group:
        members = self.run.layout.mesh.group(self.rank, axes)
        if members not in self._made:
            me = members.index(self.rank)
            transport = None
            if len(members) > 1:
                assert self.world is not None, "several ranks need a world"
                transport = self.world.transport(members, me)
                if "checksum" in self.run.config.debug_switches:
                    transport = Checked(transport)
            self._made[members] = Group(members, me, transport, trace=self.trace)
        return self._made[members]


def open_worker(
    run: RunConfig, path: Path, rank: int, world: World | None = None, share: Share | None = None
) -> Worker:
    """One rank of a run whose checkpoint is at `path`. share: how the host's ranks hold weights."""
    torch.set_num_threads(run.threads)
    reader = open_reader(path, run.config.load_format, run.config.seed)
    return build(run, rank, reader, share or Alone(), world)


def build(
    run: RunConfig,
    rank: int,
    reader: Reader,
    share: Share,
    world: World | None = None,
    trace: Trace | None = None,
) -> Worker:
    """Load this rank's weights and make everything it works with. trace: instead of the one that
    --debug trace writes to --debug-dir.
    """
    device = torch.device(run.device)
    layout, arch = run.layout, run.arch
    own = layout.ownership(arch.heads, arch.kv_heads)
    places = [Place(layout, own, r) for r in range(layout.mesh.world)]
    dtype = getattr(torch, run.dtype)
    kin = family(arch)
    # a rank whose host shares nothing loads all it needs by itself
    holders = [rank] if isinstance(share, Alone) else list(range(layout.mesh.world))
    recipes, me = [kin.recipe(arch, places[r]) for r in holders], holders.index(rank)
    weights = load(recipes, me, reader, dtype, share)
    written = None
    if "trace" in run.config.debug_switches and trace is None:
        trace = written = CollectiveTrace.to_folder(run.config.debug_dir or "anabranch-trace", rank)
    groups = Groups(run, rank, world, trace)
    bound = ops.bind(run.device, run.config.ops)  # type: ignore[arg-type]
    model = kin.load_builder()(
        arch, places[rank], bound, weights, groups.along, device, run.max_model_len + 1
    ).decoder()
    pad_page = run.kv_pages if "pad" in run.config.debug_switches else None
    pages = run.kv_pages + (pad_page is not None)
    spec = KvSpec(
        arch.layers, run.kv_width, pages, layout.stripes.local_page,
        getattr(torch, run.kv_dtype),
    )  # fmt: skip
    poison = "poison" in run.config.debug_switches
    pool = Pool(spec, device, poison)
    longest = -(-run.max_model_len // layout.stripes.page)
    seats = Seats.make(run.config.max_running, longest, device, pad_page)
    inputs = InputMaker(
        layout, own, rank, groups.along, device,
        BlockMaker(own, rank, run.round_tokens, device),
        row_moves(layout.row_moves, bound.copy_rows, layout.costs, poison),
        arch.hidden * dtype.itemsize, model.pad_lens,
        arch.windows, arch.moe is not None and arch.moe.hash_layers > 0,
    )  # fmt: skip
    replica = layout.mesh.coord(rank).dp
    leads = rank == layout.mesh.rank(dp=replica)
    refit = partial(update, recipes, me, weights, dtype=dtype, share=share, given=reader.given())
    return Worker(rank, replica, leads, model, pool, seats, inputs, Sampler(), refit, written)
