"""The sampler draws from the distribution it was asked for, and a row's draw is its own.

Truth is a second, plain numpy implementation of the filters; draws are judged by chi-square.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import chisquare

from anabranch.core.plan import NOT_A_TOKEN, Chunks, Join, ReplicaPlan
from anabranch.core.request import SamplingParams
from anabranch.worker.sampler import Sampler, result_of
from anabranch.worker.seats import Seats

VOCAB, DRAWS, BATCH = 1003, 20_000, 2000
LOGITS = np.random.default_rng(5).normal(0, 2.5, VOCAB).astype(np.float32)
SETTINGS = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.6),
    "hot": SamplingParams(temperature=1.7),
    "top_k": SamplingParams(top_k=40),
    "top_p": SamplingParams(top_p=0.8),
    "min_p": SamplingParams(min_p=0.02),
    "top_k and top_p": SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
    "all": SamplingParams(temperature=1.3, top_k=200, top_p=0.95, min_p=0.005),
}


def expected(params: SamplingParams) -> NDArray[np.float64]:
    """The distribution of one draw, float64 [VOCAB]."""
    scaled = LOGITS.astype(np.float64) / params.temperature
    order = np.argsort(-scaled, kind="stable")
    probs = np.exp(scaled[order] - scaled.max())
    if params.top_k:
        probs[params.top_k :] = 0
    probs /= probs.sum()
    before = np.cumsum(probs) - probs
    kept = (before < params.top_p) & (probs >= params.min_p * probs[0])
    probs = np.where(kept, probs, 0)
    result = np.zeros(VOCAB)
    result[order] = probs / probs.sum()
    return result


def draw(
    rows: list[tuple[SamplingParams, int, int]], logits: torch.Tensor | None = None
) -> NDArray[np.int64]:
    """One token for each (params, seed, position) of a batch."""
    n = len(rows)
    seats = Seats.make(n, 1, torch.device("cpu"))
    ones = np.ones(n, np.int32)
    for seat, (params, seed, _) in enumerate(rows):
        seats.joined[seat] = Join(seat, params, prompt_len=1, seed=seed)
    start = np.array([position - 1 for _, _, position in rows], np.int32)
    marks = np.ones(n, np.uint8)
    chunks = Chunks(np.arange(n, dtype=np.int32), start, ones, -ones, marks, marks)
    if logits is None:
        logits = torch.from_numpy(LOGITS).expand(n, VOCAB)
    drawn = Sampler().draw(ReplicaPlan(decode=chunks), logits, seats)
    assert drawn.seat == tuple(range(n)) and torch.equal(seats.tokens, drawn.token)
    return drawn.token.numpy()


@pytest.mark.parametrize("name", SETTINGS)
def test_20000_draws_have_the_asked_distribution(name: str) -> None:
    params, want = SETTINGS[name], expected(SETTINGS[name])
    counts = np.zeros(VOCAB)
    for position in range(1, 1 + DRAWS // BATCH):  # seeds as well as positions vary
        rows = [(params, seed, position) for seed in range(BATCH)]
        counts += np.bincount(draw(rows), minlength=VOCAB)
    assert counts.sum() == DRAWS and not counts[want == 0].any()
    common = want * DRAWS >= 8
    seen, due = counts[common], want[common] * DRAWS
    rest = DRAWS - due.sum()
    if rest > 1e-6:  # rare tokens are one bin together
        seen, due = np.append(seen, counts[~common].sum()), np.append(due, rest)
    assert len(due) > 20
    p = chisquare(seen, due).pvalue
    assert p > 1e-3, f"{name}: p = {p:.2g} over {len(due)} bins"


def test_a_wrong_distribution_would_be_seen() -> None:
    """The test's own power: draws of temperature 1 are not those of temperature 1.1."""
    want = expected(SamplingParams(temperature=1.1))
    rows = [(SamplingParams(), seed, 3) for seed in range(BATCH)]
    counts = np.concatenate([draw([(p, s + k * BATCH, q) for p, s, q in rows]) for k in range(10)])
    common = want * DRAWS >= 8
    seen = np.bincount(counts, minlength=VOCAB)
    due = np.append(want[common], want[~common].sum()) * DRAWS
    assert chisquare(np.append(seen[common], seen[~common].sum()), due).pvalue < 1e-3


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    mixed = [
        (SETTINGS[name], seed, position)
        for seed, position in ((7, 1), (7, 2), (-3, 900), (2**63 - 1, 5))
        for name in SETTINGS
    ] + [(SamplingParams(temperature=0.0), 1, 1)]
    together = draw(mixed)
    assert together.tolist() == [int(draw([row])[0]) for row in mixed]
    assert draw(mixed[::-1]).tolist() == together[::-1].tolist()
    assert together[-1] == LOGITS.argmax()
    plain = [draw([(SETTINGS["plain"], seed, position) for position in range(1, 200)])
             for seed in (1, 2)]  # fmt: skip
    assert 0 < (plain[0] == plain[1]).sum() < 40  # other seeds draw other tokens


def test_greedy_and_narrow_settings_take_the_best() -> None:
    best = int(LOGITS.argmax())
    for params in (
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=1),
        SamplingParams(top_p=1e-9),
        SamplingParams(min_p=1.0),
        SamplingParams(temperature=1e-4),
        SamplingParams(temperature=1e-40),
        SamplingParams(temperature=5e-324, top_k=9),
    ):
        assert set(draw([(params, seed, 4) for seed in range(50)])) == {best}


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), *SETTINGS.values()])
def test_logits_that_are_no_numbers_give_no_token(params: SamplingParams) -> None:
    rows = torch.from_numpy(LOGITS).expand(5, VOCAB).clone()
    rows[0], rows[1, 7], rows[2, 9], rows[3] = torch.nan, torch.nan, torch.inf, -torch.inf
    seats = Seats.make(5, 1, torch.device("cpu"))
    for seat in range(5):
        seats.joined[seat] = Join(seat, replace(params, logprobs=0), prompt_len=1, seed=seat)
    ones, marks = np.ones(5, np.int32), np.ones(5, np.uint8)
    chunks = Chunks(np.arange(5, dtype=np.int32), ones, ones, -ones, marks, marks)
    plan = ReplicaPlan(decode=chunks)
    drawn = Sampler().draw(plan, rows, seats)
    result = result_of(plan, rows, drawn, seats)
    assert result.token[:4].tolist() == [NOT_A_TOKEN] * 4 and result.token[4] >= 0
    assert seats.tokens.min() >= 0, "a step under way would embed it"


def test_ends_are_not_drawn_before_min_tokens() -> None:
    best = int(LOGITS.argmax())
    for params in (SamplingParams(temperature=0.0), SamplingParams(top_k=2)):
        seats = Seats.make(2, 1, torch.device("cpu"))
        for seat, least in enumerate((5, 0)):
            params_of_seat = SamplingParams(
                temperature=params.temperature, top_k=params.top_k, min_tokens=least
            )
            seats.joined[seat] = Join(seat, params_of_seat, 10, seed=3, stop_ids=(best,))
        marks, ones = np.ones(2, np.uint8), np.ones(2, np.int32)
        chunks = Chunks(np.arange(2, dtype=np.int32), ones * 11, ones, -ones, marks, marks)
        logits = torch.from_numpy(LOGITS).expand(2, VOCAB).clone()
        token = Sampler().draw(ReplicaPlan(decode=chunks), logits, seats).token
        assert token[0] != best
        if params.temperature == 0:
            assert token[1] == best
        assert torch.equal(logits[0], logits[1]), "the logits that logprobs are taken of changed"
