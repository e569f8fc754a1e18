"""Cells of the matrix: combinations of layout settings, which of them resolve accepts, and samples.

A cell fixes the settings under test; what is left is drawn from its name and a seed, so that other
settings vary over the cells too. Runs nothing.
"""

import random
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from tests.layouts import gqa_arch, mla_arch

from anabranch.core.arch import Arch
from anabranch.core.config import EngineConfig
from anabranch.core.resolve import refuse

Setting = str | int | bool

MODELS: Mapping[str, Arch] = {
    "mla": mla_arch(),
    "gqa4": gqa_arch(kv_heads=4),
    "gqa8": gqa_arch(kv_heads=8),
}
ROUTES = ("a2a", "ag_rs", "fused", "flashinfer", "lse")

DRAWN: Mapping[str, tuple[Setting, ...]] = {
    "dcp_q": ("gather", "replicate"),
    "dcp_interleave": (1, 1, 2),
    "row_moves": ("max", "sum", "v", "auto"),
    "moe_dispatch": ("gather", "a2a"),
    "lm_head": ("replica", "all"),
    "shared_experts": ("sharded", "replicated"),
    "embedding": ("whole", "sharded"),
    "residual": ("sharded", "replica", "replicated", "auto"),
    "prefill_chunk": (7, 16, 32, 64),
    "page_size": (4, 8),
    "ops": ("reference", "auto"),
}
"""Settings that vary by the seeded hash of a cell, unless the cell fixes them."""


@dataclass(frozen=True)
class Cell:
    """A model and the settings under test."""

    model: str
    settings: Mapping[str, Setting] = field(hash=False)

    @property
    def name(self) -> str:
        words = (f"{k}={v}" for k, v in self.settings.items())
        return f"{self.model} {' '.join(words)}"

    @property
    def arch(self) -> Arch:
        return MODELS[self.model]

    def refusal(self) -> str | None:
        """The code with which resolve refuses the cell, or None."""
        found = refuse(EngineConfig(**self.settings), self.arch)
        return None if found is None else found.code

    def random(self, seed: int) -> random.Random:
        return random.Random(zlib.crc32(f"{seed} {self.name}".encode()))

    def filled(self, seed: int) -> dict[str, Setting]:
        """The settings with every other one drawn, so that resolve still accepts."""
        rng = self.random(seed)
        settings = dict(self.settings)
        for name, choices in DRAWN.items():
            if name in settings:
                continue
            for value in rng.sample(choices, len(choices)):
                if refuse(EngineConfig(**{**settings, name: value}), self.arch) is None:
                    settings[name] = value
                    break
        return settings


@dataclass
class Census:
    """What became of the cells that were asked."""

    accepted: list[Cell] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)

    @staticmethod
    def of(cells: Iterator[Cell]) -> "Census":
        """Ask resolve about each cell. Stripes that save no memory are asked again with force."""
        census = Census()
        for cell in cells:
            code = cell.refusal()
            if code == "stripes_gain_nothing":
                census.refused[code] += 1
                cell = replace(cell, settings={**cell.settings, "force": True})
                code = cell.refusal()
            if code is None:
                census.accepted.append(cell)
            else:
                census.refused[code] += 1
        return census

    def sample(self, count: int, seed: int) -> list[Cell]:
        """A seeded sample in which every axis split of the accepted cells has its share."""
        rng = random.Random(seed)
        strata: dict[tuple[Setting, ...], list[Cell]] = {}
        for cell in rng.sample(self.accepted, len(self.accepted)):
            s = cell.settings
            key = (s["tp"], s["attn_dp"], s.get("attn_cp", 1), s.get("dcp", 1), cell.model)
            strata.setdefault(key, []).append(cell)
        order = rng.sample(sorted(strata, key=str), len(strata))
        picked: list[Cell] = []
        while len(picked) < min(count, len(self.accepted)):
            for key in order:
                if strata[key] and len(picked) < count:
                    picked.append(strata[key].pop())
        return picked


def divisors(n: int) -> Sequence[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def attention_cells(worlds: Sequence[int] = (1, 2, 4, 8)) -> Iterator[Cell]:
    """(R, C, A) x stripes x ep x model x decode form x exchange x cp-split x kv-to-q."""
    for world in worlds:
        for dp, cp in product(divisors(world), divisors(world)):
            if world % (dp * cp):
                continue
            for model, dcp, ep in product(MODELS, divisors(world), divisors(world)):
                base = {"tp": world, "attn_dp": dp, "attn_cp": cp, "dcp": dcp, "ep": ep}
                for more in _attention_forms(cp, dcp, model == "mla"):
                    yield Cell(model, {**base, **more})


def _attention_forms(cp: int, dcp: int, latent: bool) -> Iterator[dict[str, Setting]]:
    ways = ("gather", "ring", *(("expand",) if latent else ()))
    splits = list(product(("zigzag", "interleaved"), ways))
    decode = ("tp", "replicated") if cp > 1 else (None,)
    routes = ROUTES if dcp > 1 else (None,)
    for form, route, split in product(decode, routes, splits if cp > 1 else [None]):
        found: dict[str, Setting] = {}
        if form is not None:
            found["decode_attn"] = form
        if route is not None:
            found["dcp_exchange"] = route
        if split is not None:
            found["cp_split"], found["kv_to_q"] = split
        yield found


def dp_cells(worlds: Sequence[int] = (1, 2, 4, 8)) -> Iterator[Cell]:
    """(attn_dp x attn_tp = P) x ep x model x shared experts x row moves x dispatch."""
    for world in worlds:
        for dp, ep, model in product(divisors(world), divisors(world), ("mla", "gqa4")):
            for shared, moves, dispatch in product(
                ("sharded", "replicated"), ("max", "sum", "v"), ("gather", "a2a")
            ):
                yield Cell(
                    model,
                    {"tp": world, "attn_dp": dp, "ep": ep, "shared_experts": shared,
                     "row_moves": moves, "moe_dispatch": dispatch},
                )  # fmt: skip
