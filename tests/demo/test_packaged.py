"""The packaged model: what transformers makes of it, and what was said of its training."""

import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open

import anabranch.demo
from anabranch import LLM, SamplingParams
from anabranch.demo.problems import extract_answer, problems
from anabranch.text.template import ChatTemplate
from anabranch.text.tokenizer import Tokenizer

FOLDER = Path(anabranch.demo.__file__).parent
REPORT = Path(__file__).parent.parent.parent / "training" / "REPORT.md"
LONGEST = 320


def prompts(questions: list[str]) -> list[list[int]]:
    tokenizer = Tokenizer.load(FOLDER)
    template = ChatTemplate.of(tokenizer)
    assert template is not None
    texts = [template.render([{"role": "user", "content": q}]) for q in questions]
    template.close()
    return [tokenizer.encode(text, False) for text in texts]


@torch.no_grad()
def greedy(model: transformers.PreTrainedModel, ids: list[int]) -> list[int]:
    given = torch.tensor([ids])
    made = model.generate(
        given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=LONGEST,
        eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    return made[0, len(ids) :].tolist()


@pytest.fixture(scope="module")
def theirs() -> transformers.PreTrainedModel:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        FOLDER, dtype=torch.float32, attn_implementation="eager"
    )
    assert isinstance(model, transformers.DeepseekV3ForCausalLM)
    return model.eval()


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "count", [6, pytest.param(40, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_transformers_gives_the_same_answers(
    theirs: transformers.PreTrainedModel, count: int
) -> None:
    asked = [*problems("new-numbers", count // 2, 21), *problems("held-out", count // 2, 21)]
    given = prompts([*(p.question for p in asked), "Who are you?"])
    wanted = [greedy(theirs, ids) for ids in given]
    with LLM(device="cpu", dtype="float32", threads=1, max_model_len=1024) as llm:
        found = llm.generate(given, SamplingParams(temperature=0.0, max_tokens=LONGEST))
        score = llm.score(given[0])
    assert [list(c.tokens) for c in found] == wanted
    with torch.no_grad():
        logits = theirs(torch.tensor([given[0]]), use_cache=False).logits[0]
    assert float((torch.tensor(score) - logits).abs().max()) < 1e-3
    right = sum(extract_answer(c.text) == p.answer for c, p in zip(found, asked, strict=False))
    assert right / count > 0.7
    assert "Anabranch" in found[-1].text


def test_the_package_is_small_and_in_released_form() -> None:
    assert sum(f.stat().st_size for f in FOLDER.iterdir() if f.is_file()) <= 25_000_000
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        elements = sum(torch.Size(t.get_shape()).numel() for t in tensors.values())
        kinds = {t.get_dtype() for t in tensors.values()}
    assert 6_000_000 <= elements <= 12_000_000
    assert "BF16" in kinds and kinds <= {"BF16", "F32"}
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in tensors


def test_the_report_states_two_seeds_whose_gap_is_small() -> None:
    rows = re.findall(
        r"^\| (\d) \| (\S+) \| (\S+) \| \d+ of \d+ \| ([\d.]+) \|", REPORT.read_text(), re.M
    )
    found = {(int(seed), split, dtype): float(share) for seed, split, dtype, share in rows}
    for split, least in (("new-numbers", 0.95), ("held-out", 0.70)):
        for dtype in ("bfloat16", "float32"):
            both = [found[seed, split, dtype] for seed in (0, 1)]
            assert min(both) >= least and abs(both[0] - both[1]) <= 0.02, (split, dtype, both)
