"""`anabranch bench serve`: what is counted, against our own server over the made-up engine."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS / "server"), str(TESTS / "text")]

from server_process import ServerProcess  # noqa: E402
from tiny_text import save_tiny  # noqa: E402

from anabranch.cli.bench import Felt, report  # noqa: E402
from anabranch.cli.main import run  # noqa: E402


def test_percentiles_are_nearest_rank_milliseconds() -> None:
    felt = [Felt(ttft=i / 1000, gaps=[0.002], e2e=0.1, prompt_tokens=5, output_tokens=2)
            for i in range(1, 101)]  # fmt: skip
    felt.append(Felt(error="gone"))
    result = report(felt, 2.0)
    assert (result["completed"], result["failed"]) == (100, 1)
    assert result["ttft_ms"] == pytest.approx({"p50": 50.0, "p90": 90.0, "p99": 99.0})
    assert result["output_tok_s"] == 100.0 and result["total_tok_s"] == 350.0
    assert report([Felt(error="x")], 1.0)["itl_ms"] == {"p50": None, "p90": None, "p99": None}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = save_tiny(tmp_path_factory.mktemp("tiny"))
    server = ServerProcess(folder, "--step", "0.005", "--max-model-len", "4096").wait_ready()
    yield server.url
    server.end()


@pytest.mark.parametrize("rate", [None, 200])
def test_a_load_is_measured(url: str, rate: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"bench serve --url {url} --n 20 --concurrency 10 --input-len 8 --output-len 12 --json"
    assert run([*words.split(), *([] if rate is None else ["--rate", str(rate)])]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["completed"], result["failed"]) == (20, 0)
    assert result["output_tokens"] == 240
    assert result["itl_ms"]["p50"] >= 5 and result["ttft_ms"]["p50"] >= 5
    assert result["e2e_ms"]["p50"] >= 60
    for name in ("output_tok_s", "total_tok_s"):
        assert result[name] > 0


def test_failures_are_counted(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"bench serve --url {url} --n 4 --model nobody --json"
    assert run(words.split()) == 1
    assert json.loads(capsys.readouterr().out)["failed"] == 4
