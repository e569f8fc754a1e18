"""Padded steps (D7): rows that fill a bucket see what their kernel declares, and nobody reads them.

The embedding of the token that padded rows have is NaN here, so that all they touch is NaN: in
attention, experts and every collective.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from tests.layouts import (
    VOCAB,
    Ranks,
    SharpReader,
    drive,
    gqa_arch,
    mla_arch,
    prompt,
    resolved,
    scheduler_for,
)
from tests.models.tiny import DEEPSEEK_V4, GPT_OSS
from torch import Tensor

from anabranch.core.arch import Arch
from anabranch.core.arch_reader import read_arch
from anabranch.core.plan import Chunks, Join, Phase, ReplicaPlan, StepPlan
from anabranch.core.request import Request, SamplingParams
from anabranch.kv.pool import Pool
from anabranch.layout.mesh import Mesh
from anabranch.models.decoder import Decoder
from anabranch.nn.attention.kernel import Kernel
from anabranch.nn.step import Paged, StepInputs
from anabranch.weights.recipe import Source
from anabranch.worker.rows import bucket, step_rows

ARCHS: dict[str, Arch] = {
    "mla": mla_arch(),
    "gqa": gqa_arch(),
    "windows and sinks": read_arch({"architectures": ["GptOssForCausalLM"], **GPT_OSS}),
    "shared KV, windows and sinks": read_arch(
        {"architectures": ["DeepseekV4ForCausalLM"], **DEEPSEEK_V4}
    ),
}
LIVE = ((3, 17, 33, 70, 6), (1, 40, 9))
"""Positions of each request of two replicas before the decode steps: 5 and 3 rows of 8."""
PAGES = 2


class PaddingIsNaN(SharpReader):
    """Token 0, which no live row has, embeds to NaN."""

    def _make(self, source: Source) -> Tensor:
        value = super()._make(source)
        if source.name.endswith(("embed_tokens.weight", "embed.weight")):
            value[0] = torch.nan
        return value


class Watched:
    """A model that keeps how many rows attention had in the steps that were decode alone."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.rows: list[int] = []

    def __call__(self, step: StepInputs, pool: Pool) -> Tensor:
        if [seg.phase for seg in step.segments] == [Phase.DECODE]:
            self.rows.append(len(step.segments[0].positions))
        return self.model(step, pool)

    def logits(self, x: Tensor, step: StepInputs) -> Tensor:
        return self.model.logits(x, step)


# which rows ---------------------------------------------------------------------------------------


def ids(length: int, seed: int) -> tuple[int, ...]:
    return tuple(t or 1 for t in prompt(length, seed))


def chunks(starts: tuple[int, ...], counts: tuple[int, ...], logits: int) -> Chunks:
    pairs = zip(starts, counts, strict=True)
    tokens = [t for i, (start, n) in enumerate(pairs) for t in ids(start + n, i)[start:]]
    each = (range(len(starts)), starts, counts, tokens)
    flags = np.full(len(starts), logits, np.uint8)
    return Chunks(*(np.array(v, np.int32) for v in each), flags, np.zeros_like(flags))


def filled(lengths: tuple[int, ...]) -> ReplicaPlan:
    """Every seat's first positions, by prefill."""
    return ReplicaPlan(
        join=tuple(Join(seat, SamplingParams(), n) for seat, n in enumerate(lengths)),
        pages=tuple((s, (s * PAGES, s * PAGES + 1)) for s in range(len(lengths))),
        prefill=chunks((0,) * len(lengths), lengths, 0),
    )


def decoded(lengths: tuple[int, ...]) -> ReplicaPlan:
    return ReplicaPlan(decode=chunks(lengths, (1,) * len(lengths), 2))


def steps(ranks: Ranks, count: int = 2) -> list[list[np.ndarray]]:
    """Logits of each decode step, per replica [rows, vocab]."""
    ranks.step(StepPlan(0, tuple(filled(n) for n in LIVE)))
    found = []
    for number in range(count):
        plan = tuple(decoded(tuple(n + number for n in lengths)) for lengths in LIVE)
        result = ranks.step(StepPlan(number + 1, plan))
        found.append(
            [
                np.stack([np.frombuffer(r.logits[s][1], np.float32) for s in sorted(r.logits)])
                for r in result.replicas
            ]
        )
    return found


def two_replicas(name: str, debug: str, **flags: object) -> Ranks:
    run = resolved(ARCHS[name], tp=2, attn_dp=2, debug=debug, **flags)
    return Ranks(run, reader=PaddingIsNaN(0))


def same(got: list[list[np.ndarray]], want: list[list[np.ndarray]]) -> None:
    for step, of_step in zip(got, want, strict=True):
        for rows, of_rows in zip(step, of_step, strict=True):
            assert of_rows.std() > 0.5
            np.testing.assert_allclose(rows, of_rows, atol=1e-4, rtol=0)


def test_a_step_of_decode_rows_fills_one_bucket_on_every_replica() -> None:
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 8, 9, 128)] == [1, 2, 4, 4, 8, 8, 16, 128]
    layout = replace(resolved(ARCHS["gqa"], tp=4, attn_dp=4).layout, mesh=Mesh(4, 1, 1, 1))
    live = (decoded((3, 4, 5)), ReplicaPlan(), decoded((6,)), decoded((1, 1, 1, 1, 1)))
    rows = step_rows(layout, StepPlan(0, live), pad=16)
    (seg,) = rows.segments
    assert seg.split.counts == (8, 8, 8, 8)
    assert [int((c.seat == 16).sum()) for c in seg.chunks] == [5, 8, 7, 3]
    assert rows.wanted.sum() == 9 and not rows.wanted[3:16].any()
    mixed = (filled((4,)), *live[1:])
    exact = step_rows(layout, StepPlan(0, mixed), pad=16)
    assert [seg.split.counts for seg in exact.segments] == [(4, 0, 0, 0), (0, 0, 1, 5)]


# what they see ------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ops", ["reference", "auto"])
@pytest.mark.parametrize("name", ARCHS)
def test_bucket_8_with_3_live_rows(name: str, ops: str) -> None:
    """Logits, live pages and the token table are those of steps that are not padded."""
    plain, ranks = two_replicas(name, "poison", ops=ops), two_replicas(name, "poison,pad", ops=ops)
    watched = [Watched(w.model) for w in ranks.workers]
    for worker, model in zip(ranks.workers, watched, strict=True):
        worker.model = model
    try:
        same(steps(ranks), steps(plain))
        for model in watched:
            assert model.rows == [8, 8]
        for padded, exact in zip(ranks.workers, plain.workers, strict=True):
            slots = exact.pool.slots
            torch.testing.assert_close(
                padded.pool.slots[:, : slots.shape[1]], slots, atol=1e-4, rtol=0, equal_nan=True
            )
            assert torch.equal(padded.seats.tokens[:-1], exact.seats.tokens)
    finally:
        ranks.close()
        plain.close()


@dataclass(frozen=True)
class Told(Kernel):
    """Another kernel, which keeps how many entries it was told each row sees."""

    inner: Kernel
    told: list[list[int]] = field(default_factory=list)

    def keys_values(self, entries: Tensor, computed: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.inner.keys_values(entries, computed)

    def rows(
        self, q: Tensor, keys: Tensor, values: Tensor, q_pos: Tensor, k_pos: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.inner.rows(q, keys, values, q_pos, k_pos)

    def paged(self, q: Tensor, pool: Tensor, where: Paged) -> tuple[Tensor, Tensor]:
        lens = where.lens[self.pad_len]
        self.told.append(lens.tolist())
        return self.inner.paged(q, pool, replace(where, lens={self.inner.pad_len: lens}))


class TakesNone(Told):
    pad_len = 0


class WantsOne(Told):
    pad_len = 1


@dataclass(frozen=True)
class Composed(Kernel):
    """Two kinds of attention, of which one is in use: it has no length of its own."""

    parts: tuple[Told, Told]
    use: list[int]

    @property
    def pad_len(self) -> int:
        return self.part.pad_len

    @property
    def part(self) -> Told:
        return self.parts[self.use[-1]]

    def keys_values(self, entries: Tensor, computed: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.part.keys_values(entries, computed)

    def rows(
        self, q: Tensor, keys: Tensor, values: Tensor, q_pos: Tensor, k_pos: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.part.rows(q, keys, values, q_pos, k_pos)

    def paged(self, q: Tensor, pool: Tensor, where: Paged) -> tuple[Tensor, Tensor]:
        return self.part.paged(q, pool, where)


def test_a_kernel_that_declares_no_length_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="pad_len"):
        Told(TakesNone(None))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["mla", "gqa"])
def test_a_composed_kernel_asks_the_part_in_use(name: str) -> None:
    """Its parts take turns, and the other layers' kernels want another length in the same step."""
    plain, ranks = two_replicas(name, "poison"), two_replicas(name, "poison,pad")
    use, made, slot = [0], [], {"mla": "latent", "gqa": "kernel"}[name]
    for worker in ranks.workers:
        phases = worker.model.layers[1].attn.phases
        real = getattr(phases[Phase.DECODE], slot)
        made.append(Composed((TakesNone(real), WantsOne(real)), use))
        phases[Phase.DECODE] = replace(phases[Phase.DECODE], **{slot: made[-1]})
    real_step = ranks.step

    def in_turn(plan: StepPlan):
        use.append(plan.number % 2)  # WantsOne in step 1, TakesNone in step 2
        return real_step(plan)

    ranks.step = in_turn
    try:
        same(steps(ranks), steps(plain))
    finally:
        ranks.close()
        plain.close()
    for kernel, live in zip(made, LIVE, strict=True):
        pads = 8 - len(live)
        assert kernel.parts[1].told == [[*(n + 1 for n in live), *[1] * pads]]
        assert kernel.parts[0].told == [[*(n + 2 for n in live), *[0] * pads]]


# every way of splitting ---------------------------------------------------------------------------

LAYOUTS: dict[str, Mapping[str, object]] = {
    "one process": {},
    "tp2 x dp2, sum": {"tp": 4, "attn_dp": 2, "ep": 2, "row_moves": "sum"},
    "dp4, max, a2a, head over all": {
        "tp": 4, "attn_dp": 4, "ep": 4, "row_moves": "max", "moe_dispatch": "a2a",
        "lm_head": "all",
    },
    "cp4 + decode TP, whole KV": {"tp": 4, "attn_cp": 4, "dcp": 1, "embedding": "sharded"},
    "dcp2 over tp, flashinfer": {"tp": 4, "dcp": 2, "dcp_exchange": "flashinfer", "force": True},
    "cp2 + dcp2, a2a": {"tp": 4, "attn_cp": 2, "dcp": 2, "dcp_exchange": "a2a"},
    "cp2 + dcp4, ag_rs": {
        "tp": 4, "attn_cp": 2, "dcp": 4, "dcp_exchange": "ag_rs", "force": True,
        "residual": "replicated",
    },
    "cp2 + dcp2 + dp2, fused": {
        "tp": 4, "attn_dp": 2, "attn_cp": 2, "dcp": 2, "dcp_exchange": "fused",
    },
    "cp2 + dcp2, computed queries": {"tp": 4, "attn_cp": 2, "dcp": 2, "dcp_q": "replicate"},
    "cp2, replicated decode, lse": {"tp": 4, "attn_cp": 2, "dcp": 2, "decode_attn": "replicated"},
    "cp2, replicated decode, whole": {"tp": 4, "attn_cp": 2, "dcp": 1, "decode_attn": "replicated"},
}  # fmt: skip


def served(name: str, debug: str, **flags: object):
    """Logits by scoring request, tokens by greedy one, and rank 0's rows of each decode step."""
    scored = [(9, 5), (1, 1), (70, 64), (40, 30), (3, 2)]
    requests = [Request(f"s{i}", ids(n, i), score_from=k) for i, (n, k) in enumerate(scored)]
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    requests += [Request(f"g{i}", ids(n, 50 + i), greedy) for i, n in enumerate((5, 40))]
    run = resolved(ARCHS[name], debug=debug, prefill_chunk=64, **flags)
    ranks = Ranks(run, reader=PaddingIsNaN(0))
    watched = ranks.workers[0].model = Watched(ranks.workers[0].model)
    try:
        return *drive(ranks, scheduler_for(run), requests), watched.rows
    finally:
        ranks.close()


@pytest.fixture(scope="module")
def one_process():
    return {name: served(name, "poison") for name in ("mla", "gqa")}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["mla", "gqa"])
def test_padded_steps_of_a_layout_are_one_process(name: str, layout: str, one_process) -> None:
    want_logits, want_tokens, rows = one_process[name]
    logits, tokens, padded = served(name, "poison,pad,checksum", **LAYOUTS[layout])
    assert tokens == want_tokens
    assert set(logits) == set(want_logits)
    for key, want in want_logits.items():
        assert want.shape[1] == VOCAB and want.std() > 0.5
        np.testing.assert_allclose(logits[key], want, atol=1e-4, rtol=0, err_msg=key)
    assert any(n != bucket(n) for n in rows)
    assert padded and all(n == bucket(n) for n in padded)
