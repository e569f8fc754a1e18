"""The table: every provider held to its reference, and how a provider is chosen (D9)."""

import warnings

import pytest
import torch
from tests.ops.providers import ISAS, Bind

from anabranch import ops
from anabranch.ops import table
from anabranch.ops.cpu import provider as cpp

OPS = [op for op in vars(table).values() if isinstance(op, ops.Op)]


def differ(op: ops.Op, mine: torch.Tensor, theirs: torch.Tensor) -> str | None:
    """What is wrong with a result, or None."""
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return f"{mine.shape} {mine.dtype} for {theirs.shape} {theirs.dtype}"
    equal = (mine == theirs) | (mine.isnan() & theirs.isnan())
    error = torch.where(equal, 0.0, (mine.double() - theirs.double()).abs())
    worst = float(error.max()) if error.numel() else 0.0
    allowed = op.tolerance.get(mine.dtype, 0.0)
    return None if worst <= allowed else f"error {worst}, allowed {allowed}"


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_provider_agrees_with_the_reference(op: ops.Op, threads: int, bind: Bind) -> None:
    kernel = getattr(bind(threads), op.name)
    wrong = {}
    count = 0
    for sample in op.samples():
        count += 1
        expected = sample.run(op.reference)
        found = sample.run(kernel)
        assert len(found) == len(expected) > 0
        for mine, theirs in zip(found, expected, strict=True):
            problem = differ(op, mine, theirs)
            if problem is not None:
                wrong[sample.name] = problem
    assert not wrong
    assert count >= 10


def test_every_op_is_bound() -> None:
    assert {op.name for op in OPS} == set(ops.bind("cpu").describe())
    assert len(OPS) == 11


def test_reference_is_bound_when_asked() -> None:
    bound = ops.bind("cpu", provider="reference")
    assert set(bound.describe().values()) == {"reference"}
    assert all(getattr(bound, op.name) is op.reference for op in OPS)


@pytest.mark.compiled
def test_the_compiled_part_is_built_and_chosen() -> None:
    """The development install compiles: a silent fallback here would leave C++ untested."""
    assert "generic" in ISAS
    assert set(ops.bind("cpu").describe().values()) == {"cpp"}
    assert ops.describe()["isa"] in ISAS


@pytest.mark.compiled
def test_each_instruction_set_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    for isa in ISAS:
        monkeypatch.setenv(cpp.ISA_VARIABLE, isa)
        assert ops.describe()["isa"] == isa
    monkeypatch.setenv(cpp.ISA_VARIABLE, "amx9")
    with pytest.raises(ValueError, match=r"amx9.*generic"):
        ops.bind("cpu")


def test_without_the_compiled_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """D9: the reference runs, with one warning; asking for C++ is refused with the reason."""
    monkeypatch.setattr(cpp, "machine", lambda: None)
    with pytest.warns(RuntimeWarning, match="compiled ops are missing") as caught:
        bound = ops.bind("cpu")
    assert len(caught) == 1
    assert set(bound.describe().values()) == {"reference"}
    assert ops.describe()["compiled"] == "no"
    with pytest.raises(ValueError, match="compiled ops are missing"):
        ops.bind("cpu", provider="cpp")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.bind("cpu", provider="reference")


def test_without_a_runnable_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp, "machine", lambda: cpp.Machine(("avx512",), (), "none", tiles=False))
    with pytest.warns(RuntimeWarning, match="runs none of"):
        assert set(ops.bind("cpu").describe().values()) == {"reference"}
    assert ops.describe()["isa"].startswith("none")


def test_unknown_provider_is_refused() -> None:
    with pytest.raises(ValueError, match="'cuda'"):
        ops.bind("cpu", provider="cuda")  # type: ignore[arg-type]


def test_all_halves_and_bf16_survive(bound: ops.Ops) -> None:
    """Every 16-bit pattern loads and stores to itself (a NaN to a NaN)."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        values = bits.view(dtype)
        found = bound.sum_members([values])
        nan = values.isnan()
        assert torch.equal(found.isnan(), nan)
        assert torch.equal(found.view(torch.int16)[~nan], bits[~nan])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_to_nearest_even(bound: ops.Ops, dtype: torch.dtype) -> None:
    """fp32 to 16 bits as the array library rounds: ties, overflow, subnormals, specials."""
    gen = torch.Generator().manual_seed(3)
    parts = torch.randint(-(1 << 15), 1 << 15, (2, 64, 501), generator=gen).to(torch.int16)
    ties = torch.tensor([1.0, 2.0**-11, 2.0**-8, 65504.0, 16.0, 6e-8, 3e38, -3e38, torch.inf, 0.0])
    values = parts.view(dtype).clone()
    values[:, 0, :10] = torch.stack((ties, ties.roll(1))).to(dtype)
    expected = (values[0].float() + values[1].float()).to(dtype)
    found = bound.sum_members(values)
    nan = expected.isnan()
    assert torch.equal(found.isnan(), nan)
    assert torch.equal(found[~nan].view(torch.int16), expected[~nan].view(torch.int16))


def test_sum_is_in_member_order(bound: ops.Ops) -> None:
    big = torch.full((1, 5), 2.0**24)
    ones = torch.ones(1, 5)
    assert torch.equal(bound.sum_members([big, ones, -big]), torch.zeros(1, 5))
    assert torch.equal(bound.sum_members([big, -big, ones]), torch.ones(1, 5))


def test_sum_refuses_what_does_not_match(bound: ops.Ops) -> None:
    for parts, out in (
        ([], None),
        ([torch.zeros(2, 3), torch.zeros(3, 2)], None),
        ([torch.zeros(2, 3), torch.zeros(2, 3).bfloat16()], None),
        ([torch.zeros(2, 3)], torch.zeros(2, 4)),
        ([torch.zeros(2, 3, dtype=torch.int32)], None),
        ([torch.zeros(3, 2).t()], None),
    ):
        with pytest.raises(ValueError, match="sum_members"):
            bound.sum_members(parts, out)
