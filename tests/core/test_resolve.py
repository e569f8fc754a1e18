"""Every refusal is reached, has its code and numbers, and names a nearest layout that passes."""

import shlex
from collections.abc import Mapping
from dataclasses import replace

import pytest
from tests.core.refusals import BIG, CASES, MLA24, RESOLVED, machine_of
from tests.layouts import mla_arch

from anabranch.core.arch import Arch
from anabranch.core.ask import Refusal
from anabranch.core.checks import CHECKS, refuse
from anabranch.core.config import EngineConfig
from anabranch.core.nearest import nearest
from anabranch.core.resolve import resolve


@pytest.mark.parametrize(
    ("code", "flags", "arch"), CASES, ids=lambda v: v if type(v) is str else ""
)
def test_refusal(code: str, flags: Mapping[str, object], arch: Arch) -> None:
    machine, config = machine_of(code, flags), EngineConfig(**flags)  # type: ignore[arg-type]
    with pytest.raises(Refusal) as caught:
        resolve(config, arch, machine)
    refusal = caught.value
    assert refusal.code == code, refusal
    assert len(refusal.message) > 20 and f"[{code}]" in str(refusal)
    if code not in RESOLVED:
        found = refuse(config, arch, machine)
        assert found is not None and found.code == code
    if refusal.nearest is not None:
        words = shlex.split(refusal.nearest)
        pairs = zip(words[::2], words[1::2], strict=True)
        near = {flag[2:].replace("-", "_"): int(value) for flag, value in pairs}
        plain = EngineConfig(**near)  # type: ignore[arg-type]
        assert refuse(plain, arch, machine) is None, refusal.nearest


def test_every_code_is_reached() -> None:
    assert {code for code, _, _ in CASES} == set(CHECKS) | RESOLVED


def test_refusals_of_layouts_carry_numbers_that_the_message_shows() -> None:
    for code, flags, arch in CASES:
        found = refuse(EngineConfig(**flags), arch, machine_of(code, flags))  # type: ignore[arg-type]
        if found is not None and code not in ("unknown_debug_switch", "no_experts"):
            assert found.numbers, code
            shown = [n for n in found.numbers.values() if str(n) in found.message]
            assert shown, (code, found.message)


def test_nearest_keeps_the_ranks_where_it_can() -> None:
    assert nearest(EngineConfig(tp=4, attn_dp=2, dcp=4), MLA24, BIG) == (
        "--tp 4 --attn-dp 2 --attn-cp 1 --dcp 2"
    )
    assert nearest(EngineConfig(tp=5), MLA24, BIG) == "--tp 4 --attn-dp 1 --attn-cp 1 --dcp 1"
    six = mla_arch(heads=6)
    refusal = refuse(EngineConfig(tp=4), six)
    assert refusal is not None and refusal.code == "heads_not_divisible"
    near = nearest(EngineConfig(tp=4), six, BIG)
    assert near is not None and near.startswith("--tp 4 "), "another split of the same ranks"


def test_everything_left_open_is_chosen() -> None:
    run = resolve(EngineConfig(tp=4, attn_cp=2, dtype="float32"), MLA24, BIG)
    layout = run.layout
    assert layout.stripes.count == 2 and layout.split_decode
    assert layout.dcp_exchange == "fused" and layout.kv_to_q == "gather"
    assert layout.row_moves == "auto" and layout.residual == "auto"
    for name in ("dcp_q", "cp_split", "moe_dispatch", "lm_head", "embedding", "shared_experts"):
        assert getattr(layout, name) != "auto"
    gloo = resolve(
        EngineConfig(tp=4, attn_cp=2, transport="gloo", dtype="float32"), MLA24, BIG
    ).layout
    assert gloo.dcp_exchange in ("a2a", "ag_rs")
    wide = replace(MLA24, attn=replace(MLA24.attn, kv_lora=512))
    assert resolve(EngineConfig(tp=4, attn_cp=2), wide, BIG).layout.kv_to_q == "expand"
    small = resolve(
        EngineConfig(tp=4, attn_cp=4, prefill_chunk=512, workspace_tokens=1024), MLA24, BIG
    ).layout
    assert small.kv_to_q == "ring"
    replicated = resolve(EngineConfig(tp=2, attn_cp=2, decode_attn="replicated"), MLA24, BIG)
    assert replicated.layout.dcp_exchange == "lse"


def test_pages_are_rounded_to_stripes_and_said() -> None:
    run = resolve(EngineConfig(tp=6, attn_cp=3, page_size=64), MLA24, BIG)
    assert run.page_size == 66 and "page size 64 -> 66" in " ".join(run.notes)


def test_a_context_that_memory_does_not_hold_shrinks_only_if_nobody_asked() -> None:
    run = resolve(EngineConfig(kv_pages=3), MLA24, BIG)
    assert run.max_model_len == 192 and "context length 4096 -> 192" in " ".join(run.notes)


def test_striping_divides_kv_bytes() -> None:
    whole = resolve(EngineConfig(tp=4, attn_cp=2, dcp=1), MLA24, BIG)
    striped = resolve(EngineConfig(tp=4, attn_cp=2, dcp=4), MLA24, BIG)
    assert whole.kv_bytes_per_token == 4 * striped.kv_bytes_per_token
