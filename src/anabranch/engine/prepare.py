"""From flags to a `RunConfig`: find the model, read its facts, look at the machine. No torch."""

from dataclasses import dataclass
from pathlib import Path

from anabranch.core.arch_reader import read_arch
from anabranch.core.config import EngineConfig
from anabranch.core.resolve import RunConfig, resolve
from anabranch.device.probe import probe
from anabranch.weights.config import read_config
from anabranch.weights.locate import locate


@dataclass(frozen=True)
class Prepared:
    """A resolved run and where its files are."""

    run: RunConfig
    path: Path


def prepare(config: EngineConfig) -> Prepared:
    """ValueError (a bad model or setting) or Refusal (a combination) if it cannot run."""
    path = locate(config.model)
    arch = read_arch(read_config(path))
    return Prepared(resolve(config, arch, probe(config.device)), path)
