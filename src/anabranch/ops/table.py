"""The table of ops, and the choice of a provider for each, made once per device.

Owns what an ``Op`` is, which ops there are and ``bind``. Knows no kernel's inside: a provider says
by itself whether it can run here. Nothing is kept between calls, so engines do not meet in it.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import torch

from anabranch.ops import samples
from anabranch.ops.cpu import provider as cpp
from anabranch.ops.reference import attention, partials, products, rows
from anabranch.ops.samples import Sample
from anabranch.ops.signatures import (
    AttendPaged,
    AttendPagedMla,
    AttendRows,
    CopyRows,
    Gated,
    Linear,
    MergePartials,
    PackPartials,
    RmsNorm,
    RunExperts,
    SumMembers,
)

Choice = Literal["auto", "reference", "cpp"]
Kernel = TypeVar("Kernel", bound=Callable[..., object])

EXACT: Mapping[torch.dtype, float] = {}
MERGE = {torch.float32: 2e-6, torch.bfloat16: 7.8e-3, torch.float16: 1e-3}
PRODUCTS = {torch.float32: 2e-5, torch.bfloat16: 3.2e-2, torch.float16: 4e-3}
ATTENTION = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Provider(Generic[Kernel]):
    """One implementation of an op on one device.

    ``supports`` gives None when it can run on this machine, else the reason it cannot; ``load``
    gives the kernel for a number of threads, and is called only after ``supports`` gave None.
    """

    name: str
    device: str
    supports: Callable[[], str | None]
    load: Callable[[int], Kernel]


@dataclass(frozen=True)
class Op(Generic[Kernel]):
    """An op: its torch reference (spec, fallback, oracle), tolerance, sample inputs and providers.

    ``tolerance`` is the largest absolute error against the reference per output dtype, on samples
    of unit scale; a dtype that is not named must be bit-equal.
    """

    name: str
    reference: Kernel
    tolerance: Mapping[torch.dtype, float]
    samples: Callable[[], Iterable[Sample]]
    providers: tuple[Provider[Kernel], ...] = ()

    def choose(self, device: str, choice: Choice, threads: int) -> tuple[str, Kernel]:
        """The provider's name and kernel for a device; ValueError when the asked one cannot run."""
        reasons = []
        for p in self.providers if choice != "reference" else ():
            if p.device != device or choice not in ("auto", p.name):
                continue
            reason = p.supports()
            if reason is None:
                return p.name, p.load(threads)
            reasons.append(f"{p.name}: {reason}")
        if choice in ("auto", "reference"):
            return "reference", self.reference
        why = "; ".join(reasons) or f"{choice} has none for device {device!r}"
        raise ValueError(f"op {self.name}: {why}; use provider='auto' or 'reference'")


@dataclass(frozen=True)
class Ops:
    """Every op, bound for one device. ``providers`` names the provider of each."""

    device: str
    copy_rows: CopyRows
    pack_partials: PackPartials
    merge_partials: MergePartials
    sum_members: SumMembers
    attend_paged_gqa: AttendPaged
    attend_paged_mla: AttendPagedMla
    attend_rows: AttendRows
    rms_norm: RmsNorm
    gated: Gated
    linear: Linear
    run_experts: RunExperts
    providers: Mapping[str, str]

    def describe(self) -> dict[str, str]:
        """Op name -> provider name."""
        return dict(self.providers)


def _cpp(load: Callable[[cpp.CppOps], Kernel]) -> tuple[Provider[Kernel], ...]:
    return (Provider("cpp", "cpu", cpp.unusable, lambda threads: load(cpp.CppOps(threads))),)


COPY_ROWS: Op[CopyRows] = Op(
    "copy_rows", rows.copy_rows, EXACT, samples.copy_rows, _cpp(lambda k: k.copy_rows)
)
PACK_PARTIALS: Op[PackPartials] = Op(
    "pack_partials",
    partials.pack_partials,
    EXACT,
    samples.pack_partials,
    _cpp(lambda k: k.pack_partials),
)
MERGE_PARTIALS: Op[MergePartials] = Op(
    "merge_partials",
    partials.merge_partials,
    MERGE,
    samples.merge_partials,
    _cpp(lambda k: k.merge_partials),
)
SUM_MEMBERS: Op[SumMembers] = Op(
    "sum_members", rows.sum_members, EXACT, samples.sum_members, _cpp(lambda k: k.sum_members)
)
ATTEND_PAGED_GQA: Op[AttendPaged] = Op(
    "attend_paged_gqa",
    attention.attend_paged_gqa,
    ATTENTION,
    samples.attend_paged_gqa,
    _cpp(lambda k: k.attend_paged_gqa),
)
ATTEND_PAGED_MLA: Op[AttendPagedMla] = Op(
    "attend_paged_mla",
    attention.attend_paged_mla,
    ATTENTION,
    samples.attend_paged_mla,
    _cpp(lambda k: k.attend_paged_mla),
)
ATTEND_ROWS: Op[AttendRows] = Op(
    "attend_rows",
    attention.attend_rows,
    ATTENTION,
    samples.attend_rows,
    _cpp(lambda k: k.attend_rows),
)

RMS_NORM: Op[RmsNorm] = Op(
    "rms_norm", products.rms_norm, PRODUCTS, samples.rms_norm, _cpp(lambda k: k.rms_norm)
)
GATED: Op[Gated] = Op("gated", products.gated, PRODUCTS, samples.gated, _cpp(lambda k: k.gated))
LINEAR: Op[Linear] = Op(
    "linear", products.linear, PRODUCTS, samples.linear, _cpp(lambda k: k.linear)
)
RUN_EXPERTS: Op[RunExperts] = Op(
    "run_experts",
    products.run_experts,
    PRODUCTS,
    samples.run_experts,
    _cpp(lambda k: k.run_experts),
)


def bind(device: str = "cpu", provider: Choice = "auto", threads: int | None = None) -> Ops:
    """Every op for one device, each with the best provider that runs here, or the asked one.

    ``threads`` bounds a call's threads (torch's number when None). A provider that is asked for
    and cannot run is a ValueError with the reason; under "auto" the reference takes its place,
    with one warning.
    """
    if provider not in ("auto", "reference", "cpp"):
        raise ValueError(f"provider {provider!r}; one of 'auto', 'reference', 'cpp'")
    reason = cpp.unusable() if device == "cpu" and provider == "auto" else None
    if reason is not None:
        warnings.warn(f"the reference ops run, slowly: {reason}", RuntimeWarning, stacklevel=2)
    team = torch.get_num_threads() if threads is None else threads
    names: dict[str, str] = {}

    def pick(op: Op[Kernel]) -> Kernel:
        names[op.name], kernel = op.choose(device, provider, team)
        return kernel

    return Ops(
        device=device,
        copy_rows=pick(COPY_ROWS),
        pack_partials=pick(PACK_PARTIALS),
        merge_partials=pick(MERGE_PARTIALS),
        sum_members=pick(SUM_MEMBERS),
        attend_paged_gqa=pick(ATTEND_PAGED_GQA),
        attend_paged_mla=pick(ATTEND_PAGED_MLA),
        attend_rows=pick(ATTEND_ROWS),
        rms_norm=pick(RMS_NORM),
        gated=pick(GATED),
        linear=pick(LINEAR),
        run_experts=pick(RUN_EXPERTS),
        providers=names,
    )


def describe() -> dict[str, str]:
    """The compiled part, for people: instruction sets, the one in use, threads."""
    here = cpp.machine()
    if here is None:
        return {"compiled": "no", "why": cpp.unusable() or ""}
    usable = cpp.unusable()
    return {
        "compiled": ", ".join(here.compiled),
        "runnable": ", ".join(here.runnable),
        "isa": cpp.chosen_isa(here) if usable is None else f"none: {usable}",
        "threads": f"{torch.get_num_threads()} ({here.team})",
    }
