"""What a model's weights take on a host: `python bench/host_memory.py [--json OUT]`.

Model B at TP 4 x attention DP 4, four rank processes: the proportional set size (PSS, proc(5)
smaps) of the mappings that hold parameters, summed over the ranks, over the size of the checkpoint.
What several ranks hold whole is one shared mapping, so the sum stays near one checkpoint.
"""

import argparse
import json
import os
import tempfile
from functools import partial
from pathlib import Path

from decode_share import model_b

from anabranch.core.config import EngineConfig
from anabranch.engine.llm import LLM
from anabranch.engine.prepare import prepare
from anabranch.engine.ranks import RankMaker
from anabranch.models.reads import weight_bytes
from anabranch.worker.runner import Worker

WHERE = "ANABRANCH_BENCH_WEIGHTS"


class TellingMaker(RankMaker):
    """Loaded by module path in the ranks of this bench; leaves where its parameters lie."""

    def make(self, rank: int) -> Worker:
        worker = super().make(rank)
        assert isinstance(worker.refit, partial)
        spans = [(t.data_ptr(), t.nbytes) for t in worker.refit.args[2].values()]
        Path(os.environ[WHERE], f"{os.getpid()}.json").write_text(json.dumps(spans))
        return worker


def pss(pid: int, spans: list[tuple[int, int]]) -> int:
    """Bytes of the mappings of a process that hold any of the (address, bytes) `spans`."""
    total, counts = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(x, 16) for x in head.split("-"))
            counts = any(at < high and at + size > low for at, size in spans)
        elif counts and head == "Pss:":
            total += int(line.split()[1]) * 1024
    return total


def measure(folder: Path) -> dict[str, float]:
    alone = prepare(
        EngineConfig(model=str(folder), load_format="dummy", device="cpu", dtype="bfloat16")
    ).run
    (checkpoint,) = weight_bytes(alone)
    with tempfile.TemporaryDirectory() as where:
        os.environ[WHERE] = where
        with LLM(
            folder, maker="host_memory:TellingMaker", tp=4, attn_dp=4, load_format="dummy",
            device="cpu", dtype="bfloat16", max_model_len=512, threads=1,
        ):  # fmt: skip
            ranks = [
                pss(int(file.stem), json.loads(file.read_text()))
                for file in Path(where).glob("*.json")
            ]
    return {
        "ranks": len(ranks),
        "checkpoint_mib": round(checkpoint / 2**20, 1),
        "pss_mib": round(sum(ranks) / 2**20, 1),
        "ratio": round(sum(ranks) / checkpoint, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the result to this file")
    args = parser.parse_args()
    with model_b() as folder:
        report = measure(folder)
    print(json.dumps(report))
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
