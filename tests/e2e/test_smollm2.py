"""A real model: SmolLM2-135M-Instruct from its Q4_1 GGUF, against transformers on the same weights.

transformers dequantises the file itself, through the gguf package. Skipped where the file is not in
the cache (`anabranch pull smollm2-135m-instruct`), so that tests never download.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from anabranch import LLM, SamplingParams
from anabranch.text.template import ChatTemplate
from anabranch.text.tokenizer import Tokenizer
from anabranch.weights.catalog import CATALOGUE, cache_folder

NAME = "smollm2-135m-instruct"
FILE = cache_folder() / "models" / NAME / CATALOGUE[NAME].file
TOKENS = 64
QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about a river that splits in two.",
    "Explain photosynthesis to a child.",
    "List three primary colors.",
    "Translate 'good morning' to Spanish, and say when it is used.",
    "Write a Python function that reverses a string.",
    "Why is the sky blue?",
    "Tell me a story that begins with: The old clock stopped.",
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not FILE.is_file(), reason=f"{NAME} is not in the cache"),
]


@dataclass(frozen=True)
class Truth:
    model: transformers.PreTrainedModel
    prompts: list[list[int]]

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """[T, vocab] of one pass, in the model's dtype."""
        found: Tensor = self.model(torch.tensor([list(ids)]), use_cache=False).logits[0]
        return found

    @torch.no_grad()
    def greedy(self, ids: Sequence[int]) -> list[int]:
        given = torch.tensor([list(ids)])
        made = self.model.generate(
            given, attention_mask=torch.ones_like(given), do_sample=False,
            min_new_tokens=TOKENS, max_new_tokens=TOKENS, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        return made[0, len(ids) :].tolist()


def truth_in(dtype: torch.dtype) -> Truth:
    torch.set_num_threads(2)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        FILE.parent, gguf_file=FILE.name, dtype=dtype, attn_implementation="eager"
    ).eval()
    template = ChatTemplate.of(Tokenizer.load(FILE))
    assert template is not None
    tokenizer = Tokenizer.load(FILE)
    texts = [template.render([{"role": "user", "content": q}]) for q in QUESTIONS]
    template.close()
    return Truth(model, [tokenizer.encode(text, False) for text in texts])


def ours(dtype: str, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    with LLM(FILE, device="cpu", dtype=dtype, max_model_len=512, max_running=8) as llm:
        return [c.tokens for c in llm.generate(prompts, GREEDY)]


def test_fp32_greedy_tokens_equal_transformers() -> None:
    truth = truth_in(torch.float32)
    found = ours("float32", truth.prompts)
    wanted = [truth.greedy(ids) for ids in truth.prompts]
    assert [list(tokens) for tokens in found] == wanted
    assert len({tuple(tokens) for tokens in wanted}) == len(QUESTIONS)


def test_the_tokenizer_is_transformers_own() -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(FILE.parent, gguf_file=FILE.name)
    mine = Tokenizer.load(FILE)
    for text in (*QUESTIONS, " naïve  🎉\n\tx=1000"):
        ids = mine.encode(text, False)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert mine.decode(ids) == text


def test_bf16_differs_first_at_a_tie_within_one_step(
    record_property: Callable[[str, object], None],
) -> None:
    """Where ours leaves transformers' bf16 tokens, transformers' two logits are within a bf16 step.

    A step: the distance of neighbouring bf16 numbers, 2^-7 of the power of two below the value.
    """
    truth = truth_in(torch.bfloat16)
    found = ours("bfloat16", truth.prompts)
    ties: list[float] = []
    for ids, tokens in zip(truth.prompts, found, strict=True):
        wanted = truth.greedy(ids)
        assert len(tokens) == len(wanted) == TOKENS
        at = next((i for i, (a, b) in enumerate(zip(tokens, wanted, strict=True)) if a != b), None)
        if at is None:
            continue
        last = truth.logits([*ids, *wanted[:at]])[-1].float()
        best, other = float(last[wanted[at]]), float(last[tokens[at]])
        step = 2.0 ** (np.floor(np.log2(abs(best))) - 7)
        ties.append(abs(best - other) / step)
    record_property("first_differences", len(ties))
    record_property("largest_in_steps", max(ties, default=0.0))
    assert all(tie <= 1.0 for tie in ties), ties


def test_the_folder_of_the_cache_is_what_the_catalogue_names() -> None:
    from anabranch.weights.catalog import fetch

    assert fetch(NAME) == FILE and Path(FILE).stat().st_size > 50_000_000
