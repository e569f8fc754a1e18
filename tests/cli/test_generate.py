"""`anabranch generate` against a stub: what a bad prompt or setting does to the others."""

import json

import pytest
from tests.cli.stub_server import completion_reply, serving

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
