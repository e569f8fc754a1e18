"""What is asked of the engine, with the sizes that checks and choices need; and how it is refused.

Owns the words machine, ask and refusal. Decides nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from anabranch.core.arch import Arch
from anabranch.core.config import EngineConfig

Numbers = Mapping[str, int | str]


@dataclass(frozen=True)
class Machine:
    """What `device.probe` found. memory: bytes this process tree may use; cores it may run on."""

    device: str = "cpu"
    memory: int = 8 << 30
    cores: int = 1
    bf16: bool = True
    gpus: int = 0


@dataclass(eq=False)  # raising writes the traceback into it: it cannot be frozen
class Refusal(Exception):
    """Why a combination cannot run: a stable code, the numbers, and what would work."""

    code: str
    message: str
    numbers: Numbers = field(default_factory=dict)
    nearest: str | None = None

    def __str__(self) -> str:
        hint = f" Nearest layout that runs: {self.nearest}." if self.nearest else ""
        return f"{self.message}{hint} [{self.code}]"


@dataclass(frozen=True)
class Ask:
    """A configuration with the sizes every check needs. P = R * C * A ranks, N = C * S stripes."""

    config: EngineConfig
    arch: Arch
    machine: Machine = Machine()

    @property
    def A(self) -> int:
        return self.config.tp // (self.config.attn_dp * self.config.attn_cp)

    @property
    def N(self) -> int:
        c = self.config
        if c.dcp is not None:
            return c.dcp
        return 1 if c.kv == "replicated" else c.attn_cp

    @property
    def S(self) -> int:
        return self.N // self.config.attn_cp if self.N > 1 else 1

    @property
    def split_decode(self) -> bool:
        return self.config.decode_attn != "replicated"

    @property
    def transport(self) -> str:
        """Which table of costs applies, and what peers can do."""
        if self.config.ranks == "threads":
            return "threads"
        if self.machine.device == "cuda":
            return "nccl"
        return "shm" if self.config.transport == "auto" else self.config.transport

    @property
    def dtype(self) -> str:
        if self.config.dtype != "auto":
            return self.config.dtype
        native = self.machine.device == "cuda" or self.machine.bf16
        return self.arch.dtype if native else "float32"

    @property
    def kv_dtype(self) -> str:
        return self.dtype if self.config.kv_dtype == "auto" else self.config.kv_dtype
