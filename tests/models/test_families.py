"""Every family against transformers, through `LLM`: logits to 1e-4 and 24 greedy tokens equal.

The product is family x chunk (16, unlimited) x page (1, 16, 64) x prefix cache (on, off); each cell
runs prompts of 1, 17 and 130 tokens alone (scored by prefill, and by prefill then decode) and a
batch of 8. Three cells of a family run by default, so that every value of every axis is met;
`-m slow` runs all.
"""

import itertools
import zlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pytest
from tests.oracle import FAMILIES, Oracle, make

from anabranch import LLM
from anabranch.core.request import SamplingParams

STEPS = 24
LENGTHS = (1, 17, 130)
BATCH = (1, 17, 130, 3, 7, 17, 40, 64)  # the second 17 shares its first 16 tokens with the first
GREEDY = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)

Cell = tuple[int, int, bool]
CELLS: list[Cell] = list(itertools.product((16, 4096), (1, 16, 64), (True, False)))


def _sample(name: str) -> list[Cell]:
    """Three cells with all pages, both chunks and both caches; which, depends on the family."""
    turn = zlib.crc32(name.encode())
    pages = (1, 16, 64)
    return [
        ((16, 4096)[(turn + i) % 2], pages[(turn // 2 + i) % 3], (turn // 6 + i) % 2 == 0)
        for i in range(3)
    ]


@dataclass
class Truth:
    """An oracle with the prompts of the tests, made when first asked for."""

    name: str
    oracle: Oracle

    @cached_property
    def batch(self) -> list[tuple[list[int], list[int]]]:
        return [self.oracle.prompt(n, STEPS, salt) for salt, n in enumerate(BATCH)]

    @cached_property
    def alone(self) -> list[tuple[list[int], list[int], np.ndarray]]:
        """(prompt, greedy tokens, logits of both) per length."""
        found = [self.batch[BATCH.index(n)] for n in LENGTHS]
        return [(ids, then, self.oracle.score(ids + then).numpy()) for ids, then in found]


@pytest.fixture(scope="module", params=FAMILIES)
def truth(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Truth:
    return Truth(request.param, make(request.param, tmp_path_factory.mktemp(request.param)))


def _run(truth: Truth, cell: Cell) -> None:
    chunk, page, cache = cell
    folder = truth.oracle.folder
    with LLM(
        folder,
        device="cpu",
        dtype="float32",
        threads=1,
        max_model_len=256,
        max_running=8,
        kv_pages=2048 // page + 64,
        prefill_chunk=chunk,
        page_size=page,
        prefix_cache=cache,
    ) as llm:
        for ids, then, wanted in truth.alone:
            for split in (len(ids), len(ids) + len(then)):
                got = llm.score(ids + then, decode_from=split)
                assert got.shape == wanted.shape and got.dtype == np.float32
                assert float(np.abs(got - wanted).max()) < 1e-4, (len(ids), split)
            alone = llm.generate(ids, GREEDY)[0]
            assert list(alone.tokens) == then and alone.finish_reason == "length"
        prompts = [ids for ids, _ in truth.batch]
        for again in (False, True):
            done = llm.generate(prompts, GREEDY)
            assert [list(c.tokens) for c in done] == [then for _, then in truth.batch]
            hits = sum(c.cached_tokens for c in done)
            assert hits == 0 if not cache else hits > 0 or not again


@pytest.mark.timeout(300)
@pytest.mark.parametrize("index", range(3))
def test_sampled_cells(truth: Truth, index: int) -> None:
    _run(truth, _sample(truth.name)[index])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell)))
def test_every_cell(truth: Truth, cell: Cell) -> None:
    _run(truth, cell)


def test_the_sample_meets_every_value() -> None:
    for name in FAMILIES:
        cells = _sample(name)
        assert {page for _, page, _ in cells} == {1, 16, 64}
        assert {chunk for chunk, _, _ in cells} == {16, 4096}
        assert {cache for _, _, cache in cells} == {True, False}
    assert {cell for name in FAMILIES for cell in _sample(name)} <= set(CELLS)
