"""Automatic choices: what the shipped tables lead to, and that a table decides."""

from dataclasses import replace
from pathlib import Path

import pytest

from anabranch.layout import costs as table
from anabranch.layout.costs import SHIPPED, Line
from anabranch.layout.decide import (
    Computed,
    StepShape,
    exchange_route,
    kv_to_q,
    queries,
    residual_layout,
    row_form,
)
from anabranch.layout.mesh import Mesh
from anabranch.layout.phases import decode_form, prefill_form
from anabranch.layout.rows import Verb

SHM, NCCL = SHIPPED["shm"], SHIPPED["nccl"]


def test_row_forms_follow_counts_and_costs() -> None:
    uneven, even = (1, 0, 37, 5), (8, 8, 8, 8)
    assert row_form(Verb.ALL_GATHER, uneven, 4096, SHM) == "v", "native and nothing padded"
    assert row_form(Verb.REDUCE_SCATTER, uneven, 4096, SHM) == "v"
    assert row_form(Verb.ALL_GATHER, even, 4096, NCCL) == "v", "equal counts need no padding"
    assert row_form(Verb.ALL_GATHER, (7, 8, 8, 8), 4096, NCCL) == "max"
    cheap_sum = replace(NCCL, all_reduce=Line(1, 1e6))
    assert row_form(Verb.ALL_GATHER, (300, 0, 0, 0), 1 << 16, cheap_sum) == "sum"


def test_residual_rows_are_sharded_when_there_are_many_and_whole_when_there_are_few() -> None:
    mesh = Mesh(1, 1, 2, 1)
    decode = decode_form(mesh, 1, True)

    def choice(rows: int, form=decode, over: Mesh = mesh) -> str:
        counts = (rows,) + (0,) * (over.dp - 1)
        return residual_layout(over, StepShape(((form, counts),), 4096, True), SHM)

    assert choice(1) in ("replica", "replicated"), "one all_reduce a block beats two collectives"
    assert choice(4096, prefill_form(), Mesh(2, 2, 1, 1)) == "sharded"
    assert residual_layout(Mesh(), StepShape(((decode, (9,)),), 4096, True), SHM) == "sharded"


def test_a_ring_only_where_the_gathered_chunk_exceeds_the_workspace() -> None:
    assert kv_to_q(1, 1024, 16, None, SHM) == "gather"
    assert kv_to_q(4, 1024, 65536, None, SHM) == "gather"
    assert kv_to_q(4, 1024, 2048, None, SHM) == "ring"


def test_keys_and_values_travel_where_moving_them_is_cheaper_than_computing() -> None:
    elements = 16 * 256
    deepseek = Computed(2 * elements, 2 * elements * 512)
    assert kv_to_q(2, 1024, 65536, deepseek, SHM) == "expand"
    assert kv_to_q(2, 1024, 65536, deepseek, NCCL) == "gather"
    assert kv_to_q(4, 1024, 2048, deepseek, SHM) == "ring"
    assert kv_to_q(1, 1024, 65536, deepseek, SHM) == "gather", "nothing travels"


def test_queries_are_computed_where_reading_weights_is_cheaper() -> None:
    assert queries(8, 1 << 10, 100 << 20, SHM) == "gather"
    assert queries(8, 1 << 20, 1 << 10, SHM) == "replicate"


def test_the_exchange_is_fused_where_memory_is_shared() -> None:
    assert exchange_route(8, 1024, 16, SHM) == "fused"
    assert exchange_route(8, 1024, 16, SHIPPED["gloo"]) in ("a2a", "ag_rs")


def test_calibration_fits_lines_and_survives_its_file(tmp_path: Path) -> None:
    calls: list[tuple[str, int]] = []

    def measure(verb: str, nbytes: int) -> float:
        calls.append((verb, nbytes))
        return 7.0 + nbytes / 2000

    found = table.calibrate("shm", measure)
    assert {verb for verb, _ in calls} == set(table.VERBS)
    assert found.all_gather.at(0) == pytest.approx(7.0) and found.fused.rate == pytest.approx(2000)
    assert found.memory == SHM.memory
    path = tmp_path / "cache" / "costs.json"
    table.save(path, {"shm": found})
    assert table.load(path, "shm") == found
    assert table.load(path, "gloo") == SHIPPED["gloo"], "what was not calibrated stays as shipped"
    assert table.load(tmp_path / "none", "shm") == SHM
    path.write_text('{"shm": {"all_gather": 3}}')
    with pytest.raises(ValueError, match=r"costs.json: not a table of costs .* calibrate again"):
        table.load(path, "shm")
