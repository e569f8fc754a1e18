"""`anabranch generate` against a stub: what a bad prompt or setting does to the others."""

import json
from pathlib import Path

import pytest
from tests.cli.stub_server import completion_reply, serving

from anabranch.cli.generate import read_prompts
from anabranch.cli.main import run


def test_a_refused_prompt_leaves_the_other_answers(capsys: pytest.CaptureFixture[str]) -> None:
    def answer(path: str, body: dict) -> dict:
        if body["prompt"] == "bad":
            return {"status": 400, "error": {"message": "prompt: too long"}}
        return completion_reply(f"to {body['prompt']}")

    with serving(answer) as (url, _):
        words = ["--url", url, "--prompt", "one", "--prompt", "bad", "--prompt", "two"]
        assert run(["generate", *words]) == 1
        said = capsys.readouterr()
        assert "--> to one" in said.out and "--> to two" in said.out
        assert "prompt 2" in said.err and "prompt: too long" in said.err
        assert run(["generate", *words, "--json"]) == 1
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r.get("text") for r in rows] == ["to one", None, "to two"]
    assert "too long" in rows[1]["error"]


@pytest.mark.parametrize(
    "words, told",
    [
        (["--prompt", "a", "--prompt", ""], "prompt 2 of 2 is empty"),
        (["--prompt", "a", "--temperature", "nan"], "temperature"),
        (["--prompt", "a", "--max-tokens", "0"], "max"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_sent(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(lambda path, body: completion_reply("")) as (url, bodies):
        assert run(["generate", "--url", url, *words]) == 2
        assert told in capsys.readouterr().err and not bodies


def test_lines_end_with_line_feeds_alone_and_keep_their_numbers(tmp_path: Path) -> None:
    text = tmp_path / "prompts.txt"
    text.write_bytes("\ufeffa\u2028b\x0cc\r\n\n  \nd".encode())
    assert read_prompts(text) == ["a\u2028b\x0cc", "d"]
    rows = tmp_path / "prompts.jsonl"
    rows.write_bytes('\ufeff\n{"prompt": "a\u2028b"}\r\n{"prompt": [1, 2]}\n"c"\n'.encode())
    assert read_prompts(rows) == ["a\u2028b", [1, 2], "c"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"{bad", "not JSON"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"messages": [{"role": "user", "content": "\\udc00"}]}', "surrogate"),
        (b'"\xff"', "not UTF-8"),
        (b'{"text": 3}', "no prompt"),
    ],
)
def test_a_bad_line_is_named_before_anything_runs(tmp_path: Path, line: bytes, told: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'\n\n{"prompt": "a"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=f"prompts.jsonl:4: .*{told}"):
        read_prompts(file)


def test_token_ids_are_a_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ids.jsonl"
    file.write_text('{"prompt": [5, 6]}\n')
    with serving(lambda path, body: completion_reply(str(body["prompt"]))) as (url, _):
        assert run(["generate", "--url", url, "--file", str(file)]) == 0
    assert "--> [5, 6]" in capsys.readouterr().out
