"""`LLM` and `AsyncLLM` over a real, random model: every way of running ranks gives one answer."""

import asyncio
import json
import shutil
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest

import anabranch.demo
from anabranch import LLM, AsyncLLM
from anabranch.core.request import FieldError, SamplingParams
from anabranch.core.resolve import Refusal
from anabranch.engine.llm import Option

WAYS: dict[str, dict[str, Option]] = {
    "threads": {"tp": 2, "attn_dp": 2, "ranks": "threads"},
    "processes": {"tp": 2, "attn_cp": 2},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [tuple(range(5, 40 + 7 * i)) for i in range(4)]
COMMON: dict[str, Option] = {
    "load_format": "dummy", "kv_pages": 64, "dtype": "float32", "device": "cpu", "threads": 1,
    "prefill_chunk": 16, "ops": "reference",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config and a tokenizer; weights are made up at load."""
    folder = tmp_path_factory.mktemp("model")
    demo = Path(anabranch.demo.__file__).parent
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, folder)
    vocab = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]) + 60
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 96,
        "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 24,
        "num_key_value_heads": 8, "head_dim": 8, "vocab_size": vocab, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "torch_dtype": "float32", "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def alone(model: Path) -> LLM:
    return LLM(model, **COMMON)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_one_answer(model: Path, alone: LLM, way: str) -> None:
    wanted = alone.generate(PROMPTS, GREEDY)
    logits = alone.score(PROMPTS[2], decode_from=20)
    with LLM(model, **COMMON, **WAYS[way]) as llm:
        assert [c.tokens for c in llm.generate(PROMPTS, GREEDY)] == [c.tokens for c in wanted]
        assert np.abs(llm.score(PROMPTS[2], decode_from=20) - logits).max() < 1e-4
        deltas = list(llm.stream(PROMPTS[0], GREEDY))
        assert tuple(t for d in deltas for t in d.tokens) == wanted[0].tokens
        assert deltas[-1].finish_reason == "length"
        for delta in llm.stream(PROMPTS[1], GREEDY):
            assert delta.finish_reason is None
            break  # leaving a stream aborts its request
        stats = llm.stats()
        assert stats.running == 0 and set(stats.free_pages) == {64}


def test_score_prefill_equals_decode(alone: LLM) -> None:
    ids = PROMPTS[1]
    whole, split = alone.score(ids), alone.score(ids, decode_from=1)
    assert whole.shape == (len(ids), alone.ready.vocab_size) and whole.dtype == np.float32
    assert np.abs(whole - split).max() < 1e-4 and whole.std() > 0.1


def test_two_streams_in_turn(alone: LLM) -> None:
    """Outputs of one stream that arrive while another is read are kept for it."""
    wanted = alone.generate(PROMPTS[:2], GREEDY)
    streams = [alone.stream(p, GREEDY) for p in PROMPTS[:2]]
    found: list[list[int]] = [[], []]
    for pair in zip(*streams, strict=True):
        for tokens, delta in zip(found, pair, strict=True):
            tokens += delta.tokens
    assert [tuple(tokens) for tokens in found] == [c.tokens for c in wanted]


@pytest.mark.parametrize("way", ["alone", pytest.param("threads", marks=pytest.mark.slow)])
def test_small_cache_gives_the_same_tokens(model: Path, alone: LLM, way: str) -> None:
    """24 pages, 40 requests of 1-200 tokens with shared prefixes, some left early."""
    rng = np.random.default_rng(3)
    stems = [tuple(int(t) for t in rng.integers(5, 900, 100)) for _ in range(3)]
    prompts = []
    for i in range(40):
        tail = tuple(int(t) for t in rng.integers(5, 900, int(rng.integers(1, 100))))
        prompts.append(stems[i % 3][: int(rng.integers(0, 101))] + tail)
    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    small = {**COMMON, "kv_pages": 24, "page_size": 16, "max_running": 16, "prefill_chunk": 128}
    with LLM(model, **small, **WAYS.get(way, {})) as llm:
        for i in range(0, 40, 9):
            next(llm.stream(prompts[i], sampling))  # dropped at once: aborted
        found = llm.generate(prompts, sampling)
        stats = llm.stats()
        assert set(stats.free_pages) == {24} and stats.running == stats.waiting == 0
        assert stats.cached_tokens > 0 and (way != "alone" or stats.preemptions > 0)
    wanted = [alone.generate(p, sampling)[0].tokens for p in prompts]
    assert [c.tokens for c in found] == wanted


def test_logprobs(alone: LLM) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=5, logprobs=3, prompt_logprobs=1)
    (found,) = alone.generate(PROMPTS[3], sampling)
    assert [entry.token for entry in found.logprobs] == list(found.tokens)
    assert all(len(e.top) == 3 and e.rank == 1 for e in found.logprobs)
    assert found.prompt_logprobs is not None
    assert tuple(e.token for e in found.prompt_logprobs) == PROMPTS[3][1:]
    logits = alone.score(PROMPTS[3])
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    wanted = [logprobs[i, token] for i, token in enumerate(PROMPTS[3][1:])]
    assert np.allclose([e.logprob for e in found.prompt_logprobs], wanted, atol=1e-4)


def test_text_stop_strings_and_chat(alone: LLM) -> None:
    (free,) = alone.generate("the house on the hill", GREEDY)
    assert free.text and alone.tokenizer is not None
    stop = free.text[len(free.text) // 2 :][:3]
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop=(stop,))
    (found,) = alone.generate("the house on the hill", sampling)
    assert found.finish_reason == "stop" and found.text == free.text[: free.text.index(stop)]
    assert "".join(d.text for d in alone.stream("the house on the hill", sampling)) == found.text
    answer = alone.chat([{"role": "user", "content": "who?"}], GREEDY)
    assert len(answer.tokens) == 8 and answer.finish_reason == "length"
    assert alone.stats().running == 0


def test_sampling_is_a_function_of_the_seed(alone: LLM) -> None:
    seeded = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
    one = alone.generate(PROMPTS[0], seeded)[0].tokens
    many = alone.generate([*PROMPTS, PROMPTS[0]], [GREEDY] * 4 + [seeded])
    assert many[-1].tokens == one != many[0].tokens


def test_bad_input(model: Path, alone: LLM) -> None:
    with pytest.raises(FieldError, match="prompt"):
        alone.generate([PROMPTS[0], (10**6,)])
    with pytest.raises(FieldError, match="temperature"):
        alone.generate(PROMPTS, SamplingParams(temperature=-1.0))
    with pytest.raises(ValueError, match="3 sampling parameters for 4"):
        alone.generate(PROMPTS, [GREEDY] * 3)
    with pytest.raises(TypeError, match="tensor_parallel"):
        LLM(model, tensor_parallel=2)
    with pytest.raises(Refusal, match="attn-dp 3"):
        LLM(model, tp=4, attn_dp=3)
    assert alone.stats().running == 0


@pytest.mark.parametrize("way", ["alone", *WAYS])
def test_update_weights_is_seen_by_both_phases(model: Path, way: str) -> None:
    import torch

    name = "model.layers.0.self_attn.q_proj.weight"
    generator = torch.Generator().manual_seed(1)
    with LLM(model, **COMMON, **WAYS.get(way, {})) as llm:
        before = llm.score(PROMPTS[0], decode_from=20)
        llm.update_weights({name: torch.randn(192, 96, generator=generator) * 0.2})
        after, prefill = llm.score(PROMPTS[0], decode_from=20), llm.score(PROMPTS[0])
        assert np.abs(before - after)[1:].max(axis=1).min() > 1e-2  # position 0 sees itself only
        assert np.abs(prefill - after).max() < 1e-4
        with pytest.raises(ValueError, match="no tensor 'x'"):
            llm.update_weights({"x": torch.zeros(1)})
        assert np.array_equal(llm.score(PROMPTS[0]), prefill)


@pytest.mark.parametrize("knows_text", [True, False])
@pytest.mark.parametrize("padded", [True, False], ids=["list", "one"])
def test_ends_past_the_vocabulary_are_never_drawn(
    model: Path, alone: LLM, tmp_path: Path, knows_text: bool, padded: bool
) -> None:
    """As releases with a padded vocabulary list them, in either configuration file."""
    folder = shutil.copytree(model, tmp_path / "model")
    if not knows_text:
        (folder / "tokenizer.json").unlink()
    vocab = alone.ready.vocab_size
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = [2, vocab] if padded else vocab
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 10**6}))
    with LLM(folder, **COMMON) as llm:
        assert llm.ready.eos_ids == ((2,) if padded else ())
        found = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=8, min_tokens=8))
    assert len(found[0].tokens) == 8 and 2 not in found[0].tokens[:-1]


def test_async(model: Path, alone: LLM) -> None:
    import torch

    async def work() -> None:
        async with await AsyncLLM.start(model, **COMMON) as llm:
            found = await asyncio.gather(*(llm.generate(p, GREEDY) for p in PROMPTS))
            assert [c.tokens for c in found] == [c.tokens for c in wanted]
            async with aclosing(llm.stream("hello there", GREEDY)) as deltas:
                assert (await anext(deltas)).finish_reason is None
            assert (await llm.client.stats()).running == 0
            for split in (None, 1):
                logits = await llm.score(PROMPTS[1], split)
                assert np.array_equal(logits, alone.score(PROMPTS[1], split))
            with pytest.raises(ValueError, match="prompt"):
                await llm.score([10**6])
            before = await llm.score(PROMPTS[1])
            await llm.update_weights({"model.norm.weight": torch.full((96,), 2.0)})
            assert np.abs(await llm.score(PROMPTS[1]) - before).max() > 1e-2
            with pytest.raises(ValueError, match="no tensor 'x'"):
                await llm.update_weights({"x": torch.zeros(1)})

    wanted = alone.generate(PROMPTS, GREEDY)
    asyncio.run(asyncio.wait_for(work(), 60))
