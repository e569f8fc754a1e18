"""From flags to a `RunConfig`: find the model, read its facts, look at the machine. No torch."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

from anabranch.comm.endpoint import choose_transport
from anabranch.core.arch_reader import read_arch
from anabranch.core.config import EngineConfig
from anabranch.core.resolve import RunConfig, resolve
from anabranch.device.probe import probe
from anabranch.engine.masks import Masks, choose_masks, read_topology
from anabranch.engine.remote import Place, place_of_process
from anabranch.layout import costs
from anabranch.models.reads import decode_notes
from anabranch.weights.catalog import cache_folder
from anabranch.weights.config import read_config
from anabranch.weights.locate import locate


@dataclass(frozen=True)
class Prepared:
    """A resolved run, where its files are, and which cores its ranks use (None: not pinned)."""

    run: RunConfig
    path: Path
    masks: Masks | None = None


def costs_file() -> Path:
    """Where the costs that were measured on this machine are kept (`anabranch env --calibrate`)."""
    return cache_folder() / "costs.json"


def prepare(config: EngineConfig) -> Prepared:
    """ValueError (a bad model or setting) or Refusal (a combination) if it cannot run."""
    place = place_of_process(config)
    config = replace(config, transport=_transport(config, place))
    path = locate(config.model)
    arch = read_arch(read_config(path))
    costs_of = partial(costs.load, costs_file())
    run = resolve(config, arch, probe(config.device), costs_of)
    run = replace(run, notes=run.notes + decode_notes(run))
    _try_folder(config.debug_dir)
    if run.device != "cpu":
        return Prepared(run, path)
    ranks_here = run.layout.mesh.world if place is None else place.local_world
    masks = choose_masks(read_topology(config.cores), ranks_here)
    if config.threads is None:
        run = replace(run, threads=masks.threads)
    return Prepared(run, path, masks)


def _try_folder(path: str | None) -> None:
    """ValueError unless traces can be written there; it is made if need be."""
    if path is None:
        return
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(f"--debug-dir {path}: cannot be written to: {error.strerror}") from None


def _transport(config: EngineConfig, place: Place | None) -> str:
    """What resolve's choices depend on: not auto for ranks that are processes."""
    if config.tp == 1 or config.ranks == "threads":
        return config.transport
    if place is None:
        return choose_transport(config.transport)
    if config.transport == "shm":
        raise ValueError("--transport shm needs ranks started by one parent; torchrun's use gloo")
    return "gloo"
