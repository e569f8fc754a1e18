"""Decode attention TP over replicated weights: what is sliced, that slices are views, that every
phase sees the same weights, and that nothing of a step outlives it (T1, T2, T6, T8, T10)."""

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
import torch
from tests.layouts import VOCAB, Ranks, drive, gqa_arch, mla_arch, prompt, resolved, scheduler_for
from tests.models.places import places, recipes
from tests.models.tiny import DEEPSEEK_V4, GPT_OSS
from torch import Tensor

from anabranch.cli.aliases import translate
from anabranch.core.arch import Arch
from anabranch.core.arch_reader import read_arch
from anabranch.core.plan import Chunks, Join, Phase, ReplicaPlan, StepPlan, StepResult
from anabranch.core.request import Request, SamplingParams
from anabranch.core.resolve import Refusal, RunConfig
from anabranch.models import registry
from anabranch.models.reads import decode_notes, decode_reads, weight_bytes
from anabranch.models.recipes import decoder
from anabranch.nn.attention.kernel import GqaKernel, LatentKernel
from anabranch.worker.runner import Worker
from anabranch.worker.seats import Seats


def v4_arch() -> Arch:
    return read_arch({"architectures": ["DeepseekV4ForCausalLM"], **DEEPSEEK_V4})


def gpt_oss_arch() -> Arch:
    return read_arch({"architectures": ["GptOssForCausalLM"], **GPT_OSS})


ARCHS = {"mla": mla_arch, "gqa": gqa_arch, "gpt_oss": gpt_oss_arch, "deepseek_v4": v4_arch}
SPLIT = {"tp": 4, "attn_cp": 2, "dcp": 2, "dcp_q": "gather"}


def tensors_of(thing: object, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor within dataclasses and mappings, with its path."""
    if isinstance(thing, Tensor):
        yield path, thing
    elif isinstance(thing, Mapping):
        for key, value in thing.items():
            yield from tensors_of(value, f"{path}.{key}")
    elif dataclasses.is_dataclass(thing) and "comm" not in type(thing).__module__:
        for field in dataclasses.fields(thing):
            yield from tensors_of(getattr(thing, field.name), f"{path}.{field.name}")


def params_of(worker: Worker) -> dict[str, Tensor]:
    return worker.refit.args[2]


@pytest.fixture(scope="module", params=ARCHS)
def split(request) -> Iterator[tuple[str, RunConfig, Ranks]]:
    """Four ranks, tp 2 x cp 2, striped, decode heads cut over cp."""
    run = resolved(ARCHS[request.param](), **SPLIT)
    ranks = Ranks(run)
    yield request.param, run, ranks
    ranks.close()


def _expected(name: str, arch: Arch, part: str) -> tuple[int, int]:
    """(dim, elements of one head along it) of a parameter that is cut by heads."""
    attn = arch.attn
    if name == "mla":
        head = attn.nope + attn.rope
        return {"q": (0, head), "kv_b": (0, 1), "o": (1, attn.v)}[part]
    width = attn.head_dim
    by_part = {"q": (0, width), "q_bias": (0, width), "o": (1, width), "sinks": (0, 1)}
    return (by_part | {"o_a": (2, width), "o_b": (1, 0)})[part]


def test_decode_reads_the_owned_heads_of_resident_weights(split) -> None:
    """T1: rank (cp, tp) decodes with global slice tp * C + cp, cut out of what it holds."""
    name, run, ranks = split
    for rank, worker in enumerate(ranks.workers):
        cp, tp = rank // 2, rank % 2
        owned = range((tp * 2 + cp) * 6, (tp * 2 + cp) * 6 + 6)
        assert places(run, run.arch)[rank].owned == owned
        first = owned.start - tp * 12
        params = params_of(worker)
        decode = dict(tensors_of(worker.model.layers[1].attn.phases[Phase.DECODE]))
        prefill = dict(tensors_of(worker.model.layers[1].attn.phases[Phase.PREFILL]))
        cut = [p for p in worker.refit.args[0][rank] if p.heads and p.name.startswith("layers.1.")]
        assert cut
        for param in cut:
            part, whole = param.name.removeprefix("layers.1.attn."), params[param.name]
            dim, head = _expected(name, run.arch, part)
            if part == "o_b":  # heads 0..5 of 12 are output group 0 of 2
                want = whole[:, 20 * (first // 6) : 20 * (first // 6 + 1)]
            elif part in ("o_a", "o"):  # blocks of the heads that one rank owns
                want = whole[first // 6 : first // 6 + 1]
            else:
                want = whole.narrow(dim, first * head, 6 * head)
            # (the expanded form of MLA, which decode does not use, is the same memory once more)
            views = [t for at, t in decode.items() if _inside(t, whole) and "expanded" not in at]
            assert views, param.name
            assert sum(v.numel() for v in views) == want.numel(), param.name
            assert min(v.data_ptr() for v in views) == want.data_ptr(), param.name
            held = [t for t in prefill.values() if _inside(t, whole)]
            assert any(t.numel() > want.numel() / len(views) for t in held), param.name


def _inside(view: Tensor, whole: Tensor) -> bool:
    """Whether a view lies in the memory of one parameter (arenas hold many)."""
    low = whole.data_ptr()
    return low <= view.data_ptr() < low + whole.numel() * whole.element_size()


def test_what_makes_the_cached_row_is_whole_on_every_cp_rank(split) -> None:
    """T1: keys and values are never sliced by cp; the ranks even share their memory."""
    name, _, ranks = split
    parts = {"mla": ("kv_a", "kv_a_norm"), "deepseek_v4": ("kv", "kv_norm")}.get(name, ("k", "v"))
    for part in parts:
        key = f"layers.1.attn.{part}"
        for tp in (0, 1):
            one, other = (params_of(ranks.workers[r])[key] for r in (tp, 2 + tp))
            assert one.data_ptr() == other.data_ptr() and one.shape == other.shape
        used = dict(tensors_of(getattr(ranks.workers[0].model.layers[1].attn, part)))
        assert any(t.numel() == params_of(ranks.workers[0])[key].numel() for t in used.values())


def test_slices_are_views(split) -> None:
    """T2: nothing is copied. Every weight of every phase lies in the arenas that loading filled;
    what phases hold beside (head maps) is below 1% of the sliced weights."""
    _, run, ranks = split
    for rank, worker in enumerate(ranks.workers):
        params = params_of(worker)
        arenas = {p.untyped_storage().data_ptr() for p in params.values()}
        assert sum(p.nbytes for p in params.values()) == weight_bytes(run)[rank]
        extra, inside = 0, 0
        for layer in worker.model.layers:
            for _, tensor in tensors_of(layer):
                if tensor.untyped_storage().data_ptr() in arenas:
                    assert any(_inside(tensor, p) for p in params.values())
                    inside += 1
                else:
                    extra += tensor.untyped_storage().nbytes()
        sliced = decode_reads(run.arch, places(run, run.arch)[rank], recipes(run, run.arch)[rank],
                              run.dtype).held  # fmt: skip
        assert inside > 10
        assert extra <= 0.01 * sliced, (extra, sliced)


def test_notes_tell_what_is_sliced_and_bytes_before_and_after(split) -> None:
    """T8: the numbers are those of the views that decode really uses."""
    _, run, ranks = split
    worker, recipe = ranks.workers[0], recipes(run, run.arch)[0]
    reads = decode_reads(run.arch, places(run, run.arch)[0], recipe, run.dtype)
    params = params_of(worker)
    cut = [params[p.name] for p in recipe if p.heads]
    views = [
        tensor
        for layer in worker.model.layers
        for path, tensor in tensors_of(layer.attn.phases[Phase.DECODE])
        if "expanded" not in path
    ]
    used = {(t.data_ptr(), t.nbytes) for t in views if any(_inside(t, p) for p in cut)}
    assert sum(n for _, n in used) == reads.read == reads.held // 2
    assert reads.held == sum(p.nbytes for p in cut)
    (note,) = decode_notes(run)
    for part in (*reads.sliced, str(reads.held), str(reads.read), "2 context-parallel ranks"):
        assert part in note
    embed = params["embed"].nbytes
    assert reads.read + reads.other <= weight_bytes(run)[0] - embed


def test_replicated_decode_reads_everything() -> None:
    run = resolved(gqa_arch(), tp=4, attn_cp=2, dcp=2, decode_attn="replicated")
    place, recipe = places(run, run.arch)[0], recipes(run, run.arch)[0]
    reads = decode_reads(run.arch, place, recipe, run.dtype)
    assert reads.read == reads.held > 0 and reads.saving == 0
    assert decode_notes(run) == ()


def test_parameters_that_a_model_lacks_are_absent_from_its_recipe() -> None:
    """T4: without q_lora there is no q_a, no norm of it, and q reads the hidden rows."""
    arch = mla_arch()
    bare = dataclasses.replace(arch, attn=dataclasses.replace(arch.attn, q_lora=None))
    (full,), (less,) = (recipes(resolved(a), a) for a in (arch, bare))
    gone = {p.name for p in full} - {p.name for p in less}
    assert gone == {f"layers.{i}.attn.{part}" for i in (0, 1) for part in ("q_a", "q_a_norm")}
    assert not any("bias" in p.name and ".attn." in p.name for p in full)
    (q,) = (p for p in less if p.name == "layers.0.attn.q")
    assert q.sources[0].name.endswith("q_proj.weight") and q.shape[1] == arch.hidden


def test_decode_tp_without_cp_is_refused_with_the_reason() -> None:
    """T8, by the flag's own name too."""
    with pytest.raises(
        Refusal, match="cuts decode heads over the context-parallel ranks"
    ) as caught:
        resolved(gqa_arch(), tp=2, decode_attn="tp")
    assert caught.value.code == "decode_tp_needs_cp" and caught.value.numbers == {"attn_cp": 1}
    plain = translate(["--tp", "2", "--enable-cp-decode-attn-tp"])
    assert " ".join(plain).endswith("--decode-attn tp")


def test_a_model_without_head_parallel_names_is_refused(monkeypatch) -> None:
    """T8: the recipe decides, there is no list of models."""

    def unmarked(arch: Arch, place) -> tuple:
        return tuple(dataclasses.replace(p, heads="") for p in decoder(arch, place))

    monkeypatch.setitem(registry.FAMILIES, "bare", registry.Family(unmarked))
    arch = dataclasses.replace(gqa_arch(), family="bare")
    with pytest.raises(Refusal, match=r"marks nothing.*attn\.k, .*attn\.q") as caught:
        decode_notes(resolved(arch, **SPLIT))
    assert caught.value.code == "no_head_parallel_weights"
    assert decode_notes(resolved(arch, tp=4)) == ()


# steps ------------------------------------------------------------------------------------------


def _scores(seed: int, count: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 90, count)
    return [
        Request(f"r{i}", prompt(int(n), 1000 * seed + i), score_from=int(rng.integers(1, n + 1)))
        for i, n in enumerate(lengths)
    ]


def _trickle(run: RunConfig, requests: list[Request], seed: int):
    """Requests that arrive at random while others run: (logits by id, steps with both phases)."""
    rng = np.random.default_rng(seed)
    ranks, scheduler = Ranks(run), scheduler_for(run)
    waiting, pieces, mixed = list(requests), {r.id: [] for r in requests}, 0
    try:
        while True:
            while waiting and mixed < 100 and rng.random() < 0.3:
                scheduler.submit(waiting.pop(0))
            plan = scheduler.next_step()
            if plan is None:
                if not waiting or mixed >= 100:
                    break
                scheduler.submit(waiting.pop(0))
                continue
            mixed += any(r.prefill.rows for r in plan.replicas) and any(
                r.decode.rows for r in plan.replicas
            )
            for output in scheduler.apply(ranks.step(plan)):
                pieces[output.id] += output.logits
    finally:
        ranks.close()
    joined = {
        key: np.concatenate([np.frombuffer(b, np.float32).reshape(-1, VOCAB) for _, b in sorted(v)])
        for key, v in pieces.items()
        if v
    }
    return joined, mixed


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["mla", "gqa"])
def test_100_mixed_steps_equal_one_process(name: str) -> None:
    """T6: steps with a prefill chunk (whole heads) and decode rows (owned heads) at once."""
    arch, requests = ARCHS[name](), _scores(3, 60)
    run = resolved(arch, tp=2, attn_cp=2, prefill_chunk=8, max_running=6)
    got, mixed = _trickle(run, requests, 5)
    assert mixed >= 100, mixed
    alone = Ranks(resolved(arch))
    try:
        came = [r for r in requests if r.id in got]
        want, _ = drive(alone, scheduler_for(resolved(arch)), came)
    finally:
        alone.close()
    assert set(got) == set(want)
    for key in want:
        np.testing.assert_allclose(got[key], want[key], atol=1e-4, rtol=0, err_msg=key)


class Injected(Exception):
    """Raised inside a decode step."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["mla", "gqa"])
def test_an_exception_in_a_decode_step_leaves_no_trace(name: str, monkeypatch) -> None:
    """T6: the next request's logits are those of ranks that never failed, bit by bit."""
    run = resolved(ARCHS[name](), tp=2, attn_cp=2, dcp=2)
    request = Request("a", prompt(40, 8), score_from=30)
    ranks = Ranks(run)
    want, _ = drive(ranks, scheduler_for(run), [request])
    kernel = {"mla": LatentKernel, "gqa": GqaKernel}[name]
    real, calls = kernel.paged, []

    def failing(self, *args):
        calls.append(1)
        if len(calls) > 6:  # in the second layer of the second decode step, on both ranks
            raise Injected
        return real(self, *args)

    scheduler = scheduler_for(run)
    _reseat(ranks, run)
    scheduler.submit(Request("b", prompt(20, 9), SamplingParams(max_tokens=8)))
    with monkeypatch.context() as patched:
        patched.setattr(kernel, "paged", failing)
        failed: list[BaseException | None] = []
        while not any(failed):
            plan = scheduler.next_step()
            futures = [ranks.threads.submit(w.step, plan) for w in ranks.workers]
            failed = [f.exception() for f in futures]
            if not any(failed):
                done = [f.result() for f in futures]
                scheduler.apply(StepResult(plan.number, tuple(r for r in done if r is not None)))
    assert all(isinstance(e, Injected) for e in failed) and plan.replicas[0].decode.rows == 1
    _reseat(ranks, run)
    again, _ = drive(ranks, scheduler_for(run), [request])
    ranks.close()
    assert np.array_equal(again["a"], want["a"])


def _reseat(ranks: Ranks, run: RunConfig) -> None:
    """Nobody seated, plans counted from 0, pools as they are."""
    for worker in ranks.workers:
        seats, pages = worker.seats.pages.shape
        worker.seats = Seats.make(seats, pages, torch.device(run.device))


EXTENDS = {
    "one process": {},
    "cp2, stripes": {"tp": 2, "attn_cp": 2, "dcp": 2},
    "cp2, whole KV": {"tp": 2, "attn_cp": 2, "dcp": 1},
    "cp2, stripes, lse": {"tp": 2, "attn_cp": 2, "dcp": 2, "decode_attn": "replicated"},
    "cp2, whole KV, replicated": {"tp": 2, "attn_cp": 2, "dcp": 1, "decode_attn": "replicated"},
    "dcp4 over cp and tp, ag_rs": {
        "tp": 4,
        "attn_cp": 2,
        "dcp": 4,
        "force": True,
        "dcp_exchange": "ag_rs",
    },
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("layout", EXTENDS)
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("name", ["mla", "gqa", "deepseek_v4"])
def test_several_query_rows_per_request(name: str, rows: int, layout: str, one_pass) -> None:
    """T10: each decode row of a request has its own local length, also behind a window."""
    run = resolved(ARCHS[name](), **EXTENDS[layout])
    ids = {seat: prompt(n, seat) for seat, n in enumerate(LENGTHS)}
    ranks, got = Ranks(run), {}
    try:
        ranks.step(StepPlan(0, (_joined(ids, rows),)))
        result = ranks.step(StepPlan(1, (ReplicaPlan(decode=_chunks(ids, rows)),)))
    finally:
        ranks.close()
    for seat, (first, data) in result.replicas[0].logits.items():
        assert first == LENGTHS[seat] - rows
        got[seat] = np.frombuffer(data, np.float32).reshape(rows, VOCAB)
    for seat in ids:
        want = one_pass[name][seat][-rows:]
        np.testing.assert_allclose(got[seat], want, atol=1e-4, rtol=0, err_msg=str(seat))


LENGTHS = (6, 37, 130)


@pytest.fixture(scope="module")
def one_pass() -> dict[str, list[np.ndarray]]:
    """Logits of every position of each prompt by prefill alone, in one process."""
    found = {}
    for name in ("mla", "gqa", "deepseek_v4"):
        requests = [
            Request(str(seat), prompt(n, seat), score_from=n) for seat, n in enumerate(LENGTHS)
        ]
        run = resolved(ARCHS[name]())
        ranks = Ranks(run)
        logits, _ = drive(ranks, scheduler_for(run), requests)
        ranks.close()
        found[name] = [logits[r.id] for r in requests]
    return found


def _joined(ids: Mapping[int, tuple[int, ...]], rows: int) -> ReplicaPlan:
    """All but the last `rows` ids of each seat are computed by prefill; 3 pages each."""
    counts = [len(i) - rows for i in ids.values()]
    return ReplicaPlan(
        join=tuple(Join(seat, SamplingParams(), len(i)) for seat, i in ids.items()),
        pages=tuple((seat, (3 * seat + 2, 3 * seat, 3 * seat + 1)) for seat in ids),
        prefill=_plain(ids, [0] * len(ids), counts, logits=0),
    )


def _chunks(ids: Mapping[int, tuple[int, ...]], rows: int) -> Chunks:
    return _plain(ids, [len(i) - rows for i in ids.values()], [rows] * len(ids), logits=2)


def _plain(
    ids: Mapping[int, tuple[int, ...]], start: list[int], count: list[int], logits: int
) -> Chunks:
    tokens = [
        t for i, at, n in zip(ids.values(), start, count, strict=True) for t in i[at : at + n]
    ]
    ints = (np.array(v, np.int32) for v in (list(ids), start, count, tokens))
    flags = np.full(len(ids), logits, np.uint8)
    return Chunks(*ints, flags, np.zeros(len(ids), np.uint8))


# the switch --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mla", "gqa"])
def test_a_phase_switch_moves_nothing(name: str) -> None:
    """C3: the first decode step communicates what every other does, and leaves what prefill wrote
    where it lies: each rank's pool gains at most the new token's entry."""
    run = resolved(ARCHS[name](), **SPLIT, debug="poison")
    traces = [[] for _ in range(run.layout.mesh.world)]
    ranks = Ranks(
        run, traces=[lambda verb, at, x, t=t: t.append((verb, at, tuple(x.shape))) for t in traces]
    )
    scheduler, moved, changed = scheduler_for(run), [], []
    scheduler.submit(
        Request("r", prompt(43, 3), SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    )
    weights = [{k: t.data_ptr() for k, t in tensors_of(w.model)} for w in ranks.workers]
    try:
        while (plan := scheduler.next_step()) is not None:
            before = [w.pool.slots.clone() for w in ranks.workers]
            scheduler.apply(ranks.step(plan))
            if plan.replicas[0].decode.rows:
                assert not plan.replicas[0].prefill.rows
                moved.append([tuple(t) for t in traces])
                changed.append(
                    [
                        int((b.nan_to_num(1e9) != w.pool.slots.nan_to_num(1e9)).any(0).any(1).sum())
                        for b, w in zip(before, ranks.workers, strict=True)
                    ]
                )
            for trace in traces:
                trace.clear()
    finally:
        ranks.close()
    assert len(moved) == 5 and all(moved[0])
    assert all(step == moved[0] for step in moved)
    copies = run.layout.mesh.world // run.layout.stripes.count
    assert all(sum(step) == copies and max(step) == 1 for step in changed), changed
    assert weights == [{k: t.data_ptr() for k, t in tensors_of(w.model)} for w in ranks.workers]
