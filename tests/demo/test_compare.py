"""`eval arithmetic --compare` of real servers: one with itself, and with one that answers worse."""

import json
from pathlib import Path

import pytest
from tests.e2e.serving import served

from anabranch.cli.main import run

FLAGS = ("--device", "cpu", "--dtype", "float32", "--threads", "1", "--max-model-len", "512")
# the spoilt server reads the first 40 characters of a question
SPOILT = (
    "{{ bos_token }}{{ '<|user|>' + messages[-1]['content'][:40] }}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compare_tells_a_spoilt_server(tmp_path: Path) -> None:
    out, template = tmp_path / "r.json", tmp_path / "spoilt.jinja"
    template.write_text(SPOILT)
    words = f"eval arithmetic --n 20 --json {out} --compare".split()
    with served(*FLAGS) as good, served(*FLAGS, "--chat-template", str(template)) as spoilt:
        assert run([*words, good, good]) == 0
        same = json.loads(out.read_text())
        assert same["p"] == 1.0 and same["equal"] == same["n"] == 40
        assert run([*words, good, spoilt]) == 1
        other = json.loads(out.read_text())
    assert other["p"] < 0.01 and other["only_a_right"] > other["only_b_right"]
    assert other["equal"] < other["n"]
