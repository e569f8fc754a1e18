"""Long contexts over two context-parallel ranks: `python bench/long_context.py [--json OUT]`.

Ledger X10: at 16k tokens, KV striped and heads owned (--attn-cp 2 --dcp 2) against KV and decode
replicated (--attn-cp 2 --dcp 1 --decode-attn replicated): KV bytes per rank, and the time between
tokens, by turns in one run. And the first token of an 8k prompt: two ranks of one core against one.
Of each the quietest turn counts, as what else the host does moves all. A random MLA model whose
decode is mostly attention over the cache: heads and cached row of Kimi Linear (32; 512 + 64), all
else small.
"""

import argparse
import json
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from anabranch.core.request import SamplingParams
from anabranch.engine.llm import LLM

MODEL = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 4096,
    "hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 32,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64,
    "v_head_dim": 64, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "topk_method": "greedy", "n_group": 1,
    "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0,
    "scoring_func": "softmax", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": 32768, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip

TURNS = 3  # of decoding, for each of a prompt


def timed(llm: LLM, prompt: int, seed: int, tokens: int) -> tuple[float, float]:
    """(seconds to the first token, median seconds between tokens) of one request."""
    ids = [(seed + 7 * t) % 4096 for t in range(prompt)]
    stamps = [time.perf_counter()]
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for _ in llm.stream(ids, sampling):
        stamps.append(time.perf_counter())
    gaps = [b - a for a, b in pairwise(stamps[1:])]
    return stamps[1] - stamps[0], statistics.median(gaps) if gaps else 0.0


def measure(folder: Path, context: int, prompt: int, repeats: int) -> dict[str, float]:
    common = {
        "load_format": "dummy", "device": "cpu", "dtype": "float32", "max_model_len": 20480,
        "threads": 1, "kv_pages": 1280, "prefill_chunk": 2048,
    }  # fmt: skip
    striped = LLM(folder, tp=2, attn_cp=2, dcp=2, **common)  # type: ignore[arg-type]
    whole = LLM(  # type: ignore[call-overload]
        folder, tp=2, attn_cp=2, dcp=1, decode_attn="replicated", **common
    )
    alone = LLM(folder, **common)  # type: ignore[arg-type]
    with striped, whole, alone:
        kv = [json.loads(x.ready.info)["kv"]["bytes_per_token_per_rank"] for x in (striped, whole)]
        itl: dict[str, list[float]] = {"striped": [], "whole": []}
        ttft: dict[str, list[float]] = {"cp2": [], "one": []}
        for turn in range(repeats):
            # the same context each turn: its prefill is computed once and kept
            for _ in range(TURNS):
                itl["striped"].append(timed(striped, context, 0, 24)[1])
                itl["whole"].append(timed(whole, context, 0, 24)[1])
            ttft["cp2"].append(timed(striped, prompt, 1000 + turn, 1)[0])
            ttft["one"].append(timed(alone, prompt, 1000 + turn, 1)[0])
    least = {k: min(v) for k, v in {**itl, **ttft}.items()}
    return {
        "kv_ratio": kv[0] / kv[1],
        "itl_striped_ms": round(1e3 * least["striped"], 2),
        "itl_whole_ms": round(1e3 * least["whole"], 2),
        "itl_ratio": round(least["striped"] / least["whole"], 3),
        "ttft_cp2_s": round(least["cp2"], 2),
        "ttft_one_s": round(least["one"], 2),
        "ttft_ratio": round(least["cp2"] / least["one"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", help="write the result to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        report = measure(Path(folder), args.context, args.prompt, args.repeats)
    print(json.dumps(report))
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
