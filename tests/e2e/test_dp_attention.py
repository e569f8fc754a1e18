"""DP attention on any CPU, from the command line as users of other engines type it (ledger D1)."""

import pytest
from tests.e2e.serving import answers, served

from anabranch.demo.problems import extract_answer, problems

COUNT = 64


class TestDPAttention:
    @pytest.mark.timeout(600)
    def test_dp_attention_DP2TP2(self) -> None:
        asked = list(problems("held-out", COUNT, seed=11))
        questions = [p.question for p in asked]
        with served("--device", "cpu", "--dtype", "float32") as url:
            truth = answers(url, questions)
        flags = ["--device", "cpu", "--tp", "2", "--enable-dp-attention", "--dp", "2"]
        with served(*flags, "--dtype", "float32") as url:
            split = answers(url, questions)
        right = sum(extract_answer(t) == p.answer for (t, _), p in zip(split, asked, strict=True))
        assert right / COUNT > 0.7, f"{right} of {COUNT} are right"
        assert [ids for _, ids in split] == [ids for _, ids in truth]
