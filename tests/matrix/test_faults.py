"""The matrix sees the faults it is there for: each is put in on purpose, and its cell must fail."""

from collections.abc import Callable

import pytest
import torch
from tests.matrix.book import Book
from tests.matrix.cells import Cell
from tests.matrix.scenario import Mismatch, Trial
from torch import Tensor

from anabranch.layout.ownership import Ints, Ownership, Stripes
from anabranch.nn.attention import exchange
from anabranch.nn.moe import dispatch
from anabranch.nn.step import StepInputs

BOTH = Cell("mla", {"tp": 4, "attn_cp": 2, "dcp": 4, "dcp_exchange": "a2a", "dcp_q": "gather"})
COMPUTED = Cell("mla", {"tp": 4, "attn_cp": 2, "dcp": 4, "dcp_q": "replicate"})
MAPPED = Cell("gqa4", {"tp": 4, "attn_cp": 2, "dcp": 4, "force": True})
DP = Cell("gqa4", {"tp": 2, "attn_dp": 2, "moe_dispatch": "gather"})


@pytest.fixture(scope="module")
def books() -> dict[str, Book]:
    return {cell.model: Book(cell.arch) for cell in (BOTH, DP)}  # one book a model


def natural_heads(patch: pytest.MonkeyPatch) -> None:
    """Computed queries left in natural order: owners get other ranks' heads (C > 1 and S > 1)."""
    patch.setattr(exchange.QToKv, "_group_heads", lambda route, q: q)


def natural_map(patch: pytest.MonkeyPatch) -> None:
    """The q -> kv map of the group's heads in natural order."""
    given = Ownership.group_heads
    patch.setattr(Ownership, "group_heads", lambda o, rank: tuple(sorted(given(o, rank))))


def skipped_slot(patch: pytest.MonkeyPatch) -> None:
    """Entries of one stripe land a page late: hits read what was never written."""
    given = Stripes.slot_of

    def late(self: Stripes, position: Ints) -> Ints:
        shifted: Ints = given(self, position) ^ 1
        return shifted

    patch.setattr(Stripes, "slot_of", late)


def one_short(patch: pytest.MonkeyPatch) -> None:
    """Rows do not see themselves on the stripe that holds them."""
    given = Stripes.local_len
    patch.setattr(
        Stripes, "local_len", lambda s, length, stripe: given(s, length - (stripe == 1), stripe)
    )


def summed_twice(patch: pytest.MonkeyPatch) -> None:
    """Experts' sum done twice over the same ranks."""

    def twice(step: StepInputs, x: Tensor) -> Tensor:
        return 2 * step.leave_ffn(x)

    patch.setattr(dispatch, "leave_ffn", twice)


def wrong_base(patch: pytest.MonkeyPatch) -> None:
    """The lse read in base 2."""
    given = exchange.PackRoute.__call__

    def misread(self: exchange.PackRoute, out: Tensor, lse: Tensor, sink: Tensor | None) -> Tensor:
        return given(self, out, lse * torch.log(torch.tensor(2.0)), sink)

    patch.setattr(exchange.PackRoute, "__call__", misread)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("fault", "cell"),
    [(natural_heads, COMPUTED), (natural_map, MAPPED), (skipped_slot, BOTH), (one_short, BOTH),
     (wrong_base, BOTH), (summed_twice, DP)],
    ids=lambda v: getattr(v, "__name__", ""),
)  # fmt: skip
def test_a_fault_is_seen(
    fault: Callable[[pytest.MonkeyPatch], None], cell: Cell, books: dict[str, Book],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    Trial(cell, books[cell.model]).run()
    fault(monkeypatch)
    with pytest.raises(Mismatch, match=r"differ|wanted"):
        Trial(cell, books[cell.model]).run()
