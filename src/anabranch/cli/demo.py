"""`anabranch demo`: the packaged model in one process and in every kind of layout, over processes.

Prints a table and says whether all layouts gave one process's tokens; exit status 0 only then.
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from anabranch.core.config import EngineConfig
from anabranch.core.request import SamplingParams
from anabranch.demo.problems import extract_answer, problems
from anabranch.engine.completion import Completion
from anabranch.engine.llm import LLM
from anabranch.text.template import ChatTemplate

PROBLEMS = 24
LONGEST = 320  # tokens; a solution has fewer


@dataclass(frozen=True)
class Split:
    """The layout flags of one row of the table."""

    tp: int = 1
    attn_dp: int = 1
    attn_cp: int = 1
    dcp: int | None = None


LAYOUTS = {
    "one process": Split(),
    "DP attention: 2 replicas x TP 2": Split(tp=4, attn_dp=2),
    "CP 2 prefill, decode TP": Split(tp=2, attn_cp=2, dcp=1),
    "DCP 2: KV striped": Split(tp=2, dcp=2),
    "CP 2, decode TP, DCP 2, DP 2, together": Split(tp=4, attn_dp=2, attn_cp=2, dcp=2),
}


@dataclass(frozen=True)
class Row:
    """One layout's outcome. speed: generated tokens per second, start-up apart."""

    completions: list[Completion]
    speed: float
    kv_bytes: float


def run(folder: Path | None = None) -> int:
    """Run the demo; `folder` receives a picture of each layout."""
    console = Console()
    asked = list(problems("new-numbers", PROBLEMS, seed=7))
    table = Table("layout", "ranks", "tokens equal", "correct", "tok/s", "KV bytes/token/rank")
    truth: list[tuple[int, ...]] | None = None
    equal = True
    started = time.monotonic()
    for name, split in LAYOUTS.items():
        with console.status(f"{name} ..."):
            row = _row(split, [p.question for p in asked])
        tokens = [c.tokens for c in row.completions]
        truth = truth or tokens
        same = sum(a == b for a, b in zip(tokens, truth, strict=True))
        equal = equal and same == PROBLEMS
        right = sum(
            extract_answer(c.text) == p.answer for c, p in zip(row.completions, asked, strict=True)
        )
        table.add_row(
            name, str(split.tp), f"{same}/{PROBLEMS}", f"{right}/{PROBLEMS}",
            f"{row.speed:.0f}", f"{row.kv_bytes:.0f}",
        )  # fmt: skip
        if folder is not None:
            from anabranch.cli.layout import draw

            folder.mkdir(parents=True, exist_ok=True)
            picture = folder / f"{name.split(':')[0].replace(' ', '-').lower()}.svg"
            draw(EngineConfig(**asdict(split)), picture)
    console.print(table)
    verdict = "every layout gave one process's tokens" if equal else "LAYOUTS DIFFER"
    console.print(f"{verdict}; {time.monotonic() - started:.0f} s")
    return 0 if equal else 1


def _row(split: Split, questions: list[str]) -> Row:
    with LLM(
        dtype="float32", max_model_len=1024, threads=1, tp=split.tp,
        attn_dp=split.attn_dp, attn_cp=split.attn_cp, dcp=split.dcp,
    ) as llm:  # fmt: skip
        assert llm.tokenizer is not None
        template = ChatTemplate.of(llm.tokenizer)
        assert template is not None
        prompts = [
            llm.tokenizer.encode(template.render([{"role": "user", "content": q}]), False)
            for q in questions
        ]
        template.close()
        start = time.monotonic()
        done = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=LONGEST))
        seconds = time.monotonic() - start
        made = sum(len(c.tokens) for c in done)
        kv_bytes = json.loads(llm.ready.info)["kv"]["bytes_per_token_per_rank"]
        return Row(done, made / seconds, kv_bytes)
