"""The nearest layout that runs, for a refusal to name."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import log2

from anabranch.core.arch import Arch
from anabranch.core.ask import Ask, Machine
from anabranch.core.checks import MOST_RANKS, legal_stripes, refuse
from anabranch.core.config import EngineConfig


def nearest(config: EngineConfig, arch: Arch, machine: Machine) -> str | None:
    """The layout flags closest to the asked ones that pass every check."""

    stripes = max(1, Ask(config, arch, machine).N)

    def distance(other: EngineConfig) -> float:
        pairs = (("tp", 4.0), ("attn_dp", 1.0), ("attn_cp", 1.0), ("dcp", 0.5), ("ep", 0.25))
        total = 0.0
        for name, weight in pairs:
            mine = stripes if name == "dcp" else getattr(config, name)
            total += weight * abs(log2(max(mine, 1)) - log2(getattr(other, name)))
        return total

    passing = [c for c in _around(config) if refuse(c, arch, machine) is None]
    if not passing:
        return None
    best = min(passing, key=distance)
    flags = f"--tp {best.tp} --attn-dp {best.attn_dp} --attn-cp {best.attn_cp} --dcp {best.dcp}"
    return flags if best.ep == 1 else f"{flags} --ep {best.ep}"


def _around(config: EngineConfig) -> Iterator[EngineConfig]:
    """Layouts of up to the asked ranks, every choice within a layout left open."""
    most = min(max(config.tp, 1), MOST_RANKS)
    sizes = sorted({*range(1, min(most, 16) + 1), most})
    for tp in sizes:
        divisors = [d for d in range(1, tp + 1) if tp % d == 0]
        for dp, cp in product(divisors, divisors):
            if tp % (dp * cp):
                continue
            plain = replace(
                config, tp=tp, attn_dp=dp, attn_cp=cp, kv=None, decode_attn=None, dcp_interleave=1,
                dcp_exchange="auto", dcp_q="auto", kv_to_q="auto", cp_split="auto",
                moe_dispatch="auto", shared_experts="auto",
            )  # fmt: skip
            for stripes in legal_stripes(cp, tp // (dp * cp)):
                for ep in {1, config.ep} - {0}:
                    yield replace(plain, dcp=stripes, ep=ep)
