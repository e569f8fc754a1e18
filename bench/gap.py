"""How long a stream waits while another replica reads a long prompt: `python bench/gap.py`.

Model B (see bench/decode_share.py) at TP 2 x DP 2, so one rank a replica. A request streams on one
replica; an 8k prompt comes to the other and is read in chunks. The gaps between the stream's tokens
meanwhile are the steps that carry a chunk: their largest over their median says whether a long
prompt ever stalls another replica for more than its chunks do.
"""

import argparse
import asyncio
import json
import statistics
import time
from itertools import pairwise
from pathlib import Path

from decode_share import model_b

from anabranch.core.request import SamplingParams
from anabranch.engine.llm import AsyncLLM


async def read(llm: AsyncLLM, ids: list[int], tokens: int, stamps: list[float]) -> None:
    """Stream `tokens` tokens after `ids`; the time of each goes into `stamps`."""
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    async for _ in llm.stream(ids, sampling):
        stamps.append(time.perf_counter())


async def measure(folder: Path, prompt: int) -> dict[str, float]:
    llm = await AsyncLLM.start(
        folder, tp=2, attn_dp=2, load_format="dummy", device="cpu", max_model_len=prompt + 64,
        kv_pages=256, prefix_cache=False,
    )  # fmt: skip
    try:
        stamps: list[float] = []
        stream = asyncio.create_task(read(llm, list(range(32)), 600, stamps))
        while len(stamps) < 8:
            await asyncio.sleep(0.01)
        came = time.perf_counter()
        first: list[float] = []
        await read(llm, [(7 * t) % 32000 for t in range(prompt)], 1, first)
        gaps = [b - a for a, b in pairwise(stamps) if a >= came and b <= first[0]]
        stream.cancel()
        alone = [b - a for a, b in pairwise(stamps[:8])]
    finally:
        await llm.close()
    middle = statistics.median(gaps)
    return {
        "chunk_steps": len(gaps),
        "median_chunk_step_ms": round(1e3 * middle, 1),
        "largest_gap_ms": round(1e3 * max(gaps), 1),
        "ratio": round(max(gaps) / middle, 3),
        "decode_step_alone_ms": round(1e3 * statistics.median(alone), 1),
        "prompt_s": round(first[0] - came, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--json", help="write the result to this file")
    args = parser.parse_args()
    with model_b(args.prompt + 64) as folder:
        report = asyncio.run(measure(folder, args.prompt))
    print(json.dumps(report))
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
