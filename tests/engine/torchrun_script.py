"""What a user runs under torchrun: MODEL TP ATTN_DP; prints tokens and some logits."""

import json
import sys

from anabranch.core.request import SamplingParams
from anabranch.engine.llm import LLM

PROMPTS = [tuple(range(5, 40 + 7 * i)) for i in range(4)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

if __name__ == "__main__":
    with LLM(
        sys.argv[1], tp=int(sys.argv[2]), attn_dp=int(sys.argv[3]), load_format="dummy",
        kv_pages=64, dtype="float32", device="cpu", threads=1,
    ) as llm:  # fmt: skip
        tokens = [completion.tokens for completion in llm.generate(PROMPTS, GREEDY)]
        logits = llm.score(PROMPTS[2], decode_from=20)
        print("RESULT", json.dumps([tokens, [float(x) for x in logits[:, 7]]]), flush=True)
