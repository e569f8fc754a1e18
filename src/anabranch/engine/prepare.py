"""From flags to a `RunConfig`: find the model, read its facts, look at the machine. No torch."""

from dataclasses import dataclass, replace
from pathlib import Path

from anabranch.core.arch_reader import read_arch
from anabranch.core.config import EngineConfig
from anabranch.core.resolve import RunConfig, resolve
from anabranch.device.probe import probe
from anabranch.engine.masks import Masks, choose_masks, read_topology
from anabranch.models.reads import decode_notes
from anabranch.weights.config import read_config
from anabranch.weights.locate import locate


@dataclass(frozen=True)
class Prepared:
    """A resolved run, where its files are, and which cores its ranks use (None: not pinned)."""

    run: RunConfig
    path: Path
    masks: Masks | None = None


def prepare(config: EngineConfig) -> Prepared:
    """ValueError (a bad model or setting) or Refusal (a combination) if it cannot run."""
    path = locate(config.model)
    arch = read_arch(read_config(path))
    run = resolve(config, arch, probe(config.device))
    run = replace(run, notes=run.notes + decode_notes(run))
    if run.device != "cpu":
        return Prepared(run, path)
    masks = choose_masks(read_topology(config.cores), run.layout.mesh.world)
    if config.threads is None:
        run = replace(run, threads=masks.threads)
    return Prepared(run, path, masks)
