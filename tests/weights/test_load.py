"""Loading: private, shared by threads and by processes, updated in place; dummies and memory."""

import multiprocessing as mp
import resource
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from anabranch.weights.load import Params, load, plan_slots, update
from anabranch.weights.readers.base import Reader
from anabranch.weights.readers.dummy import DummyReader
from anabranch.weights.readers.safetensors import SafetensorsReader
from anabranch.weights.recipe import Param, Recipe, Source
from anabranch.weights.share import Alone, ProcessShare, ThreadShare, memory_file

QKV = {"q": (48, 32), "k": (12, 32), "v": (12, 32)}


def _checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) for name, shape in QKV.items()}
    tensors |= {"o": torch.randn(32, 48), "norm": torch.randn(32), "bias": torch.randn(10).double()}
    save_file(tensors, folder / "model.safetensors")
    return tensors


def _recipe(rank: int, ranks: int) -> Recipe:
    """q rows and o columns of a rank; k and v whole; a norm everyone has; a float32 bias."""
    q = 48 // ranks
    cut = (rank * q, (rank + 1) * q)
    sources = (Source("q", (48, 32), (cut,)), Source("k", (12, 32)), Source("v", (12, 32)))
    return (
        Param("qkv", (q + 24, 32), sources),
        Param("o", (32, q), (Source("o", (32, 48), ((0, 32), cut)),)),
        Param("kv", (2, 12, 32), (Source("k", (12, 32)), Source("v", (12, 32)))),
        Param("norm", (32,), (Source("norm", (32,)),)),
        Param("bias", (2, 5), (Source("bias", (10,)),), dtype="float32"),
    )


def _check(params: Params, tensors: dict[str, torch.Tensor], rank: int, ranks: int) -> None:
    q = 48 // ranks
    mine = slice(rank * q, (rank + 1) * q)
    bf = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    assert torch.equal(params["qkv"], torch.cat([bf["q"][mine], bf["k"], bf["v"]]))
    assert torch.equal(params["o"], bf["o"][:, mine])
    assert torch.equal(params["kv"], torch.stack([bf["k"], bf["v"]]))
    assert torch.equal(params["norm"], bf["norm"])
    assert torch.equal(params["bias"], tensors["bias"].float().view(2, 5))


def test_one_rank(tmp_path: Path) -> None:
    tensors = _checkpoint(tmp_path)
    params = load([_recipe(0, 1)], 0, SafetensorsReader(tmp_path), torch.bfloat16, Alone())
    _check(params, tensors, 0, 1)
    assert all(p.data_ptr() % 64 == 0 and p.is_contiguous() for p in params.values())


def _threads(ranks: int, body: Callable[[int], None]) -> list[BaseException]:
    failed: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            body(rank)
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return failed


def test_threads_share_what_is_equal_and_update_is_seen(tmp_path: Path) -> None:
    tensors = _checkpoint(tmp_path)
    recipes = [_recipe(rank, 4) for rank in range(4)]
    share = ThreadShare(4, deadline=20)
    held: dict[int, Params] = {}
    new = {"k": torch.ones(12, 32), "q": torch.full((48, 32), 2.0), "norm": torch.zeros(32)}

    def body(rank: int) -> None:
        reader = SafetensorsReader(tmp_path)
        held[rank] = load(recipes, rank, reader, torch.bfloat16, share)
        _check(held[rank], tensors, rank, 4)
        share.barrier()
        update(recipes, rank, held[rank], new, torch.bfloat16, share)
        _check(held[rank], tensors | new, rank, 4)

    assert _threads(4, body) == []
    for name in ("kv", "norm", "bias"):
        assert len({params[name].data_ptr() for params in held.values()}) == 1
    for name in ("qkv", "o"):
        assert len({params[name].data_ptr() for params in held.values()}) == 4


def test_a_rank_that_fails_frees_the_others(tmp_path: Path) -> None:
    _checkpoint(tmp_path)
    broken = (*_recipe(0, 2), Param("more", (3,), (Source("absent", (3,)),)))
    recipes = [broken, _recipe(1, 2)]
    share = ThreadShare(2, deadline=20)

    def body(rank: int) -> None:
        load(recipes, rank, SafetensorsReader(tmp_path), torch.bfloat16, share)

    failed = _threads(2, body)
    kinds = sorted(type(e).__name__ for e in failed)
    assert kinds == ["BrokenBarrierError", "ValueError"]


def _process(
    rank: int, folder: str, fd: int, gate: "threading.Barrier", good: "mp.Queue[int]"
) -> None:
    tensors = _loaded(Path(folder))
    recipes = [_recipe(r, 2) for r in range(2)]
    share = ProcessShare(fd, lambda: gate.wait(20) and None)
    params = load(recipes, rank, SafetensorsReader(Path(folder)), torch.bfloat16, share)
    _check(params, tensors, rank, 2)
    gate.wait(20)
    new = {"v": torch.full((12, 32), 5.0)}
    update(recipes, rank, params, new, torch.bfloat16, share)
    _check(params, tensors | new, rank, 2)
    if rank == 1:  # not its writer: the bytes can only have come through shared memory
        assert plan_slots(recipes, 1, torch.bfloat16)[0][2].writer == 0
    good.put(rank)


def _loaded(folder: Path) -> dict[str, torch.Tensor]:
    reader = SafetensorsReader(folder)
    return {name: reader.read(Source(name, reader.shape(name) or ())) for name in reader.names()}


@pytest.mark.timeout(60)
def test_processes_share_over_a_memory_file(tmp_path: Path) -> None:
    _checkpoint(tmp_path)
    context = mp.get_context("fork")
    gate, good, fd = context.Barrier(2), context.Queue(), memory_file()
    ranks = [
        context.Process(target=_process, args=(r, str(tmp_path), fd, gate, good)) for r in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(30)
        assert rank.exitcode == 0
    assert {good.get(timeout=5), good.get(timeout=5)} == {0, 1}


def test_shared_offsets_agree_on_every_rank() -> None:
    recipes = [_recipe(rank, 4) for rank in range(4)]
    found = []
    for rank in range(4):
        slots, _, shared = plan_slots(recipes, rank, torch.bfloat16)
        found.append((shared, [(s.param.name, s.offset, s.writer) for s in slots if s.shared]))
    assert all(f == found[0] for f in found) and found[0][0] > 0


FP8 = torch.zeros(12, 32).to(torch.float8_e4m3fn)
WRONG = {
    "unknown": ({"x": torch.ones(1)}, "no tensor 'x'"),
    "shape": ({"v": torch.ones(12)}, r"'v' has shape \[12\].* asks for \[12, 32\]"),
    "int32": ({"v": torch.ones(12, 32, dtype=torch.int32)}, r"'v' is torch\.int32.*wanted float32"),
    "bool": ({"v": torch.ones(12, 32, dtype=torch.bool)}, r"'v' is torch\.bool"),
    "complex": ({"v": torch.ones(12, 32, dtype=torch.complex64)}, r"'v' is torch\.complex64"),
    "lone fp8": ({"v": FP8}, r"'v' is torch\.float8_e4m3fn.* no 'v_scale_inv'"),
    "lone scale": ({"v_scale_inv": torch.ones(1, 1)}, "no tensor 'v_scale_inv'"),
    "scale of plain": (
        {"v": torch.ones(12, 32), "v_scale_inv": torch.ones(1, 1)},
        "no tensor 'v_scale_inv'",
    ),
    "scale shape": ({"v": FP8, "v_scale_inv": torch.ones(2, 1)}, r"needs \[1, 1\]"),
    "scale dtype": ({"v": FP8, "v_scale_inv": torch.ones(1, 1).int()}, r"\[1, 1\] of torch\.int32"),
}


@pytest.mark.parametrize("case", WRONG)
def test_update_names_what_is_wrong_before_writing(tmp_path: Path, case: str) -> None:
    tensors = _checkpoint(tmp_path)
    recipes = [_recipe(0, 1)]
    params = load(recipes, 0, SafetensorsReader(tmp_path), torch.bfloat16, Alone())
    given, message = WRONG[case]
    with pytest.raises(ValueError, match=f"^update_weights: .*{message}"):
        given = {"k": torch.ones(12, 32), **given}
        update(recipes, 0, params, given, torch.bfloat16, Alone())
    _check(params, tensors, 0, 1)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.uint8, torch.bool])
def test_a_file_of_integers_for_floats_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = _checkpoint(tmp_path)
    save_file(tensors | {"v": torch.ones(12, 32, dtype=dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"'v' is {dtype}.* wanted float32, bfloat16"):
        load([_recipe(0, 1)], 0, SafetensorsReader(tmp_path), torch.bfloat16, Alone())


def test_tables_are_integers(tmp_path: Path) -> None:
    recipe = (Param("table", (3, 2), (Source("tid2eid", (3, 2)),), dtype="int64"),)
    table = torch.arange(6, dtype=torch.int32).view(3, 2)
    save_file({"tid2eid": table}, tmp_path / "a.safetensors")
    params = load([recipe], 0, SafetensorsReader(tmp_path), torch.bfloat16, Alone())
    assert params["table"].dtype == torch.int64 and torch.equal(params["table"], table.long())
    assert load([recipe], 0, DummyReader(0), torch.bfloat16, Alone())["table"].max() == 1
    for wrong in (table.float() + 0.5, table.bool()):
        with pytest.raises(ValueError, match=r"'tid2eid' is .* wanted int64 or int32"):
            update([recipe], 0, params, {"tid2eid": wrong}, torch.bfloat16, Alone())
    assert torch.equal(params["table"], table.long())


def test_dummy_slices_are_slices_of_one_tensor() -> None:
    reader = DummyReader(7)
    shape = (130, 96)
    whole = reader.read(Source("w", shape))
    for top, bottom, left, right in [(0, 130, 0, 96), (3, 70, 10, 20), (129, 130, 95, 96)]:
        part = reader.read(Source("w", shape, ((top, bottom), (left, right))))
        assert torch.equal(part, whole[top:bottom, left:right])
    assert torch.equal(whole, DummyReader(7).read(Source("w", shape)))
    assert not torch.equal(whole, DummyReader(8).read(Source("w", shape)))
    assert not torch.equal(whole, reader.read(Source("u", shape)))


def test_dummy_values_are_spread_as_fan_in_wants() -> None:
    w = DummyReader(0).read(Source("w", (1000, 400)))
    assert abs(float(w.std()) * 400**0.5 - 1) < 0.01 and abs(float(w.mean())) < 1e-3
    # neighbours in either dim are not alike
    for a, b in ((w[1:], w[:-1]), (w[:, 1:], w[:, :-1])):
        assert abs(float((a * b).mean()) * 400) < 0.01
    norm = DummyReader(0).read(Source("model.norm.weight", (500,)))
    assert float(norm.min()) > 0.8 and float(norm.max()) < 1.2


class _Counting:
    """A reader of ones that remembers the largest piece it was asked for."""

    def __init__(self) -> None:
        self.largest = 0

    def names(self) -> tuple[str, ...]:
        return ()

    def shape(self, name: str) -> None:
        return None

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    def read(self, source: Source) -> torch.Tensor:
        out = torch.ones(source.local_shape)
        self.largest = max(self.largest, out.numel())
        return out

    def release(self) -> None:
        return


def test_loading_is_streamed() -> None:
    reader = _Counting()
    typed: Reader = reader
    shape = (20000, 512)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    recipe = (Param("w", shape, (Source("w", shape),)),)
    params = load([recipe], 0, typed, torch.bfloat16, Alone())
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert bool((params["w"] == 1).all())
    assert reader.largest <= 1 << 18
    assert grown < 20000 * 512 * 2 / 2**20 + 16  # MiB: the weights themselves and little else
