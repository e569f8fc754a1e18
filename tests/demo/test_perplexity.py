"""`anabranch eval perplexity` of the packaged model, against transformers' own loss."""

import json
import math
from pathlib import Path

import pytest
import torch
import transformers

import anabranch.demo
from anabranch.cli.main import run
from anabranch.demo.problems import problems

FOLDER = Path(anabranch.demo.__file__).parent
WINDOW = 96


@pytest.mark.timeout(300)
def test_perplexity_equals_transformers(tmp_path: Path) -> None:
    texts = [f"{p.question}\n{p.solution}" for p in problems("held-out", 12, 2)]
    data, out = tmp_path / "d.jsonl", tmp_path / "r.json"
    data.write_text("\n".join(json.dumps({"text": t}) for t in texts))
    words = f"eval perplexity --data {data} --window {WINDOW} --json {out}"
    flags = "--device cpu --dtype float32 --threads 1 --max-model-len 512"
    assert run(f"{words} {flags}".split()) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    total, count, windows = 0.0, 0, 0
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        for part in (ids[i : i + WINDOW] for i in range(0, len(ids), WINDOW)):
            if len(part) > 1:
                with torch.no_grad():
                    given = torch.tensor([part])
                    loss = model(given, labels=given, use_cache=False).loss
                total, count = total + float(loss) * (len(part) - 1), count + len(part) - 1
                windows += 1
    found = json.loads(out.read_text())
    assert windows > len(texts) and (found["windows"], found["tokens"]) == (windows, count)
    assert abs(found["perplexity"] - math.exp(total / count)) < 1e-3
