"""A resolved run without files, for engines with fake workers; no fixtures."""

from pathlib import Path

from anabranch.core.arch import GQA, Arch, Rope
from anabranch.core.config import EngineConfig
from anabranch.core.resolve import Machine, resolve
from anabranch.engine.prepare import Prepared

ARCH = Arch(
    "llama", 96, 2, 1003, 160, 1e-5, Rope(8), GQA(24, 24, 8, 0.35), max_len=512, dtype="float32"
)


def prepared(**options: object) -> Prepared:
    config = EngineConfig(**{"kv_pages": 64, "device": "cpu", **options})  # type: ignore[arg-type]
    run = resolve(config, ARCH, Machine(memory=8 << 30, cores=2))
    return Prepared(run, Path("nowhere"))
