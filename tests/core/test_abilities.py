"""Kernels are held to what `core.abilities` says: what is listed is right, the rest an error."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from anabranch import ops
from anabranch.core.abilities import ABILITIES, Ability
from anabranch.ops import Ops
from anabranch.ops.cpu.provider import unusable

COMPILED = unusable() is None
HERE = [a for a in ABILITIES if a.device == "cpu" and (COMPILED or a.provider != "cpp")]
Call = Callable[[Ops, torch.dtype, int, int | None, bool], tuple[Tensor, Tensor]]


def bound(provider: str) -> Ops:
    return ops.bind("cpu", provider, threads=1)  # type: ignore[arg-type]


def values(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sinks(heads: int, wanted: bool) -> Tensor | None:
    return torch.linspace(-1, 1, heads) if wanted else None


def rows(o: Ops, dtype: torch.dtype, width: int, window: int | None, sink: bool):
    q, k = values(1, 5, 4, width, dtype=dtype), values(2, 9, 2, width, dtype=dtype)
    kv_map = torch.tensor([0, 0, 1, 1], dtype=torch.int32)
    return o.attend_rows(
        q, k, k, torch.arange(4, 9), torch.arange(9), kv_map=kv_map, scale=width**-0.5,
        window=window, sink=sinks(4, sink),
    )  # fmt: skip


def table(window: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
    lens = torch.tensor([0, 3, 9], dtype=torch.int32)
    start = None if window is None else (lens - window).clamp(min=0)
    return torch.arange(9, dtype=torch.int32).view(3, 3), lens, start


def paged_gqa(o: Ops, dtype: torch.dtype, width: int, window: int | None, sink: bool):
    pages, lens, start = table(window)
    kv_map = torch.tensor([0, 0, 1, 1], dtype=torch.int32)
    q, pool = values(1, 3, 4, width, dtype=dtype), values(2, 36, 4 * width, dtype=dtype)
    return o.attend_paged_gqa(
        q, pool, pages, lens, page_slots=4, kv_map=kv_map, scale=width**-0.5, start=start,
        sink=sinks(4, sink),
    )  # fmt: skip


def paged_mla(o: Ops, dtype: torch.dtype, width: int, window: int | None, sink: bool):
    pages, lens, start = table(window)
    q, pool = values(1, 3, 4, width, dtype=dtype), values(2, 36, width, dtype=dtype)
    return o.attend_paged_mla(
        q, pool, pages, lens, page_slots=4, value_width=max(width - 8, 1), scale=width**-0.5,
        start=start, sink=sinks(4, sink),
    )  # fmt: skip


CALLS: dict[str, Call] = {
    "attend_rows": rows, "attend_paged_gqa": paged_gqa, "attend_paged_mla": paged_mla,
}  # fmt: skip


def widths(a: Ability) -> Iterator[int]:
    for width in (a.unit, 3 * a.unit, 64, 576):
        if width % a.unit == 0 and width <= a.most_width:
            yield width


@pytest.mark.parametrize("a", HERE, ids=lambda a: f"{a.op}-{a.provider}")
def test_what_is_listed_runs_and_equals_the_reference(a: Ability) -> None:
    call, reference = CALLS[a.op], bound("reference")
    for dtype in a.dtypes:
        kind = getattr(torch, dtype)
        tolerance = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}[dtype]
        for width in widths(a):
            for window in (None, 2) if a.windows else (None,):
                for sink in (False, True) if a.sinks else (False,):
                    out, lse = call(bound(a.provider), kind, width, window, sink)
                    want, want_lse = call(reference, kind, width, window, sink)
                    assert lse.dtype == torch.float32, "the lse is fp32"
                    torch.testing.assert_close(
                        out.float(), want.float(), atol=tolerance, rtol=tolerance
                    )
                    torch.testing.assert_close(lse, want_lse, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("a", HERE, ids=lambda a: f"{a.op}-{a.provider}")
def test_dtypes_that_are_not_listed_are_errors(a: Ability) -> None:
    for dtype in ("float64", "int32"):
        assert dtype not in a.dtypes
        with pytest.raises(ValueError):
            CALLS[a.op](bound(a.provider), getattr(torch, dtype), 64, None, False)


@pytest.mark.parametrize(
    "a", [a for a in HERE if "paged" in a.op], ids=lambda a: f"{a.op}-{a.provider}"
)
def test_a_pool_of_another_dtype_is_an_error(a: Ability) -> None:
    pages, lens, _ = table(None)
    pool = values(2, 36, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="dtype"):
        if a.op == "attend_paged_mla":
            bound(a.provider).attend_paged_mla(
                values(1, 3, 4, 64, dtype=torch.float32), pool, pages, lens, page_slots=4,
                value_width=56, scale=1.0,
            )  # fmt: skip
        else:
            bound(a.provider).attend_paged_gqa(
                values(1, 3, 4, 32, dtype=torch.float32), pool, pages, lens, page_slots=4,
                kv_map=torch.zeros(4, dtype=torch.int32), scale=1.0,
            )  # fmt: skip


def test_every_provider_of_attention_is_listed() -> None:
    from anabranch.ops import table as known

    for op in (known.ATTEND_ROWS, known.ATTEND_PAGED_GQA, known.ATTEND_PAGED_MLA):
        listed = {(a.provider, a.device) for a in ABILITIES if a.op == op.name}
        assert {(p.name, p.device) for p in op.providers} <= listed
        assert ("reference", "cpu") in listed
