"""The compiled CPU provider: finds the extension, picks an instruction set, gives the kernels.

Owns the allocation of results around the extension's kernels. The extension itself checks shapes
and dtypes. Without it (no compiler at install) ``unusable`` says so and nothing here is called.
"""

import importlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anabranch.ops.reference import products
from anabranch.ops.signatures import (
    Base,
    CopyRows,
    PackPartials,
)

if TYPE_CHECKING:
    from anabranch.ops.cpu import _cpu

ISA_VARIABLE = "ANABRANCH_ISA"
FEW = 24
"""Rows an expert, on average, from which the library's matrix products are quicker, where it has
quick ones for the dtype at all."""


@dataclass(frozen=True)
class Machine:
    """What the extension can do here: instruction sets compiled and runnable, widest first."""

    compiled: tuple[str, ...]
    runnable: tuple[str, ...]
    team: str
    tiles: bool
    """Whether the processor multiplies tiles of bfloat16 (AMX)."""


def machine() -> Machine | None:
    """None where the extension was not built."""
    try:
        extension = importlib.import_module("anabranch.ops.cpu._cpu")
    except ModuleNotFoundError:
        return None
    isas = extension.isas()
    compiled = tuple(name for name, _ in isas)
    runnable = tuple(name for name, runs in isas if runs)
    return Machine(compiled, runnable, extension.team_name(), extension.has_tiles())


def library_from(isa: str, tiles: bool) -> dict[torch.dtype, int]:
    """Rows from which the library's matrix product is quicker than the one here, which reads the
    weights once for up to 8 rows; of dtypes that are missing it has no quick one."""
    if isa != "avx512":
        return {torch.float32: 17}
    return {torch.float32: 17, torch.bfloat16: 5 if tiles else 17}


def chosen_isa(here: Machine) -> str:
    """The widest runnable instruction set, or the one ANABRANCH_ISA asks for."""
    asked = os.environ.get(ISA_VARIABLE)
    if asked is None or asked == "auto":
        if not here.runnable:
            raise ValueError(f"none of the compiled instruction sets {here.compiled} runs here")
        return here.runnable[0]
    if asked not in here.runnable:
        raise ValueError(
            f"{ISA_VARIABLE}={asked!r}: of the compiled {here.compiled} this machine runs "
            f"{here.runnable}; unset it or name one of these"
        )
    return asked


def unusable() -> str | None:
    """Why the provider cannot run here, or None."""
    here = machine()
    if here is None:
        return (
            "the compiled ops are missing (no C++ compiler at install, or a checkout not built);"
            " reinstall where a compiler works"
        )
    if not here.runnable:
        return f"this processor runs none of {here.compiled}"
    return None


class CppOps:
    """The kernels of one instruction set, each over up to ``threads`` threads."""

    copy_rows: CopyRows
    pack_partials: PackPartials

    def __init__(self, threads: int) -> None:
        here = machine()
        assert here is not None, "ask unusable() first"
        extension = importlib.import_module("anabranch.ops.cpu._cpu")
        isa = chosen_isa(here)
        self._native: _cpu.Provider = extension.Provider(isa, threads, Tensor)
        self._library_from = library_from(isa, here.tiles)
        self.copy_rows = self._native.copy_rows
        self.pack_partials = self._native.pack_partials

    def sum_members(self, parts: Tensor | Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        """See ``signatures.SumMembers``."""
        if out is None:
            if not len(parts):
                raise ValueError("sum_members: no parts; give one per member")
            out = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
        self._native.sum_members(parts, out)
        return out

    def merge_partials(
        self,
        partials: Tensor,
        lse: Tensor,
        *,
        base: Base = "e",
        sink: Tensor | None = None,
        out: Tensor | None = None,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See ``signatures.MergePartials``."""
        if base not in ("e", "2"):
            raise ValueError(f"merge_partials: base {base!r}; use 'e' or '2'")
        if out is None:
            out = partials.new_empty(partials.shape[1:])
        if lse_out is None:
            lse_out = lse.new_empty(lse.shape[1:])
        self._native.merge_partials(partials, lse, base == "2", sink, out, lse_out)
        return out, lse_out

    def attend_paged_gqa(
        self,
        q: Tensor,
        pool: Tensor,
        page_table: Tensor,
        lens: Tensor,
        *,
        page_slots: int,
        kv_map: Tensor,
        scale: float,
        start: Tensor | None = None,
        sink: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See ``signatures.AttendPaged``."""
        out = torch.empty(q.shape, dtype=q.dtype)
        lse = torch.empty(q.shape[:-1], dtype=torch.float32)
        self._native.attend_paged_gqa(
            q, pool, page_table, lens, page_slots, kv_map, scale, start, sink, out, lse
        )
        return out, lse

    def attend_paged_mla(
        self,
        q: Tensor,
        pool: Tensor,
        page_table: Tensor,
        lens: Tensor,
        *,
        page_slots: int,
        value_width: int,
        scale: float,
        start: Tensor | None = None,
        sink: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See ``signatures.AttendPagedMla``."""
        out = torch.empty((*q.shape[:-1], max(value_width, 0)), dtype=q.dtype)
        lse = torch.empty(q.shape[:-1], dtype=torch.float32)
        self._native.attend_paged_mla(
            q, pool, page_table, lens, page_slots, value_width, scale, start, sink, out, lse
        )
        return out, lse

    def attend_rows(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_pos: Tensor,
        k_pos: Tensor,
        *,
        kv_map: Tensor,
        scale: float,
        window: int | None = None,
        sink: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See ``signatures.AttendRows``."""
        if window is not None and window < 1:
            raise ValueError(f"attend_rows: window {window}; a row sees itself, so 1 is the least")
        out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype)
        lse = torch.empty(q.shape[:-1], dtype=torch.float32)
        self._native.attend_rows(q, k, v, q_pos, k_pos, kv_map, scale, window or 0, sink, out, lse)
        return out, lse

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See ``signatures.RmsNorm``."""
        if x.dim() != 2 or x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        self._native.rms_norm(x, weight, eps, out)
        return out

    def gated(
        self,
        both: Tensor,
        *,
        limit: float | None = None,
        alpha: float = 1.0,
        shift: float = 0.0,
    ) -> Tensor:
        """See ``signatures.Gated``."""
        out = torch.empty((both.shape[0], both.shape[1] // 2), dtype=both.dtype)
        self._native.gated(both, math.inf if limit is None else limit, alpha, shift, out)
        return out

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See ``signatures.Linear``. Many rows are left to the library's matrix products."""
        if x.dim() != 2:
            rows = self.linear(x.flatten(0, -2), weight, bias)
            return rows.view(*x.shape[:-1], weight.shape[0])
        if x.shape[0] >= self._library_from.get(x.dtype, math.inf):
            return products.linear(x, weight, bias)
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype)
        self._native.linear(x, weight, bias, out)
        return out

    def run_experts(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        *,
        first: int,
        gate_up: Tensor,
        down: Tensor,
        limit: float | None = None,
        alpha: float = 1.0,
        shift: float = 0.0,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> Tensor:
        """See ``signatures.RunExperts``. Many rows are left to the library's matrix products."""
        if x.dtype in self._library_from and ids.numel() > FEW * len(down):
            return products.run_experts(
                x, ids, weights, first=first, gate_up=gate_up, down=down, limit=limit, alpha=alpha,
                shift=shift, gate_up_bias=gate_up_bias, down_bias=down_bias,
            )  # fmt: skip
        out = torch.empty(x.shape, dtype=x.dtype)
        self._native.run_experts(
            x, ids, weights, first, gate_up, down, math.inf if limit is None else limit, alpha,
            shift, gate_up_bias, down_bias, out,
        )  # fmt: skip
        return out
