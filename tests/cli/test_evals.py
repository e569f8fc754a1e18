"""`anabranch eval` and `generate` against stub servers with known answers."""

import json
from pathlib import Path

import pytest
from stub_server import chat_reply, completion_reply, serving
from test_scoring import STORED

from anabranch.cli.main import run
from anabranch.demo.problems import problems

SOLUTIONS = {p.question: p.solution for split in ("new-numbers", "held-out")
             for p in problems(split, 40, 0)}  # fmt: skip


def solver(wrong: int):
    """Right answers, but for every `wrong`-th question (by its place among all)."""
    order = {question: i for i, question in enumerate(SOLUTIONS)}

    def answer(path: str, body: dict) -> dict:
        question = body["messages"][-1]["content"]
        bad = wrong and order[question] % wrong == 0
        return chat_reply("#### 99999" if bad else SOLUTIONS[question])

    return answer


def test_arithmetic_counts_right_answers_by_split(tmp_path: Path) -> None:
    out, misses = tmp_path / "r.json", tmp_path / "m.txt"
    with serving(solver(4)) as (url, bodies):
        words = f"eval arithmetic --url {url} --n 40 --json {out} --misses {misses}"
        assert run(words.split()) == 0
    result = json.loads(out.read_text())
    assert len(bodies) == 80 and all(b["temperature"] == 0 for b in bodies)
    # questions may repeat between draws: count what the stub really answered
    expected = {s: sum(solver(4)("", {"messages": [{"content": p.question}]})["choices"][0]
                       ["message"]["content"] == p.solution for p in problems(s, 40, 0))
                for s in ("new-numbers", "held-out")}  # fmt: skip
    assert {s: r["correct"] for s, r in result["by_split"].items()} == expected
    assert result["n"] == 40 and result["accuracy"] == expected["new-numbers"] / 40
    low, high = result["ci95"]
    assert low < result["accuracy"] < high and result["model"] == "stub"
    assert f"{80 - sum(expected.values())} misses of 80" in misses.read_text()
    assert "99999" in misses.read_text()


def test_compare_of_a_server_with_itself_and_with_a_spoilt_one(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    with serving(solver(0)) as (good, _), serving(solver(2)) as (spoilt, _):
        words = f"eval arithmetic --n 40 --json {out} --compare"
        assert run([*words.split(), good, good]) == 0
        same = json.loads(out.read_text())
        assert same["p"] == 1.0 and same["equal"] == same["n"] == 80
        assert run([*words.split(), good, spoilt]) == 1
        other = json.loads(out.read_text())
        assert other["p"] < 0.01 and other["only_b_right"] == 0 and other["equal"] < 80


def test_gsm8k_scores_strictly_and_flexibly(tmp_path: Path) -> None:
    data, out = tmp_path / "d.jsonl", tmp_path / "r.json"
    rows = [{"question": f"Q{i}", "answer": row[0]} for i, row in enumerate(STORED[:20])]
    shots = [{"question": f"S{i}", "answer": f"work\n#### {i}"} for i in range(8)]
    data.write_text("\n".join(json.dumps(r) for r in shots + rows))
    answers = {f"Q{i}": row[1] for i, row in enumerate(STORED[:20])}

    def answer(path: str, body: dict) -> dict:
        assert path == "/v1/completions" and "Question:" in body["stop"]
        assert (
            body["prompt"].count("Question:") == 9 and "Answer: work\n#### 7\n\n" in body["prompt"]
        )
        question = body["prompt"].split("Question: ")[-1].removesuffix("\nAnswer:")
        return completion_reply(answers[question])

    with serving(answer) as (url, _):
        assert run(f"eval gsm8k --data {data} --url {url} --json {out}".split()) == 0
    result = json.loads(out.read_text())
    assert result["strict"]["correct"] == sum(row[4] for row in STORED[:20])
    assert result["flexible"]["correct"] == sum(row[5] for row in STORED[:20])
    assert result["n"] == 20 and result["shots"] == 8


def test_gsm8k_without_examples(tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text(json.dumps({"question": "Q", "answer": "#### 4"}))

    def answer(path: str, body: dict) -> dict:
        assert body["prompt"] == "Question: Q\nAnswer:"
        return completion_reply(" #### 4")

    with serving(answer) as (url, _):
        assert run(f"eval gsm8k --data {data} --url {url} --shots 0".split()) == 0
        assert run(f"eval gsm8k --data {data} --url {url} --shots 1".split()) == 2


def test_perplexity_is_of_prompt_tokens_alone(tmp_path: Path) -> None:
    data, out = tmp_path / "d.jsonl", tmp_path / "r.json"
    data.write_text("\n".join(json.dumps({"text": t}) for t in ("a b c", "d e")))

    def answer(path: str, body: dict) -> dict:
        assert body["echo"] and body["max_tokens"] == 1
        n = len(body["prompt"].split())
        values = [None, *[-1.0] * (n - 1), -50.0]  # the last one is of the generated token
        return {
            "choices": [{"index": 0, "text": "", "logprobs": {"token_logprobs": values}}],
            "usage": {"prompt_tokens": n, "completion_tokens": 1},
        }

    with serving(answer) as (url, _):
        assert run(f"eval perplexity --data {data} --url {url} --json {out}".split()) == 0
    result = json.loads(out.read_text())
    assert result["perplexity"] == pytest.approx(2.718281828) and result["tokens"] == 3


def test_a_failing_server_is_told_in_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    refuse = {"status": 400, "error": {"message": "not today"}}
    with serving(lambda path, body: refuse) as (url, _):
        assert run(f"eval arithmetic --n 3 --url {url} --concurrency 1".split()) == 1
    error = capsys.readouterr().err
    assert "not today" in error and "Traceback" not in error
    assert run(["eval", "arithmetic", "--n", "1", "--url", url]) == 1  # nobody listens now
    assert url in capsys.readouterr().err


def test_generate_reads_files_and_keeps_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "p.jsonl"
    lines = [
        {"prompt": "one"},
        {"question": "two"},
        {"messages": [{"role": "user", "content": "x"}]},
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines))

    def answer(path: str, body: dict) -> dict:
        if path == "/v1/chat/completions":
            return chat_reply("chat " + body["messages"][0]["content"])
        return completion_reply("text " + body["prompt"])

    with serving(answer) as (url, bodies):
        words = f"generate --url {url} --prompt zero --file {file} --json --max-tokens 5"
        assert run(words.split()) == 0
    found = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    assert found == ["text zero", "text one", "text two", "chat x"]
    assert all(body["max_tokens"] == 5 for body in bodies)
    file.write_text(json.dumps({"nothing": 1}))
    assert run(f"generate --url http://127.0.0.1:1 --file {file}".split()) == 2
    capsys.readouterr()
    file.write_text('"one"\nnot json\n')
    assert run(f"generate --url http://127.0.0.1:1 --file {file}".split()) == 2
    assert f"{file}:2: not JSON" in capsys.readouterr().err
    flags = ["--tp", "2", "--page-size", "16"]
    assert run(["generate", "--url", "http://127.0.0.1:1", "--prompt", "x", *flags]) == 2
    said = capsys.readouterr().err
    assert all(flag in said for flag in flags[::2]) and "--url" in said


def test_results_that_cannot_be_written_are_refused_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    nowhere = tmp_path / "none" / "out.json"
    assert run(f"eval arithmetic --url http://127.0.0.1:1 --json {nowhere}".split()) == 2
    assert f"--json {nowhere}" in capsys.readouterr().err
    assert run(f"eval arithmetic --url http://127.0.0.1:1 --misses {tmp_path}".split()) == 2
    assert "--misses" in capsys.readouterr().err
